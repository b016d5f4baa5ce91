"""What layers are, and what a config makes of them."""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant import QuantConfig, coverage, describe_layers, linear_layers, maybe_quantize_model
from jaxquant.config.rules import Rule
from jaxquant.core.recipe import MatmulSpec, Recipe, TensorSpec
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


def test_a_layer_tells_its_options_and_the_shapes_that_meet_in_it():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.Dense(4, precision="high", name="mix")
            return dense(dense(x)[0])

    (layer,) = linear_layers(Twice(), X)
    assert dict(layer.parameter_shapes) == {"kernel": (4, 4), "bias": (4,)}
    assert layer.input_shapes == ((2, 4), (4,))
    assert layer.precision == (jax.lax.Precision.HIGH, jax.lax.Precision.HIGH)


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


def test_a_recipe_of_ones_own_is_reported_by_its_name():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="b")(nn.Dense(4, name="a")(x))

    mine = Recipe("mine", MatmulSpec(TensorSpec("int8"), TensorSpec("int8")))
    config = QuantConfig(rules=(Rule("b", mine),))
    reports = {report.path: report for report in describe_layers(Two(), config, X)}
    assert (reports["a"].recipe, reports["b"].recipe, reports["b"].backend) == (None, "mine", "native")
    assert (reports["b"].fwd, reports["b"].dlhs) == ("int8 × int8", "float")

    variables = Two().init(jax.random.key(0), X)
    table = coverage(maybe_quantize_model(Two(), config, X).apply, variables, X, config=config, layers=reports.values())
    dtypes = {row.path: (row.lhs_dtype, row.rhs_dtype) for row in table.rows}
    assert dtypes == {"a": ("float32", "float32"), "b": ("int8", "int8")}
    table.check()
