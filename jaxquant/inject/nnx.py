"""An NNX model as a face of ``jaxquant.trace``: its modules' methods are traced and quantized.

    model(x)   ──►  nnx.split of (model, arguments)  ──►  pure function of (parameters, other variables)
                                                            │ Engine: trace, decide by the parameters' paths, rewrite
                    QuantState variables of the model  ─────┘ and as their gradient what was seen

A copy of the model is made that shares its arrays. In it every module's class becomes a subclass of the same name whose
methods are traced when plain Python calls them; within a trace they are the plain methods. Quant state is
stored in a variable ``quant_NAME`` next to each parameter, in the module that owns it.
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
from jaxquant.inject.faces import at_work, explained, quantized_with, refuse_twice, subclass, wrap_methods
from jaxquant.inject.nnx_call import Call
from jaxquant.state import watch
from jaxquant.state.nnx import QuantState
from jaxquant.state.table import Tables, make_state, move_row_axis, rows_of
from jaxquant.trace.decisions import FaceHooks
from jaxquant.trace.engine import Engine, Traced
from jaxquant.trace.plan import Contraction
from jaxquant.trace.report import Row

_CONTAINERS = (nnx.List, nnx.Dict)
"""Modules that hold others, and have no methods of an author's."""


class ConvertedParam(nnx.Variable[QTensor]):
    """A converted kernel in the place of an author's parameter; no optimizer that trains ``nnx.Param`` touches it."""

    def __getitem__(self, index: Any) -> Any:
        value = self.get_raw_value()
        return value if index is Ellipsis and isinstance(value, QTensor) else super().__getitem__(index)


def quantize_nnx(model: nnx.Module, config: QuantConfig, *example_inputs: Any, **example_kwargs: Any) -> Any:
    """Quantize an NNX model.

    Args:
      model: the model; it stays as it is, and shares its arrays with what comes back.
      config: what is asked.
      example_inputs, example_kwargs: arguments of ``__call__``, required by a recipe that keeps quant state; without
        them the first call decides.

    Raises:
      ValueError: a rule that matches no layer, no layer at all, or a model that is quantized already.
      TypeError: a recipe keeps quant state, and there are no example inputs.
    """
    refuse_twice(model)
    face = Face.of(config, model)
    copy = copy_model(model)
    if example_inputs or example_kwargs or face.stateful:
        face.hold_states(copy, face.init(copy, *example_inputs, **example_kwargs))
    return face.adopt(copy)


def describe(model: nnx.Module, config: QuantConfig, *args: Any, **kwargs: Any) -> list[Row]:
    """List the layers that a call with example inputs runs; see ``describe_layers``."""
    model = model if quantized_with(model) is None else plain_model(model)
    face = Face.of(config, model)
    return face.engine.layers(face.trace_example(model, *args, **kwargs).analysis)


def copy_model(model: nnx.Module) -> Any:
    """Copy a model; variables are new objects around the same arrays."""
    graph, state = nnx.split(model)
    return nnx.merge(graph, state, copy=True)


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
            "jaxquant.state.QuantState along axis 0, as in nnx.StateAxes({(nnx.Param, jaxquant.state.QuantState): 0, "
            "...: None})"
        )
    return f"{layer_name(path)} has quant state {field!r} of shape {has}, and this call needs {wanted}"


class Face:
    """What the quantized modules of one model share: the engine, and the classes that were made.

    Args:
      config: what is asked.
      modules: paths of the modules that take attributes.
    """

    def __init__(self, config: QuantConfig, modules: Collection[str]) -> None:
        self._modules = modules
        dialect = FaceHooks(
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
        nodes = ((path, node) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Module))
        # A list cannot hold quant state, and to a bridge every attribute is a variable of its Linen module.
        no_attributes = (*_CONTAINERS, nnx.bridge.ToNNX)
        return cls(
            config, {"/".join(map(str, path)) for path, node in nodes if not isinstance(node, no_attributes)} | {""}
        )

    @property
    def stateful(self) -> str:
        """The name of a recipe that keeps quant state, or "" if none does."""
        recipes = () if self.engine.resolver is None else self.engine.resolver.recipes
        return next((recipe.name for recipe in recipes if recipe.is_stateful), "")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the config and what was decided."""
        return _restored, (self.engine.config, self._modules, self.engine.decisions)

    def _operation(self, site: Contraction) -> str:
        """Return the name of the holder of a contraction's state, an attribute of the parameter's module."""
        return f"quant_{site.names[0].removeprefix(self._owner(site)).strip('/').replace('/', '_')}"

    def _owner(self, site: Contraction) -> str:
        """Find the module that owns the parameter, or the next above it that takes attributes."""
        owner = site.names[0].rpartition("/")[0]
        while owner not in self._modules:
            owner = owner.rpartition("/")[0]
        return owner

    # -- decisions and state -----------------------------------------------------------------------------------------

    def init(self, model: nnx.Module, *args: Any, **kwargs: Any) -> Tables:
        """Decide on the trace of a call with example inputs, and make the quant state of its layers."""
        return self.engine.init(*self._example(model, args, kwargs))

    def trace_example(self, model: nnx.Module, *args: Any, **kwargs: Any) -> Traced:
        """Trace a call with example inputs, arrays or shapes, of a model whose classes are its own."""
        return self.engine.trace(*self._example(model, args, kwargs))

    def _example(self, model: nnx.Module, args: Any, kwargs: Any) -> tuple[Call, Any, tuple[Any, Any]]:
        if not callable(model):
            raise TypeError(f"{type(model).__name__} has no __call__; quantize the module whose call runs its layers")
        use = f", from which recipe {self.stateful!r} gets its quant state" if self.stateful else ""
        example = self._split(model, type(model), "__call__", *jax.tree.map(_as_array, (args, kwargs)))
        with explained(model, has_inputs=bool(args or kwargs), use=use):
            self.engine.trace(*example)
        return example

    def convert(self, model: nnx.Module, *args: Any, **kwargs: Any) -> tuple[dict[str, QTensor], bool]:
        """Convert every kernel that a call with example inputs runs quantized.

        Args:
          model: of classes of its own, with the quant state of training.
          args, kwargs: the example inputs.

        Returns:
          By "/"-joined path of the parameter, its ``QTensor``, and whether a quantized layer's weight stays
          float.

        Raises:
          ValueError: quant state that is missing, or has not seen what a static scale must know.
        """
        call, params, rest = self._example(model, args, kwargs)
        state = nnx.to_pure_dict(nnx.state(model, QuantState))
        found, reasons = self.engine.convert(call, params, rest, state)
        return {"/".join(name): kernel for name, kernel in found.items()}, bool(reasons)

    def hold_states(self, model: nnx.Module, states: Tables) -> None:
        """Add to the module of every weight a variable with its quant state."""
        modules = {"/".join(map(str, path)): node for path, node in nnx.iter_graph(model)}
        layers: dict[str, dict[str, Any]] = {}
        for row, fields in rows_of(states).items():
            layer, _, tensor = row.rpartition("/")
            layers.setdefault(layer, {})[tensor] = fields
        for layer, rows in layers.items():
            owner, _, name = layer.rpartition("/")
            # Axes of scanned layers and of experts come first: what maps parameters along axis 0 maps their state so.
            lead = min(row[STEP].ndim if STEP in row else row[SCALE].ndim - 1 for row in rows.values())
            setattr(modules[owner], name, QuantState(move_row_axis(make_state(rows), lead)))

    # -- calls -------------------------------------------------------------------------------------------------------

    def call(self, module: Any, kind: type, name: str, args: Any, kwargs: Any) -> Any:
        """Compute a method of a module; ``kind`` is its own class."""
        path = type(module)._jaxquant_path
        prefix = tuple(path.split("/")) if path else ()
        call, params, rest = self._split(module, kind, name, args, kwargs)
        own: Any = nnx.to_pure_dict(rest[0])
        state, is_whole = own.get(0, {}), not prefix and name == "__call__"
        for part in reversed(prefix):
            state = {part: state}

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
            if isinstance(node, nnx.Module) and not isinstance(node, _CONTAINERS):
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


def _restored(config: QuantConfig, modules: Collection[str], decisions: Any) -> Face:
    face = Face(config, modules)
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


def _as_array(leaf: Any) -> Any:
    """Return an array for a shape; one that takes no memory."""
    if isinstance(leaf, jax.ShapeDtypeStruct) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return leaf
