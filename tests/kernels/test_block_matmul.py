"""block_matmul: its definition, the kernel in the interpreter, where it runs, and its compiled programs."""

import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.config.recipes import RECIPES
from jaxquant.core.qtensor import dequantize
from jaxquant.core.quantize import quantize
from jaxquant.kernels import mosaic_gpu
from jaxquant.kernels.block_matmul import cases, reference
from jaxquant.kernels.block_matmul.reference import BLOCK
from jaxquant.ops import block_ragged, block_scaled, dot_general, implementation, ragged_dot
from jaxquant.ops.dimensions import Dimensions
from jaxquant.ops.implementation import choices_made
from tests import numerics
from tests.kernels.interpret_worker import arguments
from tests.ops.test_block_scaled import matmuls, on, primitives

ROOT = Path(__file__).parents[2]
NUMBERS = (((1,), (0,)), ((), ()))


def widened(x, scale):
    """Return elements multiplied by the scales of their blocks."""
    x, scale = (np.asarray(each, np.float64) for each in (x, scale))
    if scale.shape[-2] != x.shape[-2]:
        scale = np.repeat(scale, BLOCK, axis=-2)[..., : x.shape[-2], :]
    return x * np.repeat(scale, BLOCK, axis=-1)


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_the_reference_is_the_sum_of_the_products(case):
    x, w, left, right, *groups = arguments(case, True)
    a, b = widened(x, left), widened(w, right)
    if case.form == "matmul":
        expected = a @ b.swapaxes(1, 2)
    elif case.form == "grouped":
        tiles = zip(case.groups, a.reshape(-1, BLOCK, a.shape[1]), strict=True)
        expected = np.concatenate([rows @ b[max(group, 0)].T * (group >= 0) for group, rows in tiles])
    else:
        ends = BLOCK * np.array(case.groups)
        expected = np.stack([a[:, i:j] @ b[:, i:j].T for i, j in itertools.pairwise(ends)])
    found = getattr(reference, case.form)(x, w, left, right, *groups, out_dtype="float32")
    np.testing.assert_array_equal(np.asarray(found, np.float64), expected)


@pytest.mark.skipif(not mosaic_gpu.HAS_JAX_0_11, reason="jax 0.10 has no public interpreter for Mosaic GPU kernels")
def test_the_kernel_is_its_reference():
    command = [sys.executable, "-m", "tests.kernels.interpret_worker"]
    # The interpreter's warpgroups wait for each other, so each needs its own XLA thread.
    done = subprocess.run(command, env=os.environ | {"NPROC": "16"}, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"{case} is right" for case in cases.CASES], done.stderr[-2000:]


def gradients(x, w, name="fp8_block", implementation="pallas", numbers=NUMBERS):
    def loss(x, w):
        recipe = RECIPES[name].recipe
        assert recipe is not None
        y = dot_general(x, w, numbers, recipe=recipe, key=jax.random.key(0), implementation=implementation)
        return jnp.square(y.astype("float32")).sum()

    return jax.grad(loss, argnums=(0, 1))(x, w)


X, W = (300, 256), (256, 200)


KINDS = [
    ("NVIDIA H200", {"implementation": None}, 1, (0, 3), "times as fast as with XLA: benchmarks/results/gemm-set"),
    ("NVIDIA H200", {}, 8, (3, 0), "XLA may shard the arrays over several devices"),
    ("NVIDIA B200", {}, 1, (3, 0), "pallas was requested; the block_matmul kernel runs only on Hopper GPUs"),
    ("NVIDIA H200", {"name": "mxfp8"}, 1, (3, 0), "supports blocks of 1×128 and 128×128, not of (1, 32)"),
]


@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize(("kind", "options", "size", "expected", "why"), KINDS)
def test_it_runs_where_it_can_run_and_else_the_reason_is_told(
    monkeypatch, kind, options, size, expected, why, is_ragged
):
    monkeypatch.setattr(implementation, "_choices", {})
    jax.clear_caches()  # a cached trace would not record the choice
    if is_ragged:
        shapes = (on(kind, *shape, size=size) for shape in RAGGED)
        traced = jax.jit(functools.partial(ragged_step, **options)).trace(*shapes)
        found = tuple(primitives(traced.jaxpr.jaxpr, "ragged_dot_general", block_ragged.NAME).values())
    else:
        shapes = on(kind, *X, size=size), on(kind, *W, dtype="float32", size=size)
        found = matmuls(functools.partial(gradients, **options), *shapes)
    assert found == expected
    assert any(why in choice.reason for _, choice in choices_made()), choices_made()


@pytest.mark.parametrize(
    ("x", "w", "numbers", "which"),
    [
        ((2, 160, 2, 128), (2, 128, 96), (((2, 3), (0, 1)), ((), ())), "drhs"),
        ((3, 40, 256), (3, 256, 130), (((2,), (1,)), ((0,), (0,))), "fwd"),
    ],
)
def test_the_product_is_that_of_the_dequantized_blocks(x, w, numbers, which):
    """Depth and heads that are not multiples of a block, several contracted axes, a batch; blocks and tiles."""
    dims = Dimensions.of(numbers, len(x), len(w))
    recipe = RECIPES["fp8_block"].recipe
    keys = jax.random.split(jax.random.key(0))
    a, b = jax.random.normal(keys[0], x), jax.random.normal(keys[1], w)
    spec = getattr(recipe, which)
    left = quantize(a, spec.lhs, dims.lhs_contract, batch=dims.lhs_batch)
    right = quantize(b, spec.rhs, dims.rhs_contract, batch=dims.rhs_batch)
    found = np.asarray(block_scaled.multiply(left, right, dims, "float32", "pallas"), np.float64)
    wide = [np.asarray(dequantize(side), np.float64) for side in (left, right)]
    expected, size = (
        np.asarray(jax.lax.dot_general(f(wide[0]), f(wide[1]), dims.numbers)) for f in (np.asarray, np.abs)
    )
    depth = np.prod([x[axis] for axis in dims.lhs_contract])
    assert np.all(np.abs(found - expected) <= numerics.block_bound(int(depth), size))


@pytest.mark.parametrize(("warpgroups", "memory"), mosaic_gpu.MEMORY_REGISTERS.items())
def test_the_threads_of_a_program_ask_for_no_more_registers_than_it_began_with(warpgroups, memory):
    """With more registers, ``setmaxnreg`` waits forever: 2 · 240 and 32 for the loading warpgroup exceed 3 · 168."""
    groups = warpgroups + 1
    began = min(255, 65536 // (128 * groups) // 8 * 8)  # per thread, as in ptxas; one program per SM
    multiply = min(256, (512 - memory) // warpgroups // 8 * 8)  # jax's pipeline requests this number
    assert memory + warpgroups * multiply <= groups * began


# -- groups of rows ----------------------------------------------------------------------------------------------------


SIZES, BEHIND = (200, 0, 128, 5, 1), 7
"""Rows of groups: partial slabs, no rows, full slabs, part of a slab, one row; and rows after the last group."""
RAGGED = (sum(SIZES) + BEHIND, 160), (len(SIZES), 160, 144)


def ragged_three(x, w, grad, implementation="pallas", name="fp8_block"):
    """Return the product of groups of rows and its gradients."""
    sizes, recipe = jnp.array(SIZES), RECIPES[name].recipe
    assert recipe is not None
    y, pull = jax.vjp(lambda x, w: ragged_dot(x, w, sizes, recipe=recipe, implementation=implementation), x, w)
    return y, *pull(grad.astype(y.dtype))


def ragged_step(x, w, **options):
    return ragged_three(x, w, jnp.ones((x.shape[0], w.shape[2])), **options)


def test_groups_of_rows_are_those_of_xlas_program_and_what_lies_behind_them_changes_no_bit(monkeypatch):
    keys, rows = jax.random.split(jax.random.key(0), 3), sum(SIZES)
    shapes = (*RAGGED, (RAGGED[0][0], RAGGED[1][2]))
    given = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]

    def run(x, w, grad):
        return jax.jit(lambda *given: ragged_three(*given))(x, w, grad)  # a new function, which jit has not traced

    expected, magnitudes = run(*given), run(*map(jnp.abs, given))
    jax.clear_caches()
    monkeypatch.setattr(block_ragged, "select_matmul", lambda *_: "pallas")
    found = run(*given)
    x, w, grad = given
    for one, other in zip(found, run(x.at[rows:].set(jnp.nan), w, grad.at[rows:].set(jnp.inf)), strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other, size, depth in zip(found, expected, magnitudes, (160, 144, max(SIZES)), strict=True):
        assert not np.array_equal(one, other)  # the order of sums differs
        assert np.all(np.abs(one - other) <= numerics.block_bound(depth, np.asarray(size)))
    assert not found[0][rows:].any() and not found[1][rows:].any() and not found[2][1].any()  # noqa: PT018
    jax.clear_caches()
