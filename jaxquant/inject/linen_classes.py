"""Subclasses for a quantized Linen model and its bound submodules, whose calls go through the model's face."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from jaxquant.backends.base import RANDOM_STREAM
from jaxquant.inject.faces import describe_model, face_of, subclass, traced_face, wrap_methods
from jaxquant.state.table import ENTRY, Tables, make_state, rows_of
from jaxquant.state.tree import OVERWRITE_WITH_GRADIENT

# A user context is part of jit's cache key.
_drops_output = jax.make_user_context(False)
"""Whether ``init`` runs. Its output is discarded, so it is not computed in low precision."""


class ModuleCall(NamedTuple):
    """Call of an unbound module, with the arguments of ``nn.Module.apply``.

    ``prefix`` is the path of the module in the model, and ``state`` is the quant state of the model.
    """

    module: nn.Module
    variables: Mapping[str, Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rngs: Any = None
    method: Any = None
    mutable: Any = False
    capture: Any = False
    prefix: tuple[str, ...] = ()
    state: Any = Tables()

    @property
    def is_whole(self) -> bool:
        """Whether this call runs the whole model."""
        return not self.prefix and self.method in (None, "__call__")

    @property
    def key(self) -> jax.Array | None:
        """RNG key for stochastic rounding, or None."""
        return self.rngs.get(RANDOM_STREAM) if isinstance(self.rngs, Mapping) else None

    def arguments(self, rest: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the arguments that follow the parameters in a ``Call``."""
        return rest, self.rngs, self.args, dict(self.kwargs)


def make_class(face: Any, base: type, *, is_model: bool) -> type:
    """Create the subclass for a quantized model, or for a bound submodule of it."""
    methods = wrap_methods(base, nn.Module, _runs_layers, _call)
    return subclass(face, base, methods | _BOUND | (_MODEL if is_model else {}))


def _runs_layers(name: str, value: Any) -> bool:
    return inspect.isfunction(value) and name != "setup" and not getattr(value, "nowrap", False)


def _call(face: Any, module: Any, base: Any, method: Any, args: Any, kwargs: Any) -> Any:
    """Call a method of a module, given by name or as a function; run it quantized if the module is bound."""
    if module.scope is None:
        return getattr(base, method)(module, *args, **kwargs)
    root = getattr(module, "_jaxquant_root", module)
    prefix = tuple(module.path[len(root.path) :])
    if module.is_initializing():
        return _initialize(face, module, root, prefix, method, args, kwargs)
    mutable = module.scope.mutable
    state = root.get_variable(OVERWRITE_WITH_GRADIENT, ENTRY, Tables())
    use = ModuleCall(*nn.Module.unbind(module), args, kwargs, _rngs(module), method, mutable, _capture(), prefix, state)
    out = face.call(use)
    if mutable is False:
        return out
    out, changed = out
    for collection, values in changed.items():
        for key, value in values.items():
            module.put_variable(collection, key, value)
    return out


def _initialize(face: Any, module: Any, root: Any, prefix: tuple[str, ...], method: Any, args: Any, kwargs: Any) -> Any:
    """Initialize the float module and its quant state. Returns the output, quantized if the module is the root."""
    is_model = module.scope.parent is None
    if is_model and face.engine.config.checkpoint_is_quantized:
        raise ValueError(
            f"{type(module).__name__}.init does not work with checkpoint_is_quantized true; initialize the float model "
            "and convert the parameters with jaxquant.convert"
        )
    with traced_face(face):
        out = run_plain(module, method, args, kwargs)
    rngs = {name: key.as_jax_rng() for name, key in module.scope.rngs.items()}
    use = ModuleCall(*nn.Module.unbind(module), args, kwargs, rngs, method, prefix=prefix)
    state, before = face.init_state(use), root.get_variable(OVERWRITE_WITH_GRADIENT, ENTRY, Tables())
    if before:  # state of a submodule, or of another method
        state = make_state(rows_of(state) | rows_of(before))
    if state and root.is_mutable_collection(OVERWRITE_WITH_GRADIENT):
        root.put_variable(OVERWRITE_WITH_GRADIENT, ENTRY, state)
    if not is_model or _drops_output.value:
        return out
    return face.initial_output(use._replace(state=state))


def run_plain(module: Any, method: Any, args: Any, kwargs: Any) -> Any:
    """Run a method of a bound module, given by name or as a function."""
    if isinstance(method, str):
        return getattr(module, method)(*args, **kwargs)
    return getattr(method, "__func__", method)(module, *args, **kwargs)


def _capture() -> Any:
    """Return the ``capture_intermediates`` option of the enclosing ``apply``. Linen has no public API for this."""
    stack = nn.module._context.capture_stack
    return stack[-1] if stack else False


def _rngs(module: Any) -> dict[str, Any]:
    """Return the RNG keys of a call: the keys of ``apply`` for its first call, new keys for further calls."""
    scope = module.scope
    is_first = scope.parent is None and not any(scope.rng_counters.values())
    new = {name: module.make_rng(name) for name in scope.rngs}
    return {name: key.as_jax_rng() for name, key in scope.rngs.items()} if is_first else new


# -- further attributes of the class of a quantized model --------------------------------------------------------------


def _init(self: Any, *args: Any, **kwargs: Any) -> Any:
    with _drops_output(True):
        return self._jaxquant_base.init(self, *args, **kwargs)


def _init_with_output(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self._jaxquant_base.init_with_output(self, *args, **_with_bound_method(self, kwargs))


def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self._jaxquant_base.apply(self, *args, **_with_bound_method(self, kwargs))


def _with_bound_method(model: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return options of ``apply`` in which ``method`` is a function that quantizes any method."""
    face, method = model._jaxquant_face, kwargs.get("method")
    if method is None or traced_face.value is face:
        return kwargs
    return {**kwargs, "method": lambda module, *args, **kwargs: _call(face, module, None, method, args, kwargs)}


def _getattr(self: Any, name: str) -> Any:
    """Set up the module, as Linen does, and wrap the submodules that this creates."""
    value = self._jaxquant_base.__getattr__(self, name)
    _wrap_children(self)
    return value


def _post_init(self: Any) -> None:
    self._jaxquant_base.__post_init__(self)
    _wrap_children(self)


def _wrap_children(self: Any) -> None:
    face = face_of(self)
    if face is not None and self.scope is not None and traced_face.value is not face:
        face.wrap_children(self, getattr(self, "_jaxquant_root", self))


def _reduce(self: Any) -> tuple[Any, ...]:
    """Pickle the model as its float model, config and decisions."""
    face, base = self._jaxquant_face, self._jaxquant_base
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init and f.name != "parent"}
    return face.restored, (base, fields, face.engine.config, face.engine.decisions)


_BOUND = {"__getattr__": nn.nowrap(_getattr), "__post_init__": _post_init}
"""Attributes of the class of every wrapped module."""
_MODEL = {
    "init": nn.nowrap(_init),
    "init_with_output": nn.nowrap(_init_with_output),
    "apply": nn.nowrap(_apply),
    "__reduce__": nn.nowrap(_reduce),
    "__repr__": nn.nowrap(describe_model),
}
"""Further attributes of the class of a model."""
