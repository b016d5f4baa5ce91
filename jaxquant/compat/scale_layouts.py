"""Memory layouts that the kernels of other libraries use for the scales of an activation with groups.

jaxquant's scales are row-major, ``[*lead, G]``. Other layouts are only used to exchange data with other libraries.

Shapes: lead = (…, M) are all axes of the activation except the last; G is the number of groups along the last axis.
"""

from __future__ import annotations

import enum
import math

import jax.numpy as jnp
from jaxtyping import Array, Float


class ScaleLayout(enum.Enum):
    """Layout of scales; the value of each member is the shape, which shows the position of the group axis."""

    ROW_MAJOR = "[*lead, G]"
    M_MAJOR = "[G, M padded to a multiple of 4]"
    """DeepGEMM's layout: one axis has all rows, and the scales of each group start at a multiple of 16 bytes."""
    MLC_DYNAMIC = "[G, *lead]"
    """Layout of ``rowwise_group_quant_fp8(transpose_scale=True)``; the shape in MLC's docstring is wrong."""
    MLC_BMM = "[B, G, *lead[1:]]"
    """Layout of ``rowwise_group_quant_fp8(transpose_scale=True, keep_first_batch_dim=True)``, for 3 or more axes."""
    MLC_STATIC = "[*lead[:-1], G, M]"
    """Layout of ``broadcast_activation_scale(transpose=True)``."""

    @classmethod
    def of_mlc(cls, transpose_scale: bool, keep_first_batch_dim: bool = False) -> ScaleLayout:
        """Return the layout for MLC's flags of ``rowwise_group_quant_fp8``."""
        if not transpose_scale:
            return cls.ROW_MAJOR
        return cls.MLC_BMM if keep_first_batch_dim else cls.MLC_DYNAMIC

    def write(self, scale: Float[Array, "*lead G"]) -> Float[Array, "*stored"]:
        """Return row-major scales in this layout.

        Raises:
          ValueError: the layout is ``MLC_BMM`` and the activation has fewer than three axes.
        """
        if self is ScaleLayout.M_MAJOR:
            rows = scale.reshape(-1, scale.shape[-1]).T
            return jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % _ALIGNMENT)))
        return jnp.moveaxis(scale, -1, self._axis(scale.ndim))

    def read(self, stored: Float[Array, "*stored"], lead: tuple[int, ...]) -> Float[Array, "*lead G"]:
        """Return row-major scales without padding, for an activation whose axes except the last are ``lead``."""
        if self is ScaleLayout.M_MAJOR:
            return stored[:, : math.prod(lead)].T.reshape(*lead, stored.shape[0])
        return jnp.moveaxis(stored, self._axis(stored.ndim), -1)

    def _axis(self, ndim: int) -> int:
        if self is ScaleLayout.MLC_BMM and ndim < 3:
            raise ValueError(f"layout {self.value} requires an activation with at least three axes, got {ndim}")
        return _AXES[self]


_ALIGNMENT = 4
_AXES = {ScaleLayout.ROW_MAJOR: -1, ScaleLayout.MLC_DYNAMIC: 0, ScaleLayout.MLC_BMM: 1, ScaleLayout.MLC_STATIC: -2}
