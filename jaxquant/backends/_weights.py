"""Static activation scales of converted kernels, also of experts without tokens, and errors about converted kernels."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxquant.core.paths import layer_name
from jaxquant.core.recipe import Recipe


def check_converted(path: str, found: str, reader: str, needed: str) -> None:
    """Raise if a kernel was converted with another recipe.

    Args:
      path: path of the layer.
      found: description of the converted kernel, such as "int8".
      reader: reader of the kernel, such as a recipe's name in quotes.
      needed: description of the kernel that the reader needs, in the same form as ``found``.

    Raises:
      ValueError: the two descriptions differ.
    """
    if found != needed:
        raise ValueError(
            f"{layer_name(path)} has a converted kernel of {found}, but recipe {reader} needs {needed}; use the config "
            "that converted the parameters"
        )


def uncalibrated_error(path: str, recipe: Recipe) -> ValueError:
    """Return the error of a layer that needs the static scale of an activation that was never observed.

    Args:
      path: path of the layer.
      recipe: recipe of the layer.
    """
    return ValueError(
        f"recipe {recipe.name!r} needs the amax history of the input of {layer_name(path)} for a static scale, but the "
        "history is empty; train the model, or call jaxquant.calibrate"
    )


def fill_missing_input_scales(path: str, recipe: Recipe, scale: Any, stacked: Collection[int]) -> Any:
    """Return the static scale of a kernel's activations, with a fallback for experts without rows.

    An expert that never received a row has no observed activation. Its scale becomes the largest scale of the other
    experts of the layer, which read the same activations, and a warning names the expert. Under jit there is no
    warning.

    Args:
      path: path of the layer.
      recipe: recipe of the layer.
      scale: scale of the kernel's rank, with an axis for each stack of layers or experts. None if the activation is
        scaled dynamically, 0 for an activation that was not observed.
      stacked: axes along which layers are stacked; a layer does not use the scales of other layers.

    Raises:
      ValueError: no expert of a layer has an observed activation.
    """
    if scale is None:
        return None
    axes = [axis for axis, size in enumerate(scale.shape) if size > 1]
    filled = scale
    if experts := tuple(axis for axis in axes if axis not in stacked):
        filled = jnp.where(filled > 0, filled, filled.max(experts, keepdims=True))
    if isinstance(scale, Tracer):
        return filled
    if not (np.asarray(filled) > 0).all():
        raise uncalibrated_error(path, recipe)
    absent = [tuple(int(index[axis]) for axis in axes) for index in np.argwhere(np.asarray(scale) == 0)]
    if absent:
        names = ", ".join(str(index[0] if len(index) == 1 else index) for index in absent)
        warnings.warn(
            f"experts {names} of {layer_name(path)} received no tokens, so recipe {recipe.name!r} uses the largest "
            "input scale of the other experts; calibrate on more batches for exact scales",
            stacklevel=3,
        )
    return filled if isinstance(scale, jax.Array) else np.asarray(filled)
