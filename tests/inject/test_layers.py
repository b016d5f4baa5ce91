"""What layers are, and what a config makes of them."""

from __future__ import annotations

import math

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant import describe_layers, linear_layers
from jaxquant.inject.layers import einsum_out_features

X = jnp.ones((2, 4))


@pytest.mark.parametrize(
    ("string", "texts"),
    [
        ("int8", ("int8 × int8",) * 3),
        ("int8w", ("float (int8 dequantized)", "float (int8 dequantized)", "float")),
        ("aqt_fp8", ("float8_e4m3fn × float8_e4m3fn", "float", "float")),
    ],
)
def test_a_matmul_with_one_float_operand_is_a_float_matmul(string, texts):
    (report,) = describe_layers(nn.Dense(4), {"quantization": string, "quant_backend": "native"}, X)
    assert (report.fwd, report.dlhs, report.drhs) == texts


@pytest.mark.parametrize(
    ("equation", "lhs", "rhs"),
    [
        ("bsd,dhk->bshk", (2, 3, 4), (4, 5, 6)),
        ("bd,df", (2, 4), (4, 5)),
        ("...d,df->...f", (2, 3, 4), (4, 5)),
        ("ebd,edf->ebf", (3, 2, 4), (3, 4, 5)),
        ("bd,dfg->bf", (2, 4), (4, 5, 7)),
        ("bd,d->b", (2, 4), (4,)),
    ],
)
def test_outputs_of_an_einsum(equation, lhs, rhs):
    """Outputs are the axes of the result that it has beyond the activation's."""
    shape = np.einsum(equation, np.ones(lhs), np.ones(rhs)).shape
    rows = math.prod(lhs) // rhs[-2 if rhs[0] == 3 else 0]  # all axes of the activation but the contracted one
    assert einsum_out_features(equation, len(lhs), rhs) == math.prod(shape) // rows
