"""block_scaled: the chip's instruction for products with block scales, the chips that have it, and its numbers."""

from __future__ import annotations

import dataclasses

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxquant.config.recipes import RECIPES
from jaxquant.core import sharding
from jaxquant.core.qtensor import dequantize
from jaxquant.core.quantize import quantize
from jaxquant.core.recipe import TensorSpec
from jaxquant.ops import block_scaled, dot_general
from jaxquant.ops.dimensions import Dimensions
from jaxquant.ops.operand import quantize_operand
from tests import numerics

OPTIMIZED = False

NUMBERS = (((1,), (0,)), ((), ()))
MX = TensorSpec("float8_e4m3fn", "per_tile", tile_size=32, scale_dtype="float8_e8m0fnu", scale_rounding="up")
SQUARE = dataclasses.replace(MX, granularity="per_block", free_size=32)
COARSE = dataclasses.replace(MX, granularity="per_block", tile_size=128, free_size=128)


def on(kind, *shape, dtype="bfloat16", axes=AxisType.Auto, spec=None, size=1):
    """Return the shape of an array on GPUs that are not attached."""
    device = AbstractDevice(device_kind=kind, num_cores=148, platform="gpu")
    mesh = AbstractMesh((size,), ("x",), axis_types=(axes,), abstract_device=device)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec or PartitionSpec()))


def primitives(jaxpr, *names):
    """Count the equations with one of the primitives, by name, without the branches for CPUs."""
    found, todo = dict.fromkeys(names, 0), [jaxpr]
    while todo:
        for eqn in todo.pop().eqns:
            if eqn.primitive.name in names:
                found[eqn.primitive.name] += 1
            platforms = eqn.params.get("branches_platforms")
            if platforms is None:
                todo += jax.extend.core.jaxprs_in_params(eqn.params)
            else:
                todo.append(eqn.params["branches"][platforms.index(None)].jaxpr)
    return found


def matmuls(function, *shapes):
    found = primitives(jax.jit(function).trace(*shapes).jaxpr.jaxpr, "dot_general", block_scaled.NAME)
    return found["dot_general"], found[block_scaled.NAME]


def gradients(name):
    def loss(x, w):
        y = dot_general(x, w, NUMBERS, recipe=RECIPES[name].recipe, key=jax.random.key(0))
        return jnp.square(y.astype("float32")).sum()

    return jax.grad(loss, argnums=(0, 1))


@pytest.mark.parametrize("weight", [MX, SQUARE, COARSE], ids=["1x32", "32x32", "128x128"])
def test_the_product_is_that_of_the_dequantized_blocks(weight):
    keys = jax.random.split(jax.random.key(0))
    x, w = jax.random.normal(keys[0], (3, 8, 256)), jax.random.normal(keys[1], (256, 160)) * jnp.logspace(-3, 3, 160)
    left, right = quantize(x, MX, (2,)), quantize(w, weight, (0,))
    dims = Dimensions((2,), (0,), (), (), 3, 2)
    found = np.asarray(block_scaled.multiply(left, right, dims, "float32"), np.float64)
    a, b = (np.asarray(dequantize(side), np.float64) for side in (left, right))
    assert np.all(np.abs(found - a @ b) <= numerics.dot_bound(a.reshape(24, 256), b).reshape(found.shape))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "quartet2"])
def test_all_three_matmuls_are_the_chips_own_on_blackwell_and_float_elsewhere(name):
    step = gradients(name)
    rotations = matmuls(step, on("NVIDIA H200", 128, 256), on("NVIDIA H200", 256, 128, dtype="float32"))[0] - 3
    for kind in ("NVIDIA B200", "NVIDIA GB300"):
        assert matmuls(step, on(kind, 128, 256), on(kind, 256, 128, dtype="float32")) == (rotations, 3)


def test_where_a_compiler_may_cut_the_operands_the_product_stays_float():
    step = gradients("mxfp8")
    assert matmuls(step, on("NVIDIA B200", 128, 64, size=8), on("NVIDIA B200", 64, 128, size=8)) == (3, 0)
    place = {"axes": AxisType.Explicit, "spec": PartitionSpec(None, None)}
    explicit = [on("NVIDIA B200", *each, **place) for each in ((128, 64), (64, 128))]
    assert matmuls(step, *explicit) == (3, 0)


@pytest.mark.parametrize(
    ("kind", "name", "call"),
    [("NVIDIA B200", "mxfp8", "__op$block_scaled_dot"), ("NVIDIA H200", "fp8_block", "mosaic_gpu")],
)
@pytest.mark.parametrize("devices", [1, 2])
def test_without_a_mesh_the_lowering_tells_if_a_compiler_may_cut_operands(monkeypatch, kind, name, call, devices):
    """Unused devices of the host therefore have no effect, also under vmap."""
    monkeypatch.setattr(sharding, "_device_of", lambda _: on(kind, 1).sharding.mesh.abstract_device)
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    shapes = [jax.ShapeDtypeStruct(each, "bfloat16") for each in ((2, 128, 256), (256, 128))]
    product = jax.vmap(lambda x, w: dot_general(x, w, NUMBERS, recipe=RECIPES[name].recipe), (0, None))
    step = jax.jit(lambda x, w, beside: (product(x, w), beside + 1))
    text = step.trace(*shapes, on(kind, 8, size=devices)).lower(lowering_platforms=("cuda",)).as_text()
    assert (call in text, "stablehlo.dot_general" in text) == (devices == 1, devices > 1)


def test_a_gpu_is_given_the_call_that_its_compiler_knows():
    product = jax.jit(lambda x, w: dot_general(x, w, NUMBERS, recipe=RECIPES["mxfp8"].recipe))
    shapes = on("NVIDIA B200", 64, 64), on("NVIDIA B200", 64, 64)
    text = product.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = [line for line in text.splitlines() if "__op$block_scaled_dot" in line]
    assert f"({', '.join(['tensor<1x64x64xf8E4M3FN>'] * 2 + ['tensor<1x64x2xf8E8M0FNU>'] * 2)})" in call
    assert "dequantize_type\\22: \\22BF16" in call


@pytest.mark.parametrize(("devices", "is_part", "asks"), [(1, False, True), (2, False, False), (2, True, True)])
def test_a_program_for_several_devices_asks_for_no_layout_but_in_shard_map(devices, is_part, asks):
    """This also holds in a process with one device, for any types (289 GB of gathers in a Llama step)."""
    spec, rows = RECIPES["fp8_current"].recipe.fwd.lhs, PartitionSpec("x")
    run = lambda x: quantize_operand(x, spec, (1,), recipe=RECIPES["fp8_current"].recipe)[0].qvalue  # noqa: E731
    if is_part:
        run = jax.shard_map(run, mesh=AbstractMesh((2,), ("x",)), in_specs=rows, out_specs=rows)
    place = NamedSharding(AbstractMesh((devices,), ("x",)), rows)
    x = jax.ShapeDtypeStruct((8, 16), "bfloat16", sharding=place)
    text = jax.jit(run).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert ("LayoutConstraint" in text) == asks
