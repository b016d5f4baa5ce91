"""Grouped matmuls in training compile for TPUs that are not here, each element where it has an instruction."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxquant.aot.topology import environment

PROGRAM = """
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxquant
from jaxquant.aot.chips import chip
from jaxquant.aot.topology import devices

for target, string in ("v6e", "int8"), ("v7x", "fp8"), ("v6e", "int8w"):
    place = NamedSharding(Mesh(np.array(devices(chip(target))[:1]), ("x",)), PartitionSpec())
    x, w, sizes = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=place)
        for shape, dtype in (((512, 256), "bfloat16"), ((4, 256, 256), "float32"), ((4,), "int32"))
    )
    quantized = jaxquant.quantize(lambda w, x, sizes: jax.lax.ragged_dot(x, w.astype(x.dtype), sizes), string)
    state = jax.eval_shape(quantized.init, w, x, sizes)
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), state)
    loss = lambda w, state, x, sizes: jnp.square(quantized(w, state, x, sizes).astype("float32")).sum()
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(w, state, x, sizes).lower().compile()
    print(target, string, compiled.as_text().count("tpu_custom_call") > 0)
"""


@pytest.mark.aot
def test_gradients_of_grouped_matmuls_compile_for_tpus():
    command = [sys.executable, "-c", PROGRAM]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment(), cwd=root, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["v6e int8 True", "v7x fp8 True", "v6e int8w True"], done.stderr[-2000:]
