"""An NNX model as a face of ``jaxquant.trace``: its modules' methods are traced and quantized.

    model(x)   ──►  nnx.split of (model, arguments)  ──►  pure function of (parameters, other variables)
                                                            │ Engine: trace, decide by the parameters' paths, rewrite
                    QuantState variables of the model  ─────┘ and as their gradient what was seen

A copy of the model is made that shares its arrays. In it every module's class becomes a subclass of the same name whose
methods are traced when plain Python calls them; within a trace they are the plain methods. Quant state lies in
variables beside the parameter that it belongs to: under ``dot_general`` or ``einsum_op`` of flax's linear layers, else
under ``quant_NAME`` of the module that owns the parameter.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxquant.config.quant_config import QuantConfig
from jaxquant.config.rules import Decision
from jaxquant.core.paths import at_layer, layer_name
from jaxquant.core.qtensor import ConvertedKernel
from jaxquant.inject.faces import at_work, quantized_with, refuse_twice, subclass, wrap_methods
from jaxquant.inject.nnx_call import Call
from jaxquant.inject.nnx_layers import (
    CONTAINERS,
    PLAIN_OPS,
    StateHolder,
    call_layers,
    check_alone,
    copy_model,
    has_plain_op,
    holders,
    linear_modules,
    op_name,
    out_features,
    row_alone,
    takes_attributes,
)
from jaxquant.state import watch
from jaxquant.state.nnx import QuantState
from jaxquant.trace.decisions import Dialect
from jaxquant.trace.engine import Engine, Traced
from jaxquant.trace.plan import Contraction
from jaxquant.trace.report import Row


class ConvertedParam(nnx.Variable[ConvertedKernel]):
    """A converted kernel in the place of an author's parameter; no optimizer that trains ``nnx.Param`` touches it."""

    def __getitem__(self, index: Any) -> Any:
        value = self.get_raw_value()
        return value if index is Ellipsis and isinstance(value, ConvertedKernel) else super().__getitem__(index)


def quantize_nnx(model: nnx.Module, config: QuantConfig, *example_inputs: Any, **example_kwargs: Any) -> Any:
    """Quantize an NNX model.

    Args:
      model: the model; it stays as it is, and shares its arrays with what comes back.
      config: what is asked.
      example_inputs, example_kwargs: arguments of ``__call__``. Without them only flax's linear layers get the quant
        state of a recipe that keeps some.

    Raises:
      ValueError: a rule that matches no layer, no layer at all, or a model that is quantized already.
    """
    refuse_twice(model)
    face = Face.of(config, model)
    copy = copy_model(model)
    states: dict[str, Any] = {}
    if example_inputs or example_kwargs:
        states = face.init(copy, *example_inputs, **example_kwargs)
    else:
        face.check_rules(copy)
    face.hold_states(copy, states)
    return face.adopt(copy)


def describe(model: nnx.Module, config: QuantConfig, *args: Any, **kwargs: Any) -> list[Row]:
    """List the layers of a model, those first that a call with example inputs runs; see ``describe_layers``.

    Of a quantized model without example inputs, what was decided when it was quantized counts beside rules and names.
    """
    known: Mapping[str, Decision] = {}
    if (before := quantized_with(model)) is not None:
        known = {} if before.engine.decisions is None else before.engine.decisions.paths
        model = plain_model(model)
    face, rows = Face.of(config, model), []
    if args or kwargs:
        rows, known = face.engine.layers(face.trace_example(model, *args, **kwargs).analysis), {}
    paths, resolver = {row.path for row in rows}, face.engine.resolver
    modules = dict(linear_modules(model))
    if resolver is not None and modules and not (args or kwargs):
        resolver.check_used(modules)
    floats = {} if resolver is None else resolver.float_blocks(modules, must_have=False)
    for path, module in modules.items():
        if path not in paths:
            decision = Decision(None, "quantization is off")
            if resolver is not None:
                decision = Decision(None, floats[path]) if path in floats else resolver(path, out_features(module))
                is_known_float = path in known and known[path].recipe is None
                decision = known[path] if is_known_float and decision.rule is None else decision
            rows.append(row_alone(path, module, decision, face.engine.backend))
    return rows


def plain_model(model: nnx.Module) -> nnx.Module:
    """Return a copy of a quantized model in which every module has its own class again, with the same arrays."""
    copy = copy_model(model)
    for _, node in nnx.iter_graph(copy):
        if quantized_with(node) is not None:
            object.__setattr__(node, "__class__", type(node)._jaxquant_base)  # pyright: ignore[reportAttributeAccessIssue]
    return copy


def _missing(recipe: str, path: str, field: str) -> str:
    return (
        f"recipe {recipe!r} at {at_layer(path)} keeps quant state, and the model has no {field!r} there; give "
        "maybe_quantize_model example inputs whose call runs that layer, and convert what was trained or calibrated "
        "(jaxquant.calibrate)"
    )


def _misfit(path: str, field: str, has: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    if len(has) == len(wanted) + 1:
        return (
            f"{layer_name(path)} has quant state of {has[0]} layers in the call of one: nnx.scan and nnx.vmap must map "
            "jaxquant.state.QuantState along axis 0, as in nnx.StateAxes({jaxquant.state.TRAINED: 0, ...: None})"
        )
    return f"{layer_name(path)} has quant state {field!r} of shape {has}, and this call needs {wanted}"


class Face:
    """What the quantized modules of one model share: the engine, and the classes that were made.

    Args:
      config: what is asked.
      operations: name of the op of every layer that has one of flax's own, by path.
      modules: paths of the modules that take attributes.
    """

    def __init__(self, config: QuantConfig, operations: Mapping[str, str], modules: Collection[str]) -> None:
        self._operations, self._modules = operations, modules
        dialect = Dialect(
            is_model=True,
            operation=self._operation,
            owner=self._owner,
            missing=_missing,
            misfit=_misfit,
            watch=watch.NNX,
        )
        self.engine = Engine(config, dialect)
        self._classes: dict[tuple[type, str], type] = {}

    @classmethod
    def of(cls, config: QuantConfig, model: nnx.Module) -> Face:
        """Make the face of a float model."""
        operations = {path: op_name(module) for path, module in linear_modules(model) if has_plain_op(module)}
        nodes = ((path, node) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Module))
        return cls(
            config, operations, {"/".join(map(str, path)) for path, node in nodes if takes_attributes(node)} | {""}
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the config and what was decided."""
        return _restored, (self.engine.config, self._operations, self._modules, self.engine.decisions)

    def _operation(self, site: Contraction) -> str:
        """Return the name of the holder of a contraction's state, an attribute of the parameter's module."""
        if site.path in self._operations:
            return self._operations[site.path]
        return f"quant_{site.names[0].removeprefix(self._owner(site)).strip('/').replace('/', '_')}"

    def _owner(self, site: Contraction) -> str:
        """Find the module that owns the parameter, or the next above it that takes attributes."""
        if site.path in self._operations:
            return site.path
        owner = site.names[0].rpartition("/")[0]
        while owner not in self._modules:
            owner = owner.rpartition("/")[0]
        return owner

    # -- decisions and state -----------------------------------------------------------------------------------------

    def init(self, model: nnx.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Decide on the trace of a call with example inputs, and make the quant state of its layers."""
        return self.engine.init(*self._example(model, args, kwargs))

    def trace_example(self, model: nnx.Module, *args: Any, **kwargs: Any) -> Traced:
        """Trace a call with example inputs, arrays or shapes, of a model whose classes are its own."""
        return self.engine.trace(*self._example(model, args, kwargs))

    def _example(self, model: nnx.Module, args: Any, kwargs: Any) -> tuple[Call, Any, tuple[Any, Any]]:
        args, kwargs = jax.tree.map(_as_array, (args, kwargs))
        return self._split(model, type(model), "__call__", args, kwargs)

    def convert(self, model: nnx.Module, *args: Any, **kwargs: Any) -> tuple[dict[str, ConvertedKernel], bool]:
        """Convert every kernel that a call with example inputs runs quantized; without them, those of flax's layers.

        Args:
          model: of classes of its own, with the quant state of training.
          args, kwargs: the example inputs.

        Returns:
          By "/"-joined path of the parameter, its ``ConvertedKernel``, and whether a quantized layer's weight stays
          float.

        Raises:
          ValueError: quant state that is missing, or has not seen what a static scale must know; without example
            inputs, a layer that may not read its kernel as its class does.
        """
        if args or kwargs:
            call, params, rest = self._example(model, args, kwargs)
        else:
            assert self.engine.resolver is not None
            paths = dict(linear_modules(model))
            check_alone(model, [path for path in paths if self.engine.resolver(path, 0).recipe is not None])
            call, params, rest = call_layers(model, paths)
        state = _named(nnx.to_pure_dict(nnx.state(model, QuantState)))
        found, reasons = self.engine.convert(call, params, rest, state)
        return {"/".join(name): kernel for name, kernel in found.items()}, bool(reasons)

    def check_rules(self, model: nnx.Module) -> None:
        """Check the rules on flax's linear layers, where nothing was traced that could show the others."""
        resolver = self.engine.resolver
        assert resolver is not None
        layers = {path: resolver(path, out_features(module)) for path, module in linear_modules(model)}
        if layers:
            resolver.check_used(layers)
        others = any(param.ndim > 1 for param in jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param))))
        if not any(decision.recipe for decision in layers.values()) and (layers or not others):
            what = "; ".join(f"{path}: {each.reason}" for path, each in layers.items()) or "it has no linear layer"
            asked = self.engine.config.quantization
            raise ValueError(f"quantization {asked!r} would quantize no layer of this model ({what})")

    def hold_states(self, model: nnx.Module, states: Mapping[str, Any]) -> None:
        """Add to every layer's module the variables of its quant state, those of flax's layers that did not run too."""
        self._hold(model, states)
        resolver, left = self.engine.resolver, []
        assert resolver is not None
        for path, module in linear_modules(model):
            if path not in self._operations or getattr(module, op_name(module), None) not in (None, *PLAIN_OPS):
                continue
            known = {} if self.engine.decisions is None else self.engine.decisions.paths
            decision = known.get(path) or resolver(path, out_features(module))
            if decision.recipe is not None and decision.recipe.is_stateful:
                left.append(path)
        if left:  # by an engine of its own: what no call ran is not decided yet
            alone = Engine(self.engine.config, self.engine.dialect)
            self._hold(model, alone.init(*call_layers(model, left), is_whole=False))

    def _hold(self, model: nnx.Module, states: Mapping[str, Any]) -> None:
        modules = {"/".join(map(str, path)): node for path, node in nnx.iter_graph(model)}
        for path, values in holders(states):
            owner, _, name = path.rpartition("/")
            setattr(modules[owner], name, nnx.data(StateHolder(name, values)))

    # -- calls -------------------------------------------------------------------------------------------------------

    def call(self, module: Any, kind: type, name: str, args: Any, kwargs: Any) -> Any:
        """Compute a method of a module; ``kind`` is its own class."""
        path = type(module)._jaxquant_path
        prefix = tuple(path.split("/")) if path else ()
        call, params, rest = self._split(module, kind, name, args, kwargs)
        own: Any = nnx.to_pure_dict(rest[0])
        state, is_whole = _named(own.get(0, {})), not prefix and name == "__call__"

        def plain() -> Any:
            """Run it as it is where nothing is quantized: what it sets and returns is the modules themselves."""
            with at_work(self):
                return None, getattr(kind, name)(module, *args, **kwargs)

        ran = self.engine.run(call, params, rest, state, prefix=prefix, is_whole=is_whole, plain=plain)
        if ran[0] is None:
            return ran[1]
        told, changed, made = ran
        values, out = nnx.merge(*made)
        told.repeat((module, args, kwargs), changed, values)
        return out

    def _split(self, module: Any, kind: type, name: str, args: Any, kwargs: Any) -> tuple[Call, Any, tuple[Any, Any]]:
        own = (_own((nnx.Param, ConvertedParam, _is_norms_scale)), _own(QuantState), ...)
        graph, params, quant, rest = nnx.split((module, args, kwargs), *own)
        parts: Any = params
        kinds = tuple(type(leaf) for leaf in jax.tree.leaves((args, kwargs)))
        return Call(self, kind, name, graph, kinds), parts.get(0, nnx.State({})), (quant, rest)

    # -- classes -----------------------------------------------------------------------------------------------------

    def adopt(self, model: nnx.Module) -> nnx.Module:
        """Change the class of every module of a model, in place."""
        for path, node in list(nnx.iter_graph(model)):
            if isinstance(node, nnx.Module) and not isinstance(node, (*CONTAINERS, StateHolder)):
                if quantized_with(node) is not None:
                    continue
                object.__setattr__(node, "__class__", self._class(type(node), "/".join(map(str, path))))
        return model

    def _class(self, base: type, path: str) -> type:
        """Make the class of one module. It knows the path: flax's ``ToNNX`` takes every attribute for a variable."""
        if (base, path) not in self._classes:
            fields = {**wrap_methods(base, nnx.Module, _is_method, Face.call), "_jaxquant_path": path}
            self._classes[base, path] = subclass(self, base, fields, _picklable(type(base)))
        return self._classes[base, path]


def _restored(config: QuantConfig, operations: Mapping[str, str], modules: Collection[str], decisions: Any) -> Face:
    face = Face(config, operations, modules)
    face.engine.decisions = decisions
    return face


@functools.cache
def _picklable(metaclass: type) -> type:
    """Make a metaclass whose classes, which no Python module holds, are pickled with their face."""
    made = type(metaclass.__name__, (metaclass,), {})
    copyreg.pickle(made, lambda kind: (_class_of, (kind._jaxquant_face, kind._jaxquant_base, kind._jaxquant_path)))
    return made


def _class_of(face: Face, base: type, path: str) -> type:
    return face._class(base, path)


def _is_method(name: str, value: Any) -> bool:
    """Whether a class attribute gets the instance when it is called: a function, jitted or not, but no partial."""
    is_bound = callable(value) and hasattr(type(value), "__get__")
    return is_bound and not isinstance(value, (type, staticmethod, classmethod))


def _own(kind: Any) -> Callable[[Any, Any], bool]:
    """Filter the variables of a type, or of several, that are of the module, not of the arguments."""
    is_kind = nnx.filterlib.to_predicate(kind)
    return lambda path, value: path[0] == 0 and is_kind(path, value)


def _is_norms_scale(path: Any, value: Any) -> bool:
    """Whether a leaf is a scale of ``nnx.WeightNorm``: an array, by the path of the parameter that it scales."""
    return (
        not isinstance(value, nnx.Variable) and len(path) > 2 and path[-2] == "scales" and isinstance(path[-1], tuple)
    )


def _named(tree: Any) -> Any:
    """Spell the keys of a tree as paths do."""
    return {str(name): _named(value) for name, value in tree.items()} if isinstance(tree, Mapping) else tree


def _as_array(leaf: Any) -> Any:
    """Return an array for a shape; one that takes no memory."""
    if isinstance(leaf, jax.ShapeDtypeStruct) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return leaf
