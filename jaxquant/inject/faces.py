"""Shared by the Linen and NNX faces: classes of models that know their face, and refusals."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from jaxquant.backends import RANDOM_STREAM

STREAMS: tuple[str, ...] = ("params", "dropout", RANDOM_STREAM)
"""Random streams that an example call of a Linen model gets."""


def quantized_with(model: Any) -> Any:
    """Return the face of a quantized model, None for another."""
    return getattr(type(model), "_jaxquant_face", None)


def refuse_twice(model: Any) -> None:
    """Refuse a model that is quantized already.

    Raises:
      ValueError: it is.
    """
    if (face := quantized_with(model)) is not None:
        raise ValueError(
            f"{type(model).__name__} is quantized already, with {face.engine.config.quantization!r}; quantize the "
            "float model"
        )


def subclass(face: Any, base: type, fields: Mapping[str, Any], metaclass: type | None = None) -> type:
    """Make a class of the same name, with further fields, that knows its face and the class that it stands for."""
    own = {"__module__": base.__module__, "__doc__": base.__doc__, "__qualname__": base.__qualname__}
    own |= {"_jaxquant_face": face, "_jaxquant_base": base}
    return types.new_class(
        base.__name__, (base,), {"metaclass": metaclass or type(base)}, lambda body: body.update({**fields, **own})
    )
