"""Mosaic GPU kernels: numbers in the interpreter (jax 0.11 and newer), programs from the compilers of absent chips."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant.core.quantize import quantize_with_scale
from jaxquant.core.recipe import TensorSpec
from jaxquant.kernels import mosaic_gpu
from jaxquant.kernels.quantize import gpu as quantize_gpu

M, N = 128, 256
interpreted = pytest.mark.skipif(not mosaic_gpu.NEW, reason="jax 0.10 has no public interpreter for Mosaic GPU kernels")


@dataclasses.dataclass(frozen=True)
class Cast:
    """One call of ``quantize``; ``scale`` is the shape of the scale."""

    dtype: str
    x_dtype: str = "bfloat16"
    scale: tuple[int, int] = (1, 1)
    compute_dtype: str = "float32"
    noisy: bool = False
    transposed: bool = False

    def __str__(self) -> str:
        return "-".join(str(value) for value in dataclasses.astuple(self))

    def run(self, x, scale, seeds, **options):
        return quantize_gpu.quantize(
            x,
            scale,
            dtype=self.dtype,
            seeds=seeds if self.noisy else None,
            transposed=self.transposed,
            compute_dtype=self.compute_dtype,
            **options,
        )


CASTS = (
    Cast("float8_e4m3fn", transposed=True),
    Cast("float8_e4m3fn", "float32", (1, N), "bfloat16", noisy=True),
    Cast("float8_e5m2", "float32", (M, 1), noisy=True, transposed=True),
    Cast("float8_e5m2", compute_dtype="bfloat16"),
    Cast("int8", "float32", (1, N), transposed=True),
    Cast("int8", scale=(M, 1), compute_dtype="bfloat16", noisy=True, transposed=True),
)


def equal_bits(found, expected):
    np.testing.assert_array_equal(np.asarray(found).view(np.uint8), np.asarray(expected).view(np.uint8))


@interpreted
@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_quantize_is_the_cast_of_the_core_to_the_bit(cast):
    keys = jax.random.split(jax.random.key(0), 3)
    # Some elements beyond the range of every dtype, some below its smallest number.
    x = jax.random.normal(keys[0], (M, N)) * jnp.exp(4 * jax.random.normal(keys[1], (M, N)))
    x = x.at[0, 0].set(0.0).at[1, 1].set(-1e9).astype(cast.x_dtype)
    scale = 0.1 * jnp.exp(jax.random.normal(keys[2], cast.scale))
    key = jax.random.key(5)
    seeds = jax.random.bits(key, (2,), jnp.uint32)
    spec = TensorSpec(cast.dtype, rounding="stochastic" if cast.noisy else "nearest")
    expected = quantize_with_scale(x, spec, scale, None, key, cast.compute_dtype).qvalue
    q, q_t, amax = cast.run(x, scale, seeds, interpret=True)
    equal_bits(q, expected)
    assert amax == jnp.max(jnp.abs(x)).astype(jnp.float32)
    assert (q_t is not None) == cast.transposed
    if q_t is not None:
        equal_bits(q_t, expected.T)


@interpreted
def test_a_nan_shows_in_the_amax():
    x = jnp.ones((M, N), jnp.bfloat16).at[70, 3].set(jnp.nan)
    assert jnp.isnan(Cast("float8_e4m3fn").run(x, jnp.ones((1, 1)), None, interpret=True)[2])


def test_what_quantize_cannot_do_is_refused_by_name():
    def refusal(shape=(64, 128), x_dtype="bfloat16", scale=(1, 1), dtype="int8", **options):
        return quantize_gpu.refusal(shape, x_dtype, scale, dtype=dtype, **options)

    for capability in ("9.0", "10.0"):
        assert refusal(capability=capability) is None
    assert refusal(capability="8.9") == (
        "the kernel is for Hopper to Blackwell and does not compile for compute capability 8.9"
    )
    assert "the device here is cpu" in refusal()
    assert "tiles of 64×128, which do not divide 100×128" in refusal((100, 128))
    assert "not float16" in refusal(x_dtype="float16")
    assert "not int4" in refusal(dtype="int4")
    assert "not (64, 2) of (64, 128)" in refusal(scale=(64, 2))
    assert (refusal(interpret=True) is None) == mosaic_gpu.NEW


@pytest.mark.aot
@pytest.mark.parametrize("target", ["h200", "b200"])
def test_quantize_compiles_for_absent_chips(target):
    shapes = [
        (jax.ShapeDtypeStruct((M, N), cast.x_dtype), jax.ShapeDtypeStruct(cast.scale, jnp.float32)) for cast in CASTS
    ]
    seeds = jax.ShapeDtypeStruct((2,), jnp.uint32)

    def step(shapes, seeds):
        return [cast.run(*each, seeds) for cast, each in zip(CASTS, shapes, strict=True)]

    found = jaxquant.audit(step, shapes, seeds, target=target)
    calls = [row["times"] for row in found.largest_moves if "jaxquant_quantize" in row["path"]]
    assert sum(calls) == len(CASTS)
