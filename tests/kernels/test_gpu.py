"""Mosaic GPU kernels: numbers in the interpreter (jax 0.11 and newer), and programs for GPUs that are not attached."""

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
from jaxquant.kernels.block_matmul import cases as matmul_cases
from jaxquant.kernels.block_matmul import gpu as matmul_gpu
from jaxquant.kernels.block_quantize import cases as block_cases
from jaxquant.kernels.block_quantize import gpu as block_gpu
from jaxquant.kernels.fp8_einsum import cases as einsum_cases
from jaxquant.kernels.fp8_einsum import gpu as einsum_gpu
from jaxquant.kernels.fp8_einsum import reference
from jaxquant.kernels.quantize import cases as quantize_cases
from jaxquant.kernels.quantize import gpu as quantize_gpu

M, N = 128, 256
interpreted = pytest.mark.skipif(not mosaic_gpu.HAS_JAX_0_11, reason="jax 0.10 has no public Mosaic GPU interpreter")


E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
PRODUCTS = (
    einsum_cases.Case((1, 128, 128, 256), E4M3, E4M3),
    einsum_cases.Case((2, 128, 256, 128), "int8", "int8", accumulator="int32", per_channel=True),
    einsum_cases.Case((1, 128, 384, 128), E5M2, E4M3, "float32", "float32", per_channel=True),
)
_cast = functools.partial(quantize_cases.Case, (M, N))
CASTS = (
    _cast(E4M3, transposed=True),
    _cast(E4M3, "float32", "bfloat16"),
    _cast(E5M2, "float32", transposed=True),
    _cast(E5M2, compute_dtype="bfloat16"),
    _cast("int8", "float32", transposed=True),
    _cast("int8", compute_dtype="bfloat16", transposed=True),
)


def cast(case, x, scale, **options):
    """Call ``quantize`` for one of the cases."""
    options |= {"transposed": case.transposed, "compute_dtype": case.compute_dtype}
    return quantize_gpu.quantize(x, scale, dtype=case.dtype, **options)


def shapes_of(case):
    B, M, N, K = case.sizes
    return [(B, M, K), (B, N, K), *([(B, M, 1), (B, 1, N)] if case.per_channel else [(1,)])]


def product(case, function, lhs, rhs, *scales, **options):
    """Call ``matmul`` for one of the cases."""
    given = dict(zip(("left", "right") if case.per_channel else ("scale",), scales, strict=True))
    return function(lhs, rhs, **given, out_dtype=case.out_dtype, accumulator=case.accumulator, **options)


def equal_bits(found, expected):
    np.testing.assert_array_equal(np.asarray(found).view(np.uint8), np.asarray(expected).view(np.uint8))


@interpreted
@pytest.mark.parametrize("case", CASTS, ids=str)
def test_quantize_is_the_cast_of_the_core_to_the_bit(case):
    keys = jax.random.split(jax.random.key(0), 3)
    # Some elements are above the range of every dtype, some below the smallest number.
    x = jax.random.normal(keys[0], (M, N)) * jnp.exp(4 * jax.random.normal(keys[1], (M, N)))
    x = x.at[0, 0].set(0.0).at[1, 1].set(-1e9).astype(case.x_dtype)
    scale = 0.1 * jnp.exp(jax.random.normal(keys[2], (1, 1)))
    expected = quantize_with_scale(x, TensorSpec(case.dtype), scale, compute_dtype=case.compute_dtype).qvalue
    q, q_t, amax = cast(case, x, scale, interpret=True)
    equal_bits(q, expected)
    assert amax == jnp.max(jnp.abs(x)).astype(jnp.float32)
    assert (q_t is not None) == case.transposed
    if q_t is not None:
        equal_bits(q_t, expected.T)


@interpreted
def test_a_nan_shows_in_the_amax():
    x = jnp.ones((M, N), jnp.bfloat16).at[70, 3].set(jnp.nan)
    assert jnp.isnan(cast(_cast(E4M3), x, jnp.ones((1, 1)), interpret=True)[2])


def test_what_the_kernels_cannot_do_is_refused_by_name():
    cast_refusal = functools.partial(quantize_gpu.refusal, (64, 128), "bfloat16", dtype="int8")
    assert cast_refusal(capability=(10, 0)) is None
    assert "compute capability 8.9" in (cast_refusal(capability=(8, 9)) or "")

    def refusal(lhs=E4M3, rhs=E4M3, depth=128, accumulator="float32", capability=(9, 0)):
        more: dict[str, Any] = {"out_dtype": "bfloat16", "accumulator": accumulator, "capability": capability}
        return einsum_gpu.refusal((1, 128, depth), (1, 128, depth), lhs, rhs, **more) or ""

    assert refusal() == refusal("int8", "int8", accumulator="int32") == ""
    assert "compute capability 10.0" in refusal(capability=(10, 0))
    assert "which do not divide 128×128×100" in refusal(depth=100)
    assert "not int8 and float8_e4m3fn" in refusal("int8")


@interpreted
@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_matmul_is_its_reference_to_the_bit(case):
    keys = jax.random.split(jax.random.key(0), 4)
    lhs_shape, rhs_shape, *scale_shapes = shapes_of(case)
    lhs = jax.random.randint(keys[0], lhs_shape, -3, 4).astype(case.lhs_dtype)
    rhs = jax.random.randint(keys[1], rhs_shape, -3, 4).astype(case.rhs_dtype)
    scales = [jax.random.uniform(key, shape) for key, shape in zip(keys[2:], scale_shapes, strict=False)]
    found = product(case, einsum_gpu.matmul, lhs, rhs, *scales, interpret=True)
    assert found.dtype == case.out_dtype
    equal_bits(found, product(case, reference.matmul, lhs, rhs, *scales))


GROUPED = ("block_matmul_grouped", "block_matmul_grouped_drhs")


def compiled(step, *shapes, target):
    """Return how often a step, compiled for a chip that is not attached, calls each of our kernels."""
    audit = jaxquant.aot.audit(lambda *args: jax.tree.leaves(step(*args)), *shapes, target=target)
    names = [row["kernel"].replace(" ", "_") for row in audit.kernels for _ in range(row["times"])]
    names += [row["kind"] for row in audit.matmuls]
    return tuple(names.count(f"jaxquant_{name}") for name in ("quantize", "fp8_einsum", "block_quantize", *GROUPED))


@pytest.mark.aot
def test_kernels_compile_for_an_absent_h200():
    products = [each for each in PRODUCTS if mosaic_gpu.HAS_JAX_0_11 or each.lhs_dtype == each.rhs_dtype]
    casts = CASTS[:2]
    shapes = [[jax.ShapeDtypeStruct((M, N), each.x_dtype), jax.ShapeDtypeStruct((1, 1), jnp.float32)] for each in casts]
    for case in products:
        types = [case.lhs_dtype, case.rhs_dtype, "float32", "float32"]
        shapes.append([jax.ShapeDtypeStruct(*each) for each in zip(shapes_of(case), types, strict=False)])
    blocks = block_cases.CASES[3:5]
    shapes += [[jax.ShapeDtypeStruct(each.shape, each.x_dtype)] for each in blocks]

    grouped = [each for each in matmul_cases.CASES if each.groups]
    grouped = [each for each in grouped if mosaic_gpu.HAS_JAX_0_11 or each.lhs_dtype == each.rhs_dtype]
    shapes += [[jax.ShapeDtypeStruct(*shape) for shape in each.shapes] for each in grouped]

    def step(shapes):
        calls = [functools.partial(cast, each) for each in casts]
        calls += [functools.partial(product, each, einsum_gpu.matmul) for each in products]
        calls += [functools.partial(block_gpu.block_quantize, casts=each.casts) for each in blocks]
        calls += [functools.partial(getattr(matmul_gpu, each.form), out_dtype=each.out_dtype) for each in grouped]
        return [call(*each) for call, each in zip(calls, shapes, strict=True)]

    forms = [each.form for each in grouped]
    wanted = (
        len(casts),
        len(products),
        len(blocks),
        *(forms.count(name.removeprefix("block_matmul_")) for name in GROUPED),
    )
    assert compiled(step, shapes, target="h200") == wanted
    x, scale = jax.ShapeDtypeStruct((M, N), jnp.bfloat16), jax.ShapeDtypeStruct((1, 1), jnp.float32)
    assert compiled(functools.partial(cast, CASTS[0]), x, scale, target="b200") == (1, 0, 0, 0, 0)
