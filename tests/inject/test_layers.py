"""What layers are, and what a config makes of them."""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant import describe_layers
from jaxquant.compat.maxtext.handle import _einsum_out_features

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


def test_a_layer_tells_its_options_and_the_shapes_that_meet_in_it():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.Dense(4, precision="high", name="mix")
            return dense(dense(x)[0])

    (layer,) = describe_layers(Twice(), "", X)
    assert dict(layer.parameter_shapes) == {"kernel": (4, 4), "bias": (4,)}
    assert layer.input_shapes == ((2, 4), (4,))
    assert layer.precision == (jax.lax.Precision.HIGH, jax.lax.Precision.HIGH)


def test_a_kernel_out_of_reach_says_so_beside_what_was_asked():
    class Clipped(nn.Module):
        @nn.compact
        def __call__(self, x):
            forward = lambda layer, x: nn.vjp(lambda layer, x: layer(x), layer, x)  # noqa: E731
            clipped = nn.custom_vjp(lambda layer, x: layer(x), forward, lambda vjp, g: vjp(jnp.clip(g, -1, 1)))
            return clipped(nn.Dense(4, name="inner"), x) + nn.Dense(4, name="other")(x)

    inner, other = describe_layers(Clipped(), {"quantization": "fp8", "quant_backend": "native"}, X)
    assert inner.recipe == other.recipe == "fp8"
    assert inner.reason.startswith("quantization 'fp8'; out of reach: inside custom_vjp_call of ")
    assert other.reason == "quantization 'fp8'"


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
    assert _einsum_out_features(equation, rhs) == math.prod(shape) // rows
