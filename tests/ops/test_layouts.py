"""Layouts are asked of a GPU's compiler where one device has the whole tensor, and nowhere else."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxquant.core.recipe import TensorSpec
from jaxquant.ops.operand import quantize_operand
from tests.ops.recipes import RECIPES


def lower(function, devices: int) -> str:
    """Lower for GPUs on a mesh of devices that are not here."""
    sharding = NamedSharding(AbstractMesh((devices,), ("x",)), PartitionSpec("x"))
    x = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16, sharding=sharding)
    return jax.jit(function).trace(x).lower(lowering_platforms=("cuda",)).as_text()


def quantized(x):
    recipe = RECIPES["fp8_current"]
    spec = recipe.fwd.lhs
    assert isinstance(spec, TensorSpec)
    return quantize_operand(x, spec, (1,), recipe=recipe)[0].qvalue


@pytest.mark.parametrize(("devices", "is_part", "asks"), [(1, False, True), (2, False, False), (2, True, True)])
def test_a_program_for_several_devices_asks_for_no_layout_but_in_shard_map(devices, is_part, asks):
    # In a process that has one device, whatever types say (289 GB of gathers in a Llama step).
    mesh, rows = AbstractMesh((2,), ("x",)), PartitionSpec("x")
    inside = jax.shard_map(quantized, mesh=mesh, in_specs=rows, out_specs=rows)
    assert ("LayoutConstraint" in lower(inside if is_part else quantized, devices)) == asks
