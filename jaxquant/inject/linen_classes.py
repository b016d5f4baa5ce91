"""The classes that a quantized Linen model and its bound submodules have: their calls go through the model's face."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from jaxquant.backends.base import RANDOM_STREAM
from jaxquant.inject.faces import at_work, quantized_with, subclass, wrap_methods
from jaxquant.state.tree import OVERWRITE_WITH_GRADIENT


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
        if face.engine.config.checkpoint_is_quantized:
            raise ValueError(
                f"{type(module).__name__} with checkpoint_is_quantized true has no float kernel to initialize; convert "
                "the parameters with jaxquant.convert"
            )
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


def _rngs(module: Any) -> dict[str, Any]:
    return {name: rng.as_jax_rng() for name, rng in module.scope.rngs.items()}


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
_MODEL = {"__reduce__": nn.nowrap(_reduce)}
"""What the class of a model has, too."""
