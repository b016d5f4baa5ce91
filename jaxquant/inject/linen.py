"""Linen face of ``jaxquant.trace``: traces and quantizes every call of a Linen model, whatever its entry point.

    method of a bound module    ──►  pure function of (parameters, other collections, RNG keys, arguments)
                                          │ Engine: trace, choose recipes by parameter path, rewrite
    variables["_overwrite_with_gradient"] ┘ quant state; its gradient holds the new observations

The model becomes an instance of a subclass of its class, which has the same name and wrapped methods. Every entry point
(``init``, ``apply``, ``bind``, ``nn.apply``, a larger float model) calls a method of a bound module. The wrapper of
this method separates the module from its variables and traces the method. ``bind`` also exposes submodules, which are
wrapped when they are bound; this is the only place where jaxquant changes the class of other objects. A thread-local
context marks a running trace, in which every module is the float module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
from flax import core
from flax.core import DenyList, unfreeze
from jax.extend.core import Literal

from jaxquant.backends.native import op_name
from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.paths import at_layer, layer_name, leaves_by_path, map_by_path
from jaxquant.core.qtensor import is_tensor
from jaxquant.inject.faces import STREAMS, explain_errors, face_of, require_float, traced_face
from jaxquant.inject.linen_classes import ModuleCall, make_class, run_plain
from jaxquant.state import watch
from jaxquant.state.table import Tables
from jaxquant.state.tree import OVERWRITE_WITH_GRADIENT
from jaxquant.trace.arguments import mark_static, restore_static
from jaxquant.trace.decisions import FaceHooks
from jaxquant.trace.engine import Engine, Traced
from jaxquant.trace.kernels import LayerKernel
from jaxquant.trace.plan import Contraction


def quantize_linen(model: nn.Module, config: QuantConfig, *example_inputs: Any, **example_kwargs: Any) -> nn.Module:
    """Quantize a Linen model.

    Args:
      model: Linen model; it is not changed.
      config: quantization config.
      example_inputs, example_kwargs: arguments of ``__call__``. Without them, the first call chooses the recipes.

    Raises:
      ValueError: a rule matches no layer, there is no layer to quantize, or the model is already quantized.
    """
    require_float(model)
    face = Face(config)
    if example_inputs or example_kwargs:
        face.engine.decide(face.trace_example(model, *example_inputs, **example_kwargs).analysis)
    return face.of(model)


def missing_state(recipe: str, path: str, field: str) -> str:
    """Return the error message for missing quant state in a call of a Linen model."""
    return (
        f"recipe {recipe!r} at {at_layer(path)} keeps state in the collection '{OVERWRITE_WITH_GRADIENT}', but this "
        f"call has no {field!r} in that collection; pass all variables of model.init, or create the collection with "
        "jaxquant.calibrate; convert quant state of flax with jaxquant.state.from_flax"
    )


def operation_name(site: Contraction) -> str:
    """Return the name of a contraction's state: the name of the module that would run the op in flax's layers."""
    assert site.recipe is not None
    return f"{op_name('einsum' if site.is_einsum else 'dot_general', site.recipe)}_0"


HOOKS = FaceHooks(is_model=True, operation=operation_name, missing=missing_state, has_scopes=True, watch=watch.LINEN)


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """Call of a Linen module as a function of arrays; equal calls share their trace."""

    face: Face
    module: nn.Module
    method: Any
    mutable: Any
    capture: Any
    is_init: bool = False
    # Flax's logical axis rules are thread-local, and sharding constraints in the model read them.
    rules: Any = dataclasses.field(default_factory=lambda: tuple(nn.get_logical_axis_rules()))

    def __call__(self, params: Any, rest: Mapping[str, Any], rngs: Any, args: Any, kwargs: Any) -> Any:
        variables = rest if params is None else {**rest, "params": params}
        if self.is_init:
            with traced_face(self.face):
                return _initialize(self.module, self.method, variables, rngs, args, kwargs)
        options = {"rngs": rngs, "method": self.method, "mutable": self.mutable, "capture_intermediates": self.capture}
        options = {name: value for name, value in options.items() if value not in (None, False)}
        with traced_face(self.face):
            return _function_of(self.module, "apply")(self.module, variables, *args, **options, **kwargs)

    def __hash__(self) -> int:
        return hash((id(self.face), type(self.module), self.method))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Call) or self.face is not other.face:
            return False
        mine, theirs = ((each.method, each.mutable, each.capture, each.is_init, each.rules) for each in (self, other))
        return mine == theirs and _same(self.module, other.module)


def _initialize(module: nn.Module, method: Any, variables: Any, rngs: Any, args: Any, kwargs: Any) -> Any:
    """Run a method as ``init`` does, with existing parameters. Returns its output."""

    def run(scope: Any, *args: Any, **kwargs: Any) -> Any:
        return run_plain(module.clone(parent=scope, _deep_clone=True), method or "__call__", args, kwargs)

    made = DenyList("intermediates")
    return core.apply(run, mutable=made, flags={"initializing": True})(variables, *args, rngs=rngs, **kwargs)[0]


def _function_of(module: nn.Module, name: str) -> Any:
    """Return a float model's own ``init`` or ``apply``; during a call of a quantized model, return ``nn.Module``'s."""
    return getattr(type(module) if face_of(module) is None else nn.Module, name)


def _same(first: Any, second: Any) -> bool:
    """Whether two unbound modules, or fields of modules, compute the same. Arrays are compared by identity."""
    if first is second:
        return True
    if type(first) is not type(second) or hasattr(first, "shape"):
        return False
    if isinstance(first, nn.Module):
        names = [field.name for field in dataclasses.fields(first) if field.name != "parent"]  # pyright: ignore[reportArgumentType]
        return all(_same(getattr(first, name), getattr(second, name)) for name in names)
    if jax.tree_util.all_leaves([first]):
        return bool(first == second)
    (leaves, structure), (others, like) = map(jax.tree.flatten, (first, second))
    return structure == like and all(map(_same, leaves, others))


class Face:
    """State shared by the quantized modules of one model: the engine, and the created classes.

    Args:
      config: quantization config.
    """

    def __init__(self, config: QuantConfig) -> None:
        self.engine = Engine(config, HOOKS)
        self._classes: dict[tuple[type, bool], type] = {}

    # -- decisions ---------------------------------------------------------------------------------------------------

    def trace_example(self, model: nn.Module, *inputs: Any, **kwargs: Any) -> Traced:
        """Trace a call of the float model with abstract parameters."""
        with traced_face(self):
            variables = unfreeze(trace_init(model, *inputs, **kwargs))
        key = jax.eval_shape(lambda: jax.random.key(0))
        use = ModuleCall(model, variables, inputs, kwargs, rngs=dict.fromkeys(STREAMS, key))
        return self.engine.trace(*self._initial_call(use))

    # -- calls -------------------------------------------------------------------------------------------------------

    def call(self, use: ModuleCall) -> Any:
        """Compute a method of an unbound module, like ``nn.Module.apply``."""
        params, rest = collections_of(use.variables)
        self._check_converted(params, use)
        is_watched = _interceptors()
        return self.engine.run(
            Call(self, use.module, use.method, _hashable_filter(use.mutable), use.capture),
            params,
            use.arguments(rest),
            use.state,
            use.key,
            prefix=use.prefix,
            is_whole=use.is_whole,
            # An interceptor is not part of jit's cache key, and its records belong to this call only.
            is_cached=not is_watched,
        )

    def _check_converted(self, params: Any, use: ModuleCall) -> None:
        """Raise if a model in training has converted kernels."""
        if self.engine.config.checkpoint_is_quantized or not any(map(is_tensor, jax.tree.leaves(params, is_tensor))):
            return
        path, kernel = next((path, leaf) for path, leaf in leaves_by_path(params, is_tensor).items() if is_tensor(leaf))
        raise ValueError(
            f"{layer_name('/'.join((*use.prefix, path)).rpartition('/')[0])} has a converted kernel "
            f"({kernel.qvalue.dtype.name}), but checkpoint_is_quantized is false; set checkpoint_is_quantized to true"
        )

    def init_state(self, use: ModuleCall) -> Tables:
        """Create the quant state of the layers that a call runs, from initialized variables. Only traces."""
        return self.engine.init(*self._initial_call(use), prefix=use.prefix, is_whole=use.is_whole)

    def initial_output(self, use: ModuleCall) -> Any:
        """Compute the output of ``init`` in low precision, from the variables that it created."""
        call, params, rest = self._initial_call(use)
        out = self.engine.run(call, params, rest, use.state, use.key, is_whole=use.is_whole)
        return out[0] if call.mutable else out

    def _initial_call(self, use: ModuleCall) -> tuple[Call, Any, tuple[Any, ...]]:
        """Return the call for which ``init`` creates quant state, with its arguments.

        The variables are those that ``init`` created. If they contain more than parameters, for example a decoding
        cache, later calls may take another branch, with arguments of other shapes. The result is then the call that
        ``init`` runs, unless that call leaves a parameter unread.
        """
        params, rest = collections_of(use.variables)
        rest.pop("intermediates", None)
        later = Call(self, use.module, use.method, tuple(rest) or False, False), params, use.arguments(rest)
        if not rest:
            return later
        first = Call(self, use.module, use.method, False, False, is_init=True), params, use.arguments({})
        jaxpr = self.engine.trace(*first).closed.jaxpr
        read = {atom for eqn in jaxpr.eqns for atom in eqn.invars if not isinstance(atom, Literal)}
        return first if read.issuperset(jaxpr.invars[: len(jax.tree.leaves(params))]) else later

    # -- classes -----------------------------------------------------------------------------------------------------

    def of(self, model: nn.Module) -> nn.Module:
        """Return a copy of an unbound model whose calls run quantized."""
        fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.init and f.name != "parent"}  # pyright: ignore[reportArgumentType]
        return self._class(type(model), is_model=True)(parent=None, **fields)

    def wrap_children(self, module: nn.Module, root: nn.Module) -> None:
        """Wrap the existing submodules of a bound module, in place; they live as long as this binding."""
        for child in module._state.children.values():  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(child, nn.Module) and face_of(child) is None:
                object.__setattr__(child, "__class__", self._class(type(child), is_model=False))
                object.__setattr__(child, "_jaxquant_root", root)

    def _class(self, base: type, is_model: bool) -> Any:
        if (base, is_model) not in self._classes:
            self._classes[base, is_model] = make_class(self, base, is_model=is_model)
        return self._classes[base, is_model]

    @staticmethod
    def restored(base: type, fields: dict[str, Any], config: QuantConfig, decisions: Any) -> nn.Module:
        """Return the model that was pickled."""
        face = Face(config)
        face.engine.decisions = decisions
        return face.of(base(**fields, parent=None))


def collections_of(variables: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Split a model's variables into its parameters (or None) and all other collections except quant state."""
    rest = {name: value for name, value in variables.items() if name not in ("params", OVERWRITE_WITH_GRADIENT)}
    return variables.get("params"), rest


def trace_init(model: nn.Module, *example_inputs: Any, **example_kwargs: Any) -> Any:
    """Trace a model's initialization. Returns the shapes of its variables."""

    def initialize(key: jax.Array, inputs: Any) -> Any:
        args, kwargs = restore_static(inputs)
        return _function_of(model, "init")(model, dict.fromkeys(STREAMS, key), *args, **kwargs)

    inputs = mark_static((example_inputs, example_kwargs), numbers=False)
    with explain_errors(model, has_inputs=bool(example_inputs or example_kwargs)):
        return jax.eval_shape(initialize, jax.random.key(0), inputs)


def find_kernels(
    model: nn.Module, variables: Mapping[str, Any], config: QuantConfig, *inputs: Any, **kwargs: Any
) -> dict[str, LayerKernel]:
    """Find every kernel that a call with example inputs runs quantized. Only traces.

    Args:
      model: float model.
      variables: parameters, and the quant state of training; any objects with a shape and a dtype.
      config: quantization config.
      inputs, kwargs: arguments of the call.

    Returns:
      Kernels by "/"-joined path of the parameter.

    Raises:
      ValueError: the variables have no parameters; a parameter is already converted, is missing or has another shape;
        a kernel is read in a dtype that cannot be inferred after conversion; quant state is missing.
    """
    if "params" not in variables:
        raise ValueError(f"variables have no collection 'params', got {sorted(variables)}; pass all of model.init")
    if config.resolver() is None:
        return {}
    params, rest = collections_of(variables)
    given = leaves_by_path(params, is_tensor)
    for path, leaf in given.items():
        if is_tensor(leaf):
            raise ValueError(f"parameter {path!r} is already {leaf.qvalue.dtype.name}; pass the float parameters")
    made = nn.meta.unbox(unfreeze(trace_init(model, *inputs, **kwargs))).get("params", {})

    def as_stored(path: str, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, given.get(path, leaf).dtype)

    face = Face(config)
    call = Call(face, model, None, tuple(rest) or False, False)
    args = rest, dict.fromkeys(STREAMS, jax.random.key(0)), inputs, kwargs
    state = variables.get(OVERWRITE_WITH_GRADIENT, {})

    def find(params: Any) -> dict[str, LayerKernel]:
        found, _ = face.engine.find_kernels(call, params, args, state)
        return {"/".join(name): kernel for name, kernel in found.items()}

    stored = map_by_path(as_stored, made)
    kernels = find(stored)
    served = kernels if jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype, stored, made)) else find(made)
    made = leaves_by_path(made)
    for path, leaf in made.items():
        if path not in given:
            raise ValueError(f"the variables have no parameter {path!r}; pass all parameters of the model")
        if tuple(given[path].shape) != tuple(leaf.shape):
            raise ValueError(
                f"parameter {path!r} has shape {tuple(given[path].shape)}, but the model needs {tuple(leaf.shape)}; "
                "pass the parameters of this model"
            )
    for path, kernel in kernels.items():
        if kernel.dtype != served[path].dtype:
            own, stored = made[path].dtype.name, given[path].dtype.name
            raise ValueError(
                f"{layer_name(kernel.path)} has param_dtype {own} and no dtype, but the kernel to convert is {stored}; "
                f"set dtype or param_dtype of the layer to {stored}"
            )
    return kernels


def _hashable_filter(mutable: Any) -> Any:
    return tuple(mutable) if isinstance(mutable, (list, set)) else mutable


def _interceptors() -> bool:
    """Whether a Linen method interceptor is active. Linen has no public API for this."""
    return bool(nn.module._global_interceptor_stack)
