"""Meshes: parameters, masks and scales on data, fsdp and tensor axes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxquant.core.typed import to_mapping
from jaxquant.training.config import TrainConfig
from jaxquant.training.sharding import AXES, make_mesh, state_shardings
from jaxquant.training.step import build
from tests import numerics
from tests.states import nested
from tests.train.conftest import ROOT
from tests.train.mesh_worker import STEPS

NATIVE = {"quant_backend": "native"}
MESHES: dict[str, dict[str, Any]] = {
    "fp8": {"quantization": "fp8", "mesh_data": 2, "mesh_fsdp": 2, "mesh_tensor": 2},
    "int8 on aqt": {"quantization": "int8", "quant_backend": "aqt", "mesh_data": 2, "mesh_fsdp": 2, "mesh_tensor": 2},
}
ONE = {"mesh_data": 1, "mesh_fsdp": 1, "mesh_tensor": 1}
# By default (-1), int8's weight gradients have one block with separate scales per shard of the batch, here four.
BLOCKS = {"int8": {"quantization_local_shard_count": 4}, "fp8": {}}


@pytest.fixture(scope="module")
def wide(tiny: TrainConfig) -> TrainConfig:
    return dataclasses.replace(tiny, steps=STEPS, emb_dim=64)


@pytest.fixture(scope="module")
def eight(wide: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of eight devices and of one device, by name of the mesh."""
    configs = {}
    for name, fields in MESHES.items():
        config = dataclasses.replace(wide, **fields)
        single = dataclasses.replace(config, **(ONE | BLOCKS[config.quantization]))
        configs[name] = [to_mapping(config), to_mapping(single)]
    dump = tmp_path_factory.mktemp("dump") / "hlo"
    words = [sys.executable, "-m", "tests.train.mesh_worker", str(dump), json.dumps(configs)]
    # XLA does not dump programs from the compilation cache.
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "JAX_ENABLE_COMPILATION_CACHE": "0"}
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Involuntary full rematerialization" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_each_step_is_that_of_one_device_from_the_same_state(eight: dict[str, Any], name: str):
    """The median is the effect of the order of sums; the largest value includes crossed rounding boundaries."""
    found, kind = eight[name], MESHES[name]["quantization"]
    single = np.array(found["single"])
    assert single[-3:].mean() < 0.8 * single[0]  # training is compared
    assert len(single) == STEPS
    for quantity, distances in found["steps"].items():
        distance = np.abs(distances)
        if quantity == "rest":
            # Kernels' amaxes, scales (from equal histories) and past amaxes are equal, bit for bit.
            assert not distance.any()
            continue
        assert np.median(distance) <= numerics.TRAIN_SUMMATION_ORDER, quantity
        if quantity == "loss":
            assert (distance * single).max() <= numerics.MESH_REROUNDED_LOSS[kind], quantity
        else:
            assert distance.max() <= numerics.MESH_REROUNDED[kind], quantity
    assert found["differing"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_weights_are_gathered_in_8_bits_and_no_weight_gradient_is_reduced_in_32(
    eight: dict[str, Any], wide: TrainConfig, name: str
):
    found = eight[name]
    kernels = _kernel_sizes(wide)
    gathered = [dtype for dtype, shape in found["gathers"] if int(np.prod(shape)) in kernels]
    low = {"fp8": "f8e4m3fn", "int8": "s8"}[MESHES[name]["quantization"]]
    assert gathered.count(low) >= 2 * 7  # seven layers, forward and dlhs
    assert set(gathered) == {low}
    reduced = [shape for dtype, shape in found["others"] if dtype == "s32" and int(np.prod(shape)) > 1]
    tokens = [wide.batch_size // 4, wide.sequence_length]
    # Sums of activations and their gradients over the tensor axis remain, [batch, sequence, ...].
    assert all(shape[:2] == tokens for shape in reduced), reduced


def _kernel_sizes(config: TrainConfig) -> set[int]:
    """Return the sizes of a layer's kernels on one device: sharded over a tensor axis of two, gathered along fsdp."""
    heads = {config.num_query_heads, config.num_kv_heads}
    return {config.emb_dim * h * config.head_dim // 2 for h in heads} | {config.emb_dim * config.mlp_dim // 2}


def test_parameters_moments_and_masks_lie_alike_and_scales_are_replicated(tiny: TrainConfig):
    fields = {"quantization": "fp8_full", "weight_sparsity_n": 2, "weight_sparsity_m": 4, **NATIVE}
    sparse = build(dataclasses.replace(tiny, **fields, **ONE), 320).abstract_state
    delayed = build(dataclasses.replace(tiny, quantization="fp8", **ONE), 320).abstract_state
    mesh: Any = AbstractMesh((2, 2, 2), AXES)
    for state in (sparse, delayed):
        placed = state_shardings(mesh, state)
        whole = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, placed)
        for module, spec in {
            ("self_attention", "query"): P(None, "fsdp", "tensor", None),
            ("self_attention", "out"): P(None, "tensor", None, "fsdp"),
            ("mlp", "wi_0"): P(None, "fsdp", "tensor"),
            ("mlp", "wo"): P(None, "tensor", "fsdp"),
        }.items():
            block, layer = module
            kernel = placed.params["layers"][block][layer]["kernel"]
            assert kernel.spec == spec
            leaves = jax.tree_util.tree_leaves_with_path(placed.opt_state)
            moments = [s for path, s in leaves if f"['{layer}']['kernel']" in jax.tree_util.keystr(path)]
            assert len(moments) == 2
            assert all(moment == kernel for moment in moments)
            (quant,) = nested(whole.quant_state)["layers"][block][layer].values()
            for name, leaf in quant.items():
                assert leaf.sharding.spec == spec if name == "sparsity_mask" else not any(leaf.sharding.spec)


def test_a_mesh_takes_the_devices_it_is_given_or_refuses(tiny: TrainConfig):
    devices: Any = list(range(8))
    found = make_mesh(dataclasses.replace(tiny, mesh_tensor=2), devices).shape
    assert dict(found) == {"data": 1, "fsdp": 4, "tensor": 2}
    for fields, message in (
        ({"mesh_fsdp": 1, "mesh_tensor": 8}, "num_kv_heads 2 is not a multiple of mesh_tensor 8"),
        ({"mesh_data": 3, "mesh_tensor": 2}, "mesh_data 3 x mesh_fsdp -1 x mesh_tensor 2 does not match the 8"),
        ({"mesh_fsdp": 8, "batch_size": 4}, "gradient_accumulation_steps is 4, which is not a multiple of the 8"),
        ({"mesh_tensor": -1}, "only one size may be -1"),
    ):
        with pytest.raises(ValueError, match=message):
            make_mesh(dataclasses.replace(tiny, **({"num_query_heads": 8} | fields)), devices)
