"""AQT's Linen modules with the config of a recipe: for training, and for MaxText's convert and serve modes.

``aqt_config`` translates the recipe; ``aqt_serving`` has the modules for converted kernels.
"""

# See aqt_config.py.
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from jaxquant.backends._aqt import aqt_dot_general, aqt_flax, config, tiled_dot_general
from jaxquant.backends._aqt import utils as aqt_utils
from jaxquant.backends._weights import check_converted, is_swapped
from jaxquant.backends.aqt_config import swap_sides, tiling_fn, to_aqt
from jaxquant.backends.base import RANDOM_STREAM, TRAINING, Op, OpOptions
from jaxquant.core.paths import join_path
from jaxquant.core.recipe import Recipe
from jaxquant.core.rounding import operands_key

_MODES = {
    "train": aqt_utils.QuantMode.TRAIN,
    "convert": aqt_utils.QuantMode.CONVERT,
    "serve": aqt_utils.QuantMode.SERVE,
}


def _axis_names(
    value: jax.Array,
    tile_map: dict[Any, list[int]] | None,
    unsharded: Sequence[int],
    *,
    mesh_axes: tuple[str | None, ...],
    replicate_scale: bool,
) -> nn.LogicallyPartitioned:
    """Label the axes of a stored qvalue or scale after those of the kernel.

    A tiled axis keeps its name on the part inside the tile. A scale has no name on the axes that it is shared along,
    and none at all when ``replicate_scale`` is set; only scales have such axes.
    """
    names: list[str | None] = [None] * value.ndim
    for axis, name in enumerate(mesh_axes):
        names[tile_map[axis][-1] if tile_map else axis] = name
    for axis in range(value.ndim):
        if axis in unsharded or (unsharded and replicate_scale):
            names[axis] = None
    return nn.LogicallyPartitioned(value, tuple(names))


def refuse_options(dtype: Any, precision: Any, preferred_element_type: Any) -> None:
    """Refuse the options of a matmul that AQT would ignore."""
    if precision not in (None, jax.lax.Precision.DEFAULT):
        raise NotImplementedError(f"precision {precision} has no meaning in an AQT matmul; leave it at None")
    if preferred_element_type is not None and jnp.dtype(preferred_element_type) != dtype:
        raise NotImplementedError(
            f"preferred_element_type {jnp.dtype(preferred_element_type).name} of a {dtype} matmul is not "
            "honoured by AQT; use quant_backend 'native'"
        )


class AqtDotGeneral(aqt_flax.AqtDotGeneral):
    """AQT's module, drawing from the random stream ``quant`` alone and refusing what it would ignore."""

    def make_rng(self, name: str = RANDOM_STREAM) -> jax.Array | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Draw a key, or None where the stream is absent: Linen would fall back to the stream "params"."""
        return super().make_rng(name) if self.has_rng(name) else None

    def make_aqt_dg(self, *args: Any, **kwargs: Any) -> Callable[..., jax.Array]:
        """Build AQT's matmul for two shapes."""
        inner = super().make_aqt_dg(*args, **kwargs)
        self._check_frozen()

        def matmul(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None):
            refuse_options(lhs.dtype, precision, preferred_element_type)
            return inner(jnp.asarray(lhs), jnp.asarray(rhs), dimension_numbers)

        return matmul

    def _check_frozen(self) -> None:
        """Refuse to serve a kernel that another recipe converted."""
        for side in ("lhs", "rhs"):
            stored = self.variables.get(self.quant_collection, {}).get(getattr(self, f"{side}_var_name"), {})
            if getattr(self, f"{side}_quant_mode") != aqt_utils.QuantMode.SERVE or "frozen" not in stored:
                continue
            has = nn.meta.unbox(stored["frozen"]).qvalue.dtype
            wanted = getattr(self.cfg.fwd.dg_quantizer, side).numerics.get_dtype()  # pyright: ignore[reportOptionalMemberAccess]
            check_converted(join_path(self.path[:-1]), has.name, "its recipe", jnp.dtype(wanted).name)


class AqtEinsum(nn.Module):
    """A quantized einsum of an activation and a weight, whichever way jax.numpy orders them for the matmul.

    Attributes:
      recipe, options: as for ``linen_op``.
    """

    recipe: Recipe
    options: OpOptions = OpOptions()

    @nn.compact
    def __call__(
        self,
        equation: str,
        lhs: jax.Array,
        rhs: jax.Array,
        precision: Any = None,
        preferred_element_type: Any = None,
    ) -> jax.Array:
        """Contract activation ``lhs`` and weight ``rhs`` as the equation says."""
        lhs, rhs = promote_dtype(lhs, rhs)
        refuse_options(lhs.dtype, precision, preferred_element_type)
        make = _module(self.recipe, self.options, _is_swapped(equation, lhs, rhs))
        return jnp.asarray(aqt_dot_general.einsum(equation, lhs, rhs, dg=make()))  # pyright: ignore[reportArgumentType]


def _is_swapped(equation: str, lhs: jax.Array, rhs: jax.Array) -> bool:
    return is_swapped(functools.partial(aqt_dot_general.einsum, equation), equation, lhs, rhs)


def _module(recipe: Recipe, options: OpOptions, swap: bool = False) -> Callable[[], nn.Module]:
    translated = to_aqt(recipe)
    wrapper = None
    if options.mesh_axes and options.quant_mode != "convert":
        wrapper = functools.partial(_axis_names, mesh_axes=options.mesh_axes, replicate_scale=options.replicate_scale)
    weight = {
        "quant_mode": _MODES[options.quant_mode],
        "var_name": "qrhs",
        "freeze_mode": aqt_flax.FreezerMode.CALIBRATION_AND_VALUE,
        "axis_metadata_wrapper": wrapper,
    }
    activation = {"var_name": "qlhs", "freeze_mode": aqt_flax.FreezerMode.NONE}
    if swap:
        swap_sides(translated)
    sides = {"lhs": weight, "rhs": activation} if swap else {"lhs": activation, "rhs": weight}
    return functools.partial(
        AqtDotGeneral,
        translated,
        prng_name=RANDOM_STREAM,
        tiling_fn=tiling_fn(recipe),
        use_legacy_freezer=False,
        **{f"{side}_{key}": value for side, settings in sides.items() for key, value in settings.items()},
    )


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    recipe: Recipe,
    key: jax.Array | None = None,
) -> jax.Array:
    """Contract an activation with a float weight as the Linen module does, without a module.

    Args:
      lhs, rhs, dimension_numbers, precision, preferred_element_type: as for ``jax.lax.dot_general``.
      recipe: all numbers.
      key: for stochastic rounding; None makes noise from the bits of both operands.

    Raises:
      NotImplementedError: AQT cannot do what the recipe asks, or would ignore an option.
    """
    refuse_options(lhs.dtype, precision, preferred_element_type)
    if key is None and recipe.is_stochastic:
        key = operands_key(lhs, rhs)
    train = aqt_utils.QuantMode.TRAIN
    matmul = config.set_context(to_aqt(recipe), key, None, lhs_quant_mode=train, rhs_quant_mode=train)
    make_tiles = tiling_fn(recipe)
    if make_tiles is None:
        return matmul(lhs, rhs, dimension_numbers)
    tiles = make_tiles(lhs, rhs, dimension_numbers)
    return tiled_dot_general.tiled_dot_general(tiles, lhs, rhs, dimension_numbers, dot_general=matmul)


def linen_op(op: Op, recipe: Recipe, options: OpOptions = TRAINING) -> Callable[[], nn.Module]:
    """Make a factory of Linen modules; an einsum's is called as ``module(equation, activation, weight)``.

    Args:
      op, recipe, options: as for ``Backend.linen_op``.

    Raises:
      NotImplementedError: AQT cannot do what the recipe asks.
    """
    module = _module(recipe, options)
    return module if op == "dot_general" else functools.partial(AqtEinsum, recipe, options)
