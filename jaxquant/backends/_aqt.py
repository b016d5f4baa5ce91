"""Public modules of AQT that the backend uses: the only import of AQT, after a check of its version."""

# ruff: noqa: E402, F401

from jaxquant.backends._versions import require
from jaxquant.config.backends import BACKENDS

require(BACKENDS["aqt"])

from aqt.jax.v2 import (
    aqt_dot_general,
    aqt_quantizer,
    aqt_tensor,
    calibration,
    config,
    stochastic_rounding,
    tiled_dot_general,
    utils,
)
from aqt.jax.v2.numerics import fp8_numerics, int_numerics
