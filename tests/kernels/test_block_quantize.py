"""The kernels of block quantization, compared with their reference without a TPU or GPU, and where they run."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant.core.blocks import repeat_scale
from jaxquant.core.qtensor import QTensor
from jaxquant.kernels import mosaic_gpu
from jaxquant.kernels.block_quantize import api, gpu, reference, tpu
from jaxquant.kernels.block_quantize.cases import CASES
from jaxquant.ops.implementation import choices_made
from tests.kernels.test_block_matmul import gradients
from tests.ops.test_block_scaled import matmuls, on

TINY = 2.0**-140


def hard(shape, dtype):
    """Return numbers of many magnitudes, with blocks of zeros, subnormal numbers, infinities or NaN."""
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], shape) * jnp.exp(4 * jax.random.normal(keys[1], (shape[0], 1)))
    x = x.at[3].set(0.0).at[4, ::2].set(-0.0).at[5].set(TINY).at[6, 7].set(jnp.inf).at[8, 9].set(jnp.nan)
    return x.at[10, :4].set(jnp.array([448.0, -464.0, 2.0**-9, -(2.0**-10)])).astype(dtype)


def bits(tree):
    """Return the bytes of every array; all NaNs have the same bytes."""

    def of(x):
        return np.where(np.isnan(np.asarray(x, np.float32)), np.float32(1), np.asarray(x)).astype(x.dtype).tobytes()

    return jax.tree.map(of, tree)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_bit_is_the_references(case):
    x = hard(case.shape, case.x_dtype)
    got = jax.jit(lambda x: tpu.block_quantize(x, case.casts, interpret=True))(x)
    wanted = jax.jit(lambda x: reference.block_quantize(x, case.casts))(x)
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, wanted)
    assert bits(got) == bits(wanted)


def with_nan(x, made, cast):
    """Convert the reference's results from CPU to GPU behavior: on GPUs, the maximum of a block keeps a NaN."""
    if cast.spec.scale_rounding != "exact":
        return made
    rows, columns = cast.block
    hit = jnp.isnan(x).reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns).any((1, 3))
    whole = repeat_scale(repeat_scale(hit, 0, x.shape[0], rows), 1, x.shape[1], columns)

    def of(array, where):
        return jnp.where(where, jnp.nan, array.astype("float32")).astype(array.dtype)

    tensor = made.tensor and QTensor(of(made.tensor.qvalue, whole), of(made.tensor.scale, hit))
    return reference.Blocks(tensor, None if made.values is None else of(made.values, whole))


@pytest.mark.skipif(not mosaic_gpu.HAS_JAX_0_11, reason="jax 0.10 has no public interpreter for Mosaic GPU kernels")
@pytest.mark.parametrize("case", [*CASES[2:5], CASES[6]], ids=str)
def test_on_a_gpu_every_bit_is_the_references(case):
    x = hard(case.shape, case.x_dtype)
    got = gpu.block_quantize(x, case.casts, interpret=True)
    # On CPUs, XLA's simplifier multiplies by a reciprocal, which differs from the quotient.
    exact = jax.jit(reference.block_quantize, static_argnums=1, compiler_options={"xla_disable_hlo_passes": "algsimp"})
    made = exact(x, case.casts)
    wanted = tuple(with_nan(x, each, cast) for each, cast in zip(made, case.casts, strict=True))
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, wanted)
    assert bits(got) == bits(wanted)


@pytest.mark.parametrize(
    ("kind", "name", "implementation", "casts", "products", "why"),
    [
        ("NVIDIA H200", "fp8_block", None, 3, (0, 3), "times as fast as XLA: benchmarks/results/kernels"),
        ("NVIDIA H200", "fp8_block", "xla", 0, (3, 0), "requested"),
        ("NVIDIA B200", "fp8_block", "pallas", 0, (3, 0), "on TPUs and Hopper GPUs, but the device is NVIDIA B200"),
    ],
)
def test_on_hopper_the_cast_is_picked(kind, name, implementation, casts, products, why):
    jax.clear_caches()  # a cached trace would not record the choice
    shapes = on(kind, 2, 128, 384), on(kind, 384, 256)
    numbers = (((2,), (0,)), ((), ()))
    step = functools.partial(gradients, name=name, implementation=implementation, numbers=numbers)
    text = str(jax.jit(step).trace(*shapes).jaxpr)
    assert text.count("name=jaxquant_block_quantize") == casts
    assert matmuls(step, *shapes) == products  # of bfloat16 values, and of elements
    assert any(piece == "block_quantize" and why in choice.reason for piece, choice in choices_made())


@pytest.mark.aot
def test_what_is_cast_for_an_absent_h200_is_multiplied_as_it_lies():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 128, 384), (384, 256))]
    audit = jaxquant.aot.audit(functools.partial(gradients, numbers=(((2,), (0,)), ((), ()))), *shapes, target="h200")
    assert "| matmuls | 3 f8e4m3fn in blocks |" in str(audit)
    assert [(row["kernel"], row["times"]) for row in audit.kernels] == [("jaxquant block_quantize", 3)]
    assert audit.moves == len(audit.largest_moves)  # these are all
    assert [row for row in audit.largest_moves if "f8e4m3fn" in row["types"]] == []


def test_what_the_kernel_does_not_cast_is_refused_by_name():
    tile = CASES[0].casts[0]

    def refusal(shape=(256, 384), block=(1, 128), **changes):
        cast = tile._replace(block=block, spec=dataclasses.replace(tile.spec, **changes))
        return api.refusal(jnp.zeros(shape, "bfloat16"), (cast,)) or ""

    assert refusal((2, 128, 4, 96), (1, 128, 1, 1)) == ""
    for shape, block in (((256, 300), (1, 128)), ((256, 384), (1, 64)), ((0, 384), (1, 128))):
        assert f"needs tiles of 128×128, not shape {shape} in blocks of" in refusal(shape, block)
    assert "division by the scale with rounding to nearest" in refusal(rounding="stochastic")
