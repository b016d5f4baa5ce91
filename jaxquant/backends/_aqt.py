"""The modules of AQT that the backend uses, all public: the only import of AQT, behind a check of its version."""

from jaxquant.backends._versions import require
from jaxquant.config.backends import BACKENDS

require(BACKENDS["aqt"].package, BACKENDS["aqt"].series, BACKENDS["aqt"].title)

from aqt.jax.v2 import (  # noqa: E402
    aqt_dot_general,
    aqt_quantizer,
    aqt_tensor,
    calibration,
    config,
    stochastic_rounding,
    tiled_dot_general,
    utils,
)
from aqt.jax.v2.flax import aqt_flax  # noqa: E402
from aqt.jax.v2.numerics import fp8_numerics, int_numerics  # noqa: E402

__all__ = [
    "aqt_dot_general",
    "aqt_flax",
    "aqt_quantizer",
    "aqt_tensor",
    "calibration",
    "config",
    "fp8_numerics",
    "int_numerics",
    "stochastic_rounding",
    "tiled_dot_general",
    "utils",
]
