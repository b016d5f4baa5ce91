"""NNX face of ``jaxquant.trace``: traces and quantizes the methods of an NNX model's modules.

    model(x)   ──►  nnx.split of (model, arguments)  ──►  pure function of (parameters, other variables)
                                                            │ Engine: trace, choose recipes by parameter path, rewrite
                    QuantState variables of the model  ─────┘ their gradient holds the new observations

The quantized model is a copy that shares its arrays with the original. In it, the class of every module becomes a
subclass with the same name, whose methods are traced when plain Python calls them; during a trace they are the plain
methods. Quant state is stored in a variable ``quant_NAME`` next to each parameter, in the module that owns it.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.paths import at_layer, layer_name
from jaxquant.core.qtensor import QTensor
from jaxquant.core.quant_state import SCALE, STEP
from jaxquant.inject import faces
from jaxquant.inject.faces import explain_errors, face_of, require_float, subclass, traced_face, wrap_methods
from jaxquant.inject.nnx_call import Call
from jaxquant.state import watch
from jaxquant.state.nnx import QuantState
from jaxquant.state.table import Tables, make_state, move_row_axis, rows_of
from jaxquant.trace.decisions import FaceHooks
from jaxquant.trace.engine import Engine, Traced
from jaxquant.trace.plan import Contraction
from jaxquant.trace.report import Report

_CONTAINERS = (nnx.List, nnx.Dict)
"""Modules that only hold other modules and have no user-defined methods."""


class ConvertedParam(nnx.Variable[QTensor]):
    """Converted kernel that replaces a parameter; optimizers that train ``nnx.Param`` skip it."""

    def __getitem__(self, index: Any) -> Any:
        value = self.get_raw_value()
        return value if index is Ellipsis and isinstance(value, QTensor) else super().__getitem__(index)


def quantize_nnx(model: nnx.Module, config: QuantConfig, *example_inputs: Any, **example_kwargs: Any) -> Any:
    """Quantize an NNX model.

    Args:
      model: NNX model; it is not changed, and shares its arrays with the quantized model.
      config: quantization config.
      example_inputs, example_kwargs: arguments of ``__call__``, required if a recipe keeps quant state. Without them,
        the first call chooses the recipes.

    Raises:
      ValueError: a rule matches no layer, there is no layer to quantize, or the model is already quantized.
      TypeError: a recipe keeps quant state, and no example inputs were passed.
    """
    require_float(model)
    face = Face.of(config, model)
    copy = copy_model(model)
    if example_inputs or example_kwargs or face.stateful:
        face.add_states(copy, face.init(copy, *example_inputs, **example_kwargs))
    return face.replace_classes(copy)


def describe(model: nnx.Module, config: QuantConfig, *args: Any, **kwargs: Any) -> Report:
    """Return a report row for each layer that a call with example inputs runs; see ``describe_layers``."""
    model = model if face_of(model) is None else plain_model(model)
    face = Face.of(config, model)
    return face.engine.layers(face.trace_example(model, *args, **kwargs).analysis)


def copy_model(model: nnx.Module) -> Any:
    """Copy a model; the variables are new objects with the same arrays."""
    graph, state = nnx.split(model)
    return nnx.merge(graph, state, copy=True)


def plain_model(model: nnx.Module) -> nnx.Module:
    """Return a copy of a quantized model in which every module has its original class, with the same arrays."""
    copy = copy_model(model)
    for _, node in nnx.iter_graph(copy):
        if face_of(node) is not None:
            object.__setattr__(node, "__class__", type(node)._jaxquant_base)  # pyright: ignore[reportAttributeAccessIssue]
    return copy


def _missing(recipe: str, path: str, field: str) -> str:
    return (
        f"recipe {recipe!r} needs quant state, but the model has no {field!r} at {at_layer(path)}; pass example inputs "
        "that reach this layer to maybe_quantize_model, and before jaxquant.convert train the model or call "
        "jaxquant.calibrate"
    )


def _misfit(path: str, field: str, has: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    if len(has) == len(wanted) + 1:
        return (
            f"a call of {layer_name(path)} got the quant state of {has[0]} layers; map quant state along axis 0 in "
            "nnx.scan or nnx.vmap, with nnx.StateAxes({(nnx.Param, jaxquant.state.QuantState): 0, ...: None})"
        )
    return f"{layer_name(path)} has quant state {field!r} of shape {has}, but this call needs {wanted}"


class Face:
    """State shared by the quantized modules of one model: the engine, and the created classes.

    Args:
      config: quantization config.
      modules: paths of the modules that accept new attributes.
    """

    def __init__(self, config: QuantConfig, modules: Collection[str]) -> None:
        self._modules = modules
        hooks = FaceHooks(
            is_model=True,
            operation=self._operation,
            owner=self._owner,
            missing=_missing,
            misfit=_misfit,
            watch=watch.NNX,
        )
        self.engine = Engine(config, hooks)
        self._classes: dict[tuple[type, str], type] = {}

    @classmethod
    def of(cls, config: QuantConfig, model: nnx.Module) -> Face:
        """Create the face of a float model."""
        nodes = ((path, node) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Module))
        # A list cannot hold quant state, and a bridge treats every attribute as a variable of its Linen module.
        no_attributes = (*_CONTAINERS, nnx.bridge.ToNNX)
        return cls(
            config, {"/".join(map(str, path)) for path, node in nodes if not isinstance(node, no_attributes)} | {""}
        )

    @property
    def stateful(self) -> str:
        """Name of a recipe that keeps quant state, or "" if none does."""
        recipes = () if self.engine.resolver is None else self.engine.resolver.recipes
        return next((recipe.name for recipe in recipes if recipe.is_stateful), "")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the face as its config and decisions."""
        return _restored, (self.engine.config, self._modules, self.engine.decisions)

    def _operation(self, site: Contraction) -> str:
        """Return the attribute name of a contraction's state in the parameter's module."""
        return f"quant_{site.names[0].removeprefix(self._owner(site)).strip('/').replace('/', '_')}"

    def _owner(self, site: Contraction) -> str:
        """Return the path of the module that owns the parameter, or of its nearest ancestor that accepts attributes."""
        owner = site.names[0].rpartition("/")[0]
        while owner not in self._modules:
            owner = owner.rpartition("/")[0]
        return owner

    # -- decisions and state -----------------------------------------------------------------------------------------

    def init(self, model: nnx.Module, *args: Any, **kwargs: Any) -> Tables:
        """Choose recipes on the trace of a call with example inputs, and create the quant state of its layers."""
        return self.engine.init(*self._example(model, args, kwargs))

    def trace_example(self, model: nnx.Module, *args: Any, **kwargs: Any) -> Traced:
        """Trace a call of a model with its original classes; the example inputs are arrays or shapes."""
        return self.engine.trace(*self._example(model, args, kwargs))

    def _example(self, model: nnx.Module, args: Any, kwargs: Any) -> tuple[Call, Any, tuple[Any, Any]]:
        if not callable(model):
            raise TypeError(f"{type(model).__name__} has no __call__; quantize the module that calls these layers")
        use = f", because recipe {self.stateful!r} needs quant state" if self.stateful else ""
        example = self._split(model, type(model), "__call__", *jax.tree.map(_as_array, (args, kwargs)))
        with explain_errors(model, has_inputs=bool(args or kwargs), use=use):
            self.engine.trace(*example)
        return example

    def convert(self, model: nnx.Module, *args: Any, **kwargs: Any) -> tuple[dict[str, QTensor], bool]:
        """Convert every kernel that a call with example inputs runs quantized.

        Args:
          model: model with its original classes and the quant state of training.
          args, kwargs: example inputs.

        Returns:
          Each ``QTensor`` by the "/"-joined path of its parameter, and whether the weight of a quantized layer stays in
          float.

        Raises:
          ValueError: quant state is missing, or has no observation for a static scale.
        """
        call, params, rest = self._example(model, args, kwargs)
        state = nnx.to_pure_dict(nnx.state(model, QuantState))
        found, reasons = self.engine.convert(call, params, rest, state)
        return {"/".join(name): kernel for name, kernel in found.items()}, bool(reasons)

    def add_states(self, model: nnx.Module, states: Tables) -> None:
        """Add a variable with the quant state to the module of every weight."""
        modules = {"/".join(map(str, path)): node for path, node in nnx.iter_graph(model)}
        layers: dict[str, dict[str, Any]] = {}
        for row, fields in rows_of(states).items():
            layer, _, tensor = row.rpartition("/")
            layers.setdefault(layer, {})[tensor] = fields
        for layer, rows in layers.items():
            owner, _, name = layer.rpartition("/")
            # Axes of scanned layers and of experts come first, so that a transform that maps parameters along axis 0
            # also maps their state along axis 0.
            lead = min(row[STEP].ndim if STEP in row else row[SCALE].ndim - 1 for row in rows.values())
            setattr(modules[owner], name, QuantState(move_row_axis(make_state(rows), lead)))

    # -- calls -------------------------------------------------------------------------------------------------------

    def call(self, module: Any, kind: type, name: str, args: Any, kwargs: Any) -> Any:
        """Compute a method of a module; ``kind`` is the original class of the module."""
        path = type(module)._jaxquant_path
        prefix = tuple(path.split("/")) if path else ()
        call, params, rest = self._split(module, kind, name, args, kwargs)
        own: Any = nnx.to_pure_dict(rest[0])
        state, is_whole = own.get(0, {}), not prefix and name == "__call__"
        for part in reversed(prefix):
            state = {part: state}

        def plain() -> Any:
            """Run the original method: if nothing is quantized, it sets and returns the original modules."""
            with traced_face(self):
                return None, getattr(kind, name)(module, *args, **kwargs)

        ran = self.engine.run(call, params, rest, state, prefix=prefix, is_whole=is_whole, plain=plain)
        if ran[0] is None:
            return ran[1]
        effects, changed, made = ran
        values, out = nnx.merge(*made)
        effects.repeat((module, args, kwargs), changed, values)
        return out

    def _split(self, module: Any, kind: type, name: str, args: Any, kwargs: Any) -> tuple[Call, Any, tuple[Any, Any]]:
        own = (_owned((nnx.Param, ConvertedParam, _is_norms_scale)), _owned(QuantState), ...)
        graph, params, quant, rest = nnx.split((module, args, kwargs), *own)
        parts: Any = params
        kinds = tuple(type(leaf) for leaf in jax.tree.leaves((args, kwargs)))
        return Call(self, kind, name, graph, kinds), parts.get(0, nnx.State({})), (quant, rest)

    # -- classes -----------------------------------------------------------------------------------------------------

    def replace_classes(self, model: nnx.Module) -> nnx.Module:
        """Change the class of every module of a model, in place."""
        for path, node in list(nnx.iter_graph(model)):
            if isinstance(node, nnx.Module) and not isinstance(node, _CONTAINERS):
                if face_of(node) is not None:
                    continue
                object.__setattr__(node, "__class__", self._class(type(node), "/".join(map(str, path))))
        return model

    def _class(self, base: type, path: str) -> type:
        """Create the class of one module. It stores the path, because ``ToNNX`` treats attributes as variables."""
        if (base, path) not in self._classes:
            fields = {**wrap_methods(base, nnx.Module, _is_method, Face.call), "_jaxquant_path": path}
            if not path:  # flax's own repr shows the parts
                fields |= dict.fromkeys(("__repr__", "__str__"), faces.describe_model)
            self._classes[base, path] = subclass(self, base, fields, _picklable(type(base)))
        return self._classes[base, path]


def _restored(config: QuantConfig, modules: Collection[str], decisions: Any) -> Face:
    face = Face(config, modules)
    face.engine.decisions = decisions
    return face


@functools.cache
def _picklable(metaclass: type) -> type:
    """Create a metaclass whose classes can be pickled although no Python module has them."""
    made = type(metaclass.__name__, (metaclass,), {})
    copyreg.pickle(made, lambda kind: (_class_of, (kind._jaxquant_face, kind._jaxquant_base, kind._jaxquant_path)))
    return made


def _class_of(face: Face, base: type, path: str) -> type:
    return face._class(base, path)


def _is_method(name: str, value: Any) -> bool:
    """Whether a class attribute is a method that receives the instance: a function, jitted or not, but no partial."""
    is_bound = callable(value) and hasattr(type(value), "__get__")
    return is_bound and not isinstance(value, (type, staticmethod, classmethod))


def _owned(kind: Any) -> Callable[[Any, Any], bool]:
    """Return a filter for variables of the given type or types that belong to the module, not to its arguments."""
    is_kind = nnx.filterlib.to_predicate(kind)
    return lambda path, value: path[0] == 0 and is_kind(path, value)


def _is_norms_scale(path: Any, value: Any) -> bool:
    """Whether a leaf is a scale of ``nnx.WeightNorm``: an array whose key is the path of the scaled parameter."""
    return (
        not isinstance(value, nnx.Variable) and len(path) > 2 and path[-2] == "scales" and isinstance(path[-1], tuple)
    )


def _as_array(leaf: Any) -> Any:
    """Return a broadcast array, which takes no memory, for a shape; return other leaves unchanged."""
    if isinstance(leaf, jax.ShapeDtypeStruct) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return leaf
