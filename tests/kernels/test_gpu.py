"""Mosaic GPU kernels: numbers in the interpreter (jax 0.11 and newer), programs from the compilers of absent chips."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant.core.quantize import quantize_with_scale
from jaxquant.core.recipe import TensorSpec
from jaxquant.kernels import mosaic_gpu
from jaxquant.kernels.fp8_einsum import gpu as einsum_gpu
from jaxquant.kernels.fp8_einsum import reference
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


@dataclasses.dataclass(frozen=True)
class Product:
    """One call of ``matmul``; ``sizes`` are B, M, N, K."""

    sizes: tuple[int, int, int, int]
    lhs: str
    rhs: str
    out_dtype: str = "bfloat16"
    accumulator: str = "float32"
    per_channel: bool = False

    def __str__(self) -> str:
        return "-".join(str(value) for value in dataclasses.astuple(self))

    @property
    def shapes(self):
        B, M, N, K = self.sizes
        return [(B, M, K), (B, N, K), *([(B, M, 1), (B, 1, N)] if self.per_channel else [(1,)])]

    def run(self, function, lhs, rhs, *scales, **options):
        given = dict(zip(("left", "right") if self.per_channel else ("scale",), scales, strict=True))
        return function(lhs, rhs, **given, out_dtype=self.out_dtype, accumulator=self.accumulator, **options)


E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
PRODUCTS = (
    Product((1, 128, 128, 256), E4M3, E4M3, accumulator="bfloat16"),
    Product((2, 128, 256, 128), "int8", "int8", accumulator="int32", per_channel=True),
    Product((1, 128, 384, 128), E5M2, E4M3, "float32", per_channel=True),
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
        return quantize_gpu.refusal(shape, x_dtype, scale, dtype=dtype, **options) or ""

    for capability in ("9.0", "10.0"):
        assert refusal(capability=capability) == ""
    told = "the kernel is for Hopper to Blackwell and does not compile for compute capability 8.9"
    assert refusal(capability="8.9") == told
    assert "the device here is cpu" in refusal()
    assert "tiles of 64×128, which do not divide 100×128" in refusal((100, 128))
    assert "not float16" in refusal(x_dtype="float16")
    assert "not int4" in refusal(dtype="int4")
    assert "not (64, 2) of (64, 128)" in refusal(scale=(64, 2))
    assert (refusal(interpret=True) == "") == mosaic_gpu.NEW


@interpreted
@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_matmul_is_its_reference_to_the_bit(product):
    keys = jax.random.split(jax.random.key(0), 4)
    lhs_shape, rhs_shape, *scale_shapes = product.shapes
    lhs = jax.random.randint(keys[0], lhs_shape, -3, 4).astype(product.lhs)
    rhs = jax.random.randint(keys[1], rhs_shape, -3, 4).astype(product.rhs)
    scales = [jax.random.uniform(key, shape) for key, shape in zip(keys[2:], scale_shapes, strict=False)]
    found = product.run(einsum_gpu.matmul, lhs, rhs, *scales, interpret=True)
    assert found.dtype == product.out_dtype
    equal_bits(found, product.run(reference.matmul, lhs, rhs, *scales))


def test_what_matmul_cannot_do_is_refused_by_name(monkeypatch):
    def refusal(lhs=E4M3, rhs=E4M3, sizes=(1, 128, 128, 128), out_dtype="bfloat16", accumulator="float32", **options):
        B, M, N, K = sizes
        more: dict[str, Any] = {"out_dtype": out_dtype, "accumulator": accumulator, "capability": "9.0"} | options
        return einsum_gpu.refusal((B, M, K), (B, N, K), lhs, rhs, **more) or ""

    assert refusal() == ""
    assert refusal("int8", "int8", accumulator="int32") == ""
    assert refusal(capability="10.0") == ("the kernel is for Hopper and does not compile for compute capability 10.0")
    assert "the device here is cpu" in refusal(capability=None)
    assert "which do not divide 128×128×100" in refusal(sizes=(1, 128, 128, 100))
    assert "not int8 with float8_e4m3fn" in refusal("int8")
    assert "does not add int8 in float32" in refusal("int8", "int8")
    assert "not float16" in refusal(out_dtype="float16")
    monkeypatch.setattr(mosaic_gpu, "NEW", False)
    assert "needs jax 0.11 or newer" in refusal(E5M2)
    assert refusal(E5M2, E5M2) == ""
    monkeypatch.setattr(mosaic_gpu, "NEW", True)
    assert refusal(E5M2) == ""


def compiled(step, *shapes, target):
    """Return how often each kernel of ours is called by a step that was compiled for an absent chip."""
    rows = jaxquant.audit(lambda *args: jax.tree.leaves(step(*args)), *shapes, target=target).kernels
    names = ("jaxquant quantize", "jaxquant fp8_einsum")
    return tuple(sum(row["times"] for row in rows if row["kernel"] == name) for name in names)


@pytest.mark.aot
def test_kernels_compile_for_an_absent_h200():
    products = [each for each in PRODUCTS if mosaic_gpu.NEW or each.lhs == each.rhs]
    casts = CASTS[:2]
    shapes = [
        [jax.ShapeDtypeStruct((M, N), cast.x_dtype), jax.ShapeDtypeStruct(cast.scale, jnp.float32)] for cast in casts
    ]
    for product in products:
        types = [product.lhs, product.rhs, "float32", "float32"]
        shapes.append([jax.ShapeDtypeStruct(*each) for each in zip(product.shapes, types, strict=False)])

    def step(shapes, seeds):
        calls = [functools.partial(cast.run, seeds=seeds) for cast in casts]
        calls += [functools.partial(product.run, einsum_gpu.matmul) for product in products]
        return [call(*each) for call, each in zip(calls, shapes, strict=True)]

    seeds = jax.ShapeDtypeStruct((2,), jnp.uint32)
    assert compiled(step, shapes, seeds, target="h200") == (len(casts), len(products))


@pytest.mark.aot
def test_quantize_compiles_for_an_absent_b200():
    x, scale = jax.ShapeDtypeStruct((M, N), jnp.bfloat16), jax.ShapeDtypeStruct((1, 1), jnp.float32)
    assert compiled(functools.partial(CASTS[0].run, seeds=None), x, scale, target="b200") == (1, 0)
