"""Shared by the Linen and NNX faces: classes of models that know their face, and refusals."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import flax.linen as nn
import jax
from flax import nnx

from jaxquant.backends import RANDOM_STREAM

NNXModel = TypeVar("NNXModel", bound=nnx.Module)
STREAMS: tuple[str, ...] = ("params", "dropout", RANDOM_STREAM)
"""Random streams that an example call of a Linen model gets."""

# Part of the key of jit's caches too, so that a function which was traced inside a trace is traced anew outside.
at_work = jax.make_user_context(None)
"""The face of the model that is being traced or initialized, None where none is."""


def quantized_with(model: Any) -> Any:
    """Return the face of a quantized model, None for another."""
    return getattr(type(model), "_jaxquant_face", None)


def refuse_twice(model: Any) -> None:
    """Refuse a model that is quantized already, where the float model is expected.

    Raises:
      ValueError: it is.
    """
    if (face := quantized_with(model)) is not None:
        raise ValueError(
            f"{type(model).__name__} is quantized already, with {face.engine.config.quantization!r}; give the "
            "float model"
        )


def sort_arguments(name: str, model: Any, given: Sequence[Any], rest: str, named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return (variables, config, ...) of a call with a Linen or an NNX model; NNX models have no variables.

    Args:
      name: name of the called function.
      model: its first argument.
      given: its other positional arguments.
      rest: spelling of the arguments after the config.
      named: its keyword arguments, among them perhaps ``model``.

    Raises:
      TypeError: arguments in another order, or too few.
    """
    is_linen, is_closed = isinstance(model, nn.Module), rest == "batches"
    is_right = isinstance(model, (nn.Module, nnx.Module)) and "model" not in named
    count = len(given) - is_linen - is_closed
    is_right = is_right and (count == 1 and not named if is_closed else count > 0)
    if is_right and is_linen:
        is_right = isinstance(given[0], Mapping) and not (isinstance(given[1], Mapping) and "params" in given[1])
    if not is_right:
        got = ", ".join([type(each).__name__ for each in (model, *given)] + [f"{key}=" for key in named])
        raise TypeError(
            f"{name} takes a Flax module first: jaxquant.{name}(model, variables, config, {rest}) for Linen, "
            f"jaxquant.{name}(model, config, {rest}) for NNX; got ({got})"
        )
    return tuple(given) if is_linen else (None, *given)


@contextlib.contextmanager
def explained(model: Any, has_inputs: bool, use: str = "") -> Iterator[None]:
    """Explain an error of a model that is traced in float.

    Args:
      model: the float model.
      has_inputs: whether there are example inputs.
      use: what else they are for, as the end of the sentence that asks for them.

    Raises:
      TypeError: there are none, and the model is called with inputs.
    """
    try:
        yield
    except Exception as error:
        if not has_inputs and "required positional" in str(error):
            raise TypeError(f"{type(model).__name__} is called with inputs; pass examples of them{use}") from error
        error.add_note(f"{type(model).__name__} itself raised this, in float, called with the inputs that were given.")
        raise


def subclass(face: Any, base: type, fields: Mapping[str, Any], metaclass: type | None = None) -> type:
    """Make a class of the same name, with further fields, that knows its face and the class that it stands for."""
    own = {"__module__": base.__module__, "__doc__": base.__doc__, "__qualname__": base.__qualname__}
    own |= {"_jaxquant_face": face, "_jaxquant_base": base}
    return types.new_class(
        base.__name__, (base,), {"metaclass": metaclass or type(base)}, lambda body: body.update({**fields, **own})
    )


def wrap_methods(
    base: type, root: type, is_method: Callable[[str, Any], bool], call: Callable[..., Any]
) -> dict[str, Callable[..., Any]]:
    """Wrap the methods that a model's own classes define: ``__call__`` and public ones, outside of a trace.

    Args:
      base: the model's class.
      root: the framework's class of all modules, whose methods are left alone.
      is_method: whether a class attribute, of (name, value), is a method that runs layers.
      call: what a wrapped method does, of (face, module, base, name, args, kwargs).
    """

    def wrapped(name: str) -> Callable[..., Any]:
        plain = getattr(base, name)

        @functools.wraps(plain)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            face = quantized_with(self)
            if face is None or at_work.value is face:
                return plain(self, *args, **kwargs)
            return call(face, self, base, name, args, kwargs)

        return method

    own = [cls for cls in reversed(base.__mro__) if cls not in root.__mro__]
    methods = {name: value for cls in own for name, value in vars(cls).items()}
    public = {name: value for name, value in methods.items() if name == "__call__" or not name.startswith("_")}
    return {name: wrapped(name) for name, value in public.items() if is_method(name, value)}
