"""The classes that a quantized Linen model and its bound submodules have: their calls go through the model's face."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from flax.core import unfreeze
from flax.core.scope import DenyList, in_filter

from jaxquant.backends.base import RANDOM_STREAM
from jaxquant.inject.faces import at_work, quantized_with, subclass, wrap_methods
from jaxquant.state.tree import OVERWRITE_WITH_GRADIENT

_DEFAULTS = {"rngs": None, "method": None, "mutable": False, "capture_intermediates": False}


class Use(NamedTuple):
    """A call of an unbound module, as ``nn.Module.apply`` takes it; ``prefix`` is the module's path in the model."""

    module: nn.Module
    variables: Mapping[str, Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rngs: Any = None
    method: Any = None
    mutable: Any = False
    capture: Any = False
    prefix: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether it runs the whole model."""
        return not self.prefix and self.method in (None, "__call__")

    @property
    def state(self) -> Mapping[str, Any]:
        """The quant state among the variables."""
        return self.variables.get(OVERWRITE_WITH_GRADIENT, {})

    @property
    def key(self) -> jax.Array | None:
        """The random key for stochastic rounding."""
        return self.rngs.get(RANDOM_STREAM) if isinstance(self.rngs, Mapping) else None

    def arguments(self, rest: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the arguments of a ``Call`` behind the parameters."""
        return rest, self.rngs, self.args, dict(self.kwargs)


def make_class(face: Any, base: type, *, is_model: bool) -> type:
    """Make the class of a quantized model, or of a submodule of one that is bound."""
    methods = wrap_methods(base, nn.Module, _runs_layers, _call_bound)
    return subclass(face, base, methods | _BOUND | (_MODEL if is_model else {}))


def _runs_layers(name: str, value: Any) -> bool:
    return inspect.isfunction(value) and name != "setup" and not getattr(value, "nowrap", False)


def _call_bound(face: Any, module: Any, base: type, name: str, args: Any, kwargs: Any) -> Any:
    """Compute a method that plain Python calls on a bound module: it is traced like a call of ``apply``."""
    plain = getattr(base, name)
    if module.scope is None:
        return plain(module, *args, **kwargs)
    root = getattr(module, "_jaxquant_root", module)
    prefix = tuple(module.path[len(root.path) :])
    if module.is_initializing():
        with at_work(face):
            out = plain(module, *args, **kwargs)
        if module.is_mutable_collection(OVERWRITE_WITH_GRADIENT):
            use = Use(*nn.Module.unbind(module), args, kwargs, _rngs(module), name, prefix=prefix)
            for key, value in face.init_state(use).items():
                module.put_variable(OVERWRITE_WITH_GRADIENT, key, value)
        return out
    mutable = module.scope.mutable
    use = Use(*nn.Module.unbind(module), args, kwargs, _rngs(module), name, mutable, _capture(), prefix)
    out = face.call(use)
    if mutable is False:
        return out
    out, changed = out
    for collection, values in changed.items():
        for key, value in values.items():
            if collection != OVERWRITE_WITH_GRADIENT:
                module.put_variable(collection, key, value)
    return out


def _capture() -> Any:
    """Return what the ``apply`` around captures of its intermediates. Linen has no public way to ask."""
    stack = nn.module._context.capture_stack
    return stack[-1] if stack else False


def own(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return the float model's function: a model may have an ``init`` and an ``apply`` of its own."""
    return getattr(getattr(type(module), "_jaxquant_base", type(module)), name)


def asked(**options: Any) -> dict[str, Any]:
    """Return the options that are not Linen's defaults; a model's own ``apply`` need not take the others."""
    return {name: value for name, value in options.items() if value is not _DEFAULTS[name]}


def _rngs(module: Any) -> dict[str, Any]:
    return {name: module.make_rng(name) for name in module.scope.rngs}


# -- what the class of a quantized model has beside its methods --------------------------------------------------------


def _init_with_output(self: Any, rngs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Initialize the float model's variables and the quant state; returns the quantized output and the variables."""
    face = self._jaxquant_face
    if at_work.value is face:
        return own(self, "init_with_output")(self, rngs, *args, **kwargs)
    variables = _init(self, rngs, *args, **kwargs)
    return face.initial_output(_use(self, variables, args, kwargs | {"rngs": rngs})), variables


def _init(self: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
    """Initialize the float model's variables and the quant state, without computing the output."""
    face, is_traced = self._jaxquant_face, at_work.value is self._jaxquant_face
    if face.engine.config.checkpoint_is_quantized and not is_traced:
        raise ValueError(
            f"{type(self).__name__} with checkpoint_is_quantized true has no float kernel to initialize; convert the "
            "parameters with jaxquant.convert"
        )
    with at_work(face):
        variables = own(self, "init")(self, rngs, *args, **kwargs)
    use = _use(self, variables, args, {"mutable": DenyList("intermediates"), **kwargs, "rngs": rngs})
    if is_traced or use.mutable is False:
        return variables
    state = face.init_state(use)
    if not state or not in_filter(use.mutable, OVERWRITE_WITH_GRADIENT):
        return variables
    given: Any = variables.get(OVERWRITE_WITH_GRADIENT, {})
    merged = _merge(unfreeze(given), state)
    return type(variables)({**variables, OVERWRITE_WITH_GRADIENT: merged})


def _apply(self: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply a method in low precision; as ``nn.Module.apply``."""
    face = self._jaxquant_face
    if at_work.value is face or self.scope is not None:
        return own(self, "apply")(self, variables, *args, **kwargs)
    return face.call(_use(self, variables, args, kwargs))


def _use(module: Any, variables: Any, args: Any, kwargs: Mapping[str, Any]) -> Use:
    """Return the call of arguments among which Linen's own options are."""
    rngs, *options = (kwargs.get(name, default) for name, default in _DEFAULTS.items())
    rngs = rngs if rngs is None or isinstance(rngs, Mapping) else {"params": rngs}
    kwargs = {name: value for name, value in kwargs.items() if name not in _DEFAULTS}
    return Use(module, variables, args, kwargs, rngs, *options)


def _merge(first: Any, second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested dicts; a model may have quant state of its own ops."""
    both = {name: _merge(first[name], second[name]) for name in second if isinstance(first.get(name), Mapping)}
    return {**first, **second, **both}


def _getattr(self: Any, name: str) -> Any:
    """Set up the module, as Linen does, and wrap the submodules that this made."""
    value = self._jaxquant_base.__getattr__(self, name)
    _mark(self)
    return value


def _post_init(self: Any) -> None:
    self._jaxquant_base.__post_init__(self)
    _mark(self)


def _mark(self: Any) -> None:
    face = quantized_with(self)
    if face is not None and self.scope is not None and at_work.value is not face:
        face.mark(self, getattr(self, "_jaxquant_root", self))


def _reduce(self: Any) -> tuple[Any, ...]:
    """Pickle as the float model, the config and what was decided."""
    face, base = self._jaxquant_face, self._jaxquant_base
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init and f.name != "parent"}
    return face.restored, (base, fields, face.engine.config, face.engine.decisions)


_BOUND = {"__getattr__": nn.nowrap(_getattr), "__post_init__": _post_init}
"""What the class of any wrapped module has."""
_MODEL = {
    "init": nn.nowrap(_init),
    "init_with_output": nn.nowrap(_init_with_output),
    "apply": nn.nowrap(_apply),
    "__reduce__": nn.nowrap(_reduce),
}
"""What the class of a model has, too."""
