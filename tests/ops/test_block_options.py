"""Details of ``fp8_block`` and ``mxfp8``: supported blocks, the dtype of each sum, and options."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxquant.backends import load
from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.recipe import Recipe
from jaxquant.export.hf import read_quantization
from jaxquant.export.hf.recipe import to_recipe
from jaxquant.ops import dot_general
from tests.numerics import dot_bound

OPTIMIZED = False

M, K, N = 256, 384, 128
NUMBERS = (((1,), (0,)), ((), ()))
BLOCK, SQUARE = {"quantization": "fp8_block"}, {"quantization": "mxfp8", "square_weight_blocks": True}
UP, STATIC = BLOCK | {"scale_fmt": "ue8m0"}, {"act_quantization_calibration_method": "fixed,6"}
E4M3 = ml_dtypes.float8_e4m3fn
F32 = np.float32


def recipe(config, **options) -> Recipe:
    found = QuantConfig.from_any({**config, **options}).recipe()
    assert found is not None
    return found


def operands(dtype="float32"):
    keys = jax.random.split(jax.random.key(1), 3)
    return [jax.random.normal(k, shape, dtype) for k, shape in zip(keys, ((M, K), (K, N), (M, N)), strict=True)]


def step(chosen, x, w, g, out=None):
    run = lambda x, w: dot_general(x, w, NUMBERS, preferred_element_type=out, recipe=chosen)  # noqa: E731
    y, back = jax.vjp(run, x, w)
    return y, *back(g.astype(y.dtype))


def cast(x, block, up=False, bound=np.inf):
    """Quantize and dequantize in numpy by blocks of (rows, columns): ``amax / 448``, rounded up to a power of two."""
    rows, columns = block
    cut = np.asarray(x, F32).reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    amax = np.minimum(np.abs(cut).max((1, 3), keepdims=True), F32(bound))
    scale = amax * F32(1 / 448)
    scale = np.exp2(np.ceil(np.log2(amax.astype(np.float64) / 448))).astype(F32) if up else scale
    return ((cut / scale).clip(-448, 448).astype(E4M3).astype(F32) * scale).reshape(x.shape)


@pytest.mark.parametrize("config", [BLOCK, SQUARE])
@pytest.mark.parametrize("matmul", [0, 1, 2])
def test_partial_sums_are_added_in_float32(config, matmul):
    """The sum of 1025 ones: a bfloat16 sum stays at 256, and a sum of bfloat16 tile sums rounds 1025 to 1024."""
    sizes = [8, 8, 8]
    sizes[(1, 2, 0)[matmul]] = 1025
    (m, k, n), chosen = sizes, recipe(config)
    x, w, g = jnp.ones((m, k), jnp.bfloat16), jnp.ones((k, n), jnp.bfloat16), jnp.ones((m, n))
    got = step(chosen, x, w, g, "float32")[matmul]
    np.testing.assert_array_equal(np.asarray(got, F32), F32(1025) if matmul == 0 else F32(jnp.bfloat16(1025)))


@pytest.mark.parametrize(
    ("config", "bound", "tile", "scale"),
    [
        (BLOCK | {"activation_scale_ub": 8.0}, 8.0, (128, 128), None),
        ({"quantization": "mxfp8", "activation_scale_ub": 8.0}, 8.0, (32, 1), None),
        (BLOCK | STATIC, 6.0, (128, 128), F32(6 / 448)),
        (UP | STATIC, 6.0, (128, 128), F32(2.0**-6)),
    ],
    ids=["block bound", "mx bound", "static", "static power"],
)
def test_a_bound_and_a_static_scale_of_activations_clip_and_mask(config, bound, tile, scale):
    """``fixed,6`` is one scale for the tensor: 6/448, or the smallest power of two above 6/448."""
    x, w, g = operands()
    x, up = x.at[3, 5].set(40.0), config.get("scale_fmt") == "ue8m0" or config["quantization"] == "mxfp8"
    y, dx, dw = step(recipe(config), x, w, g)
    left, right = cast(x, (1, tile[0]), up, bound), cast(w, tile, up)
    if scale is not None:
        left, other = (np.asarray(x) / scale).clip(-448, 448).astype(E4M3).astype(F32) * scale, cast(g, (128, 1), up)
        assert (
            np.abs(np.asarray(dw, np.float64) - left.T.astype(np.float64) @ other) <= dot_bound(left.T, other)
        ).all()
    assert (np.abs(np.asarray(y, np.float64) - left.astype(np.float64) @ right) <= dot_bound(left, right)).all()
    assert np.argwhere(dx == 0).tolist() == [[3, 5]]


def test_scale_fmt_is_that_of_checkpoints():
    """The forward recipe of fp8_block with ue8m0 equals the recipe of DeepSeek's config, field by field."""
    published = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    for fmt in ("", "ue8m0"):
        more = {"scale_fmt": fmt} if fmt else {}
        layer = read_quantization({"quantization_config": published | more}).spec("a")  # pyright: ignore
        theirs, ours = to_recipe(layer, "x").fwd, recipe(BLOCK, scale_fmt=fmt).fwd  # pyright: ignore
        assert (theirs.lhs, theirs.rhs) == (ours.lhs, ours.rhs)


@pytest.mark.parametrize("config", [UP | {"activation_scale_ub": 2.0}, UP | STATIC, SQUARE])
def test_what_is_converted_serves_the_training_forward(config):
    x, w, g = operands("bfloat16")
    chosen = recipe(config)
    tensor = load("native").quantize_weight("dot_general", chosen, w, (0,), {})
    scales = np.asarray(tensor.scale, F32)
    np.testing.assert_array_equal(scales, np.exp2(np.round(np.log2(scales))))
    served = dot_general(x, tensor.astype("bfloat16"), NUMBERS, recipe=chosen)
    np.testing.assert_array_equal(step(chosen, x, w, g)[0], served)
