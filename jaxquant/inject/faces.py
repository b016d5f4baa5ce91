"""Code shared by the Linen and NNX faces: subclasses of model classes that carry their face, and errors."""

from __future__ import annotations

import collections
import contextlib
import functools
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import flax.linen as nn
import jax
from flax import nnx

from jaxquant.backends import RANDOM_STREAM

NNXModel = TypeVar("NNXModel", bound=nnx.Module)
STREAMS: tuple[str, ...] = ("params", "dropout", RANDOM_STREAM)
"""RNG streams that are passed to an example call of a Linen model."""

# jit includes the user context in its cache key. A function that was traced while a model was being traced is
# therefore traced again when it is called outside of that trace.
traced_face = jax.make_user_context(None)
"""Face of the model that is being traced or initialized, or None."""


def face_of(model: Any) -> Any:
    """Return the face of a quantized model, or None if the model is not quantized."""
    return getattr(type(model), "_jaxquant_face", None)


def require_float(model: Any) -> None:
    """Raise if a model is already quantized where a float model is expected.

    Raises:
      ValueError: the model is already quantized.
    """
    if (face := face_of(model)) is not None:
        raise ValueError(
            f"{type(model).__name__} is already quantized with {face.engine.config.quantization!r}; pass the float "
            "model instead"
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
      TypeError: the arguments are in another order, or some are missing.
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


def describe_model(model: Any) -> str:
    """Return the ``repr`` of a quantized model: its class, and the path and recipe of each group of equal layers."""
    engine, kind = face_of(model).engine, type(model).__name__
    if engine.decisions is None:
        return f"{kind}(quantization={engine.config.quantization!r})  # the first call chooses the layers"
    decided = engine.decisions.paths.items()
    recipes = {path: "float" if d.recipe is None else d.recipe.name + d.hint for path, d in decided}
    names = {path: re.sub(r"(?<=[_/])\d+(?=/)|(?<=/)\d+$", "*", path) or "the root layer" for path in recipes}
    pairs = collections.Counter((names[path], recipe) for path, recipe in recipes.items()).most_common()
    usual = dict(pair for pair, _ in reversed(pairs))  # layers with another recipe are listed by their own path
    alike = collections.Counter((names[p] if usual[names[p]] == recipe else p, recipe) for p, recipe in recipes.items())
    lines = [f"  {path}: {recipe}{f' ({n} layers)' if n > 1 else ''}" for (path, recipe), n in alike.items()]
    return "\n".join([f"{kind}(quantization={engine.config.quantization!r}", *lines, ")"])


@contextlib.contextmanager
def explain_errors(model: Any, has_inputs: bool, use: str = "") -> Iterator[None]:
    """Add an explanation to errors of a model that is traced in float.

    Args:
      model: float model.
      has_inputs: whether example inputs were passed.
      use: further use of the example inputs, appended to the error message.

    Raises:
      TypeError: no example inputs were passed, and the model requires inputs.
    """
    try:
        yield
    except Exception as error:
        if not has_inputs and "required positional" in str(error):
            raise TypeError(f"{type(model).__name__}.__call__ needs inputs; pass example inputs{use}") from error
        error.add_note(f"The float model {type(model).__name__} raised this error with the example inputs.")
        raise


def subclass(face: Any, base: type, fields: Mapping[str, Any], metaclass: type | None = None) -> type:
    """Create a subclass with the same name, further fields, and references to its face and its original class."""
    own = {"__module__": base.__module__, "__doc__": base.__doc__, "__qualname__": base.__qualname__}
    own |= {"_jaxquant_face": face, "_jaxquant_base": base}
    return types.new_class(
        base.__name__, (base,), {"metaclass": metaclass or type(base)}, lambda body: body.update({**fields, **own})
    )


def wrap_methods(
    base: type, root: type, is_method: Callable[[str, Any], bool], call: Callable[..., Any]
) -> dict[str, Callable[..., Any]]:
    """Wrap the methods that a model's own classes define: ``__call__`` and public methods. A trace runs them unwrapped.

    Args:
      base: class of the model.
      root: framework's class of all modules, whose methods stay unwrapped.
      is_method: predicate of (name, value) that selects the class attributes that are methods and run layers.
      call: function of (face, module, base, name, args, kwargs) that a wrapped method calls.
    """

    def wrapped(name: str) -> Callable[..., Any]:
        plain = getattr(base, name)

        @functools.wraps(plain)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            face = face_of(self)
            if face is None or traced_face.value is face:
                return plain(self, *args, **kwargs)
            return call(face, self, base, name, args, kwargs)

        return method

    own = [cls for cls in reversed(base.__mro__) if cls not in root.__mro__]
    methods = {name: value for cls in own for name, value in vars(cls).items()}
    public = {name: value for name, value in methods.items() if name == "__call__" or not name.startswith("_")}
    return {name: wrapped(name) for name, value in public.items() if is_method(name, value)}
