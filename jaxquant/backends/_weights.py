"""The static scale of a converted kernel's activation, also of experts without tokens; errors about such kernels."""

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


def check_converted(path: str, has: str, taker: str, wanted: str) -> None:
    """Refuse a kernel that another recipe converted.

    Args:
      path: of the layer.
      has: what its converted kernel is, such as "int8".
      taker: who reads it, such as a recipe's name in quotes.
      wanted: what that takes, in the words of ``has``.

    Raises:
      ValueError: the two differ.
    """
    if has != wanted:
        raise ValueError(
            f"{layer_name(path)} has a converted kernel of {has}, and {taker} takes {wanted}; serve with the recipe "
            "that it was converted with"
        )


def uncalibrated_error(path: str, recipe: Recipe) -> ValueError:
    """Make the error of a layer that needs the static scale of an activation that was never seen.

    Args:
      path: of the layer.
      recipe: of the layer.
    """
    return ValueError(
        f"{layer_name(path)} has no amax history of its input, so {recipe.name!r} has no static scale for it; train "
        "the model, or calibrate it with jaxquant.calibrate"
    )


def fill_missing_input_scales(path: str, recipe: Recipe, scale: Any, stacked: Collection[int]) -> Any:
    """Return the static scale of the activations that meet a kernel, that of experts without rows filled in.

    An expert that never got a row has seen no activation. Its scale becomes the largest of its layer's other experts,
    which read the same activations, and a warning names it. Under jit it is filled in without a warning.

    Args:
      path: of the layer.
      recipe: of the layer.
      scale: of the kernel's rank, with an axis for each stack of layers or experts; None where it is dynamic; 0 where
        nothing was seen.
      stacked: axes along which layers are stacked, none of which takes another's scale.

    Raises:
      ValueError: none of a layer's experts has seen anything.
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
            f"kernels {names} of {layer_name(path)} have no amax history of their input, as those of experts without "
            f"rows; their static scale of {recipe.name!r} is the largest of the others'",
            stacklevel=3,
        )
    return filled if isinstance(scale, jax.Array) else np.asarray(filled)
