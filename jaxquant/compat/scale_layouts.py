"""Layouts of the scales of an activation in groups, as other libraries' kernels have them in memory.

Here scales are row-major, ``[*lead, G]``. Other layouts are written and read at the border to another library.

Shapes: lead = (…, M) the axes of the activation but the last; G groups along that.
"""

from __future__ import annotations

import enum
import math

import jax.numpy as jnp
from jaxtyping import Array, Float


class ScaleLayout(enum.Enum):
    """Where the axis of the groups lies; the value says it as a shape."""

    ROW_MAJOR = "[*lead, G]"
    M_MAJOR = "[G, M padded to a multiple of 4]"
    """DeepGEMM's: lead is one axis of all rows, and each group's scales begin at a multiple of 16 bytes."""
    MLC_DYNAMIC = "[G, *lead]"
    """``rowwise_group_quant_fp8(transpose_scale=True)``, whose docstring has another shape."""
    MLC_BMM = "[B, G, *lead[1:]]"
    """``rowwise_group_quant_fp8(transpose_scale=True, keep_first_batch_dim=True)`` of three axes or more."""
    MLC_STATIC = "[*lead[:-1], G, M]"
    """``broadcast_activation_scale(transpose=True)``."""

    @classmethod
    def of_mlc(cls, transpose_scale: bool, keep_first_batch_dim: bool = False) -> ScaleLayout:
        """Return the layout that MLC's flags of ``rowwise_group_quant_fp8`` ask for."""
        if not transpose_scale:
            return cls.ROW_MAJOR
        return cls.MLC_BMM if keep_first_batch_dim else cls.MLC_DYNAMIC

    def write(self, scale: Float[Array, "*lead G"]) -> Float[Array, "*stored"]:
        """Lay out row-major scales.

        Raises:
          ValueError: ``MLC_BMM`` of an activation of fewer than three axes.
        """
        if self is ScaleLayout.M_MAJOR:
            rows = scale.reshape(-1, scale.shape[-1]).T
            return jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % _ALIGNMENT)))
        return jnp.moveaxis(scale, -1, self._axis(scale.ndim))

    def read(self, stored: Float[Array, "*stored"], lead: tuple[int, ...]) -> Float[Array, "*lead G"]:
        """Return row-major scales of an activation whose axes but the last are ``lead``; the padding is not read."""
        if self is ScaleLayout.M_MAJOR:
            return stored[:, : math.prod(lead)].T.reshape(*lead, stored.shape[0])
        return jnp.moveaxis(stored, self._axis(stored.ndim), -1)

    def _axis(self, ndim: int) -> int:
        if self is ScaleLayout.MLC_BMM and ndim < 3:
            raise ValueError(f"layout {self.value} belongs to an activation of three axes or more, got {ndim}")
        return _AXES[self]


_ALIGNMENT = 4
_AXES = {ScaleLayout.ROW_MAJOR: -1, ScaleLayout.MLC_DYNAMIC: 0, ScaleLayout.MLC_BMM: 1, ScaleLayout.MLC_STATIC: -2}
