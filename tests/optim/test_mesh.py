"""Moments and bfloat16 weights on 1, 2 and 8 devices: the same bits, the parameters' sharding, no communication."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
WORKER = """
import hashlib, json
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jaxquant.optim import describe_state, quantize_state, stochastic_round

specs = {"rows": P("fsdp", None), "columns": P(None, "fsdp"), "norm": P()}
shapes = {"rows": (32, 256), "columns": (32, 512), "norm": (64,)}
params = {n: jax.random.normal(jax.random.key(i), s).astype(jnp.bfloat16) for i, (n, s) in enumerate(shapes.items())}
found = {}
for scheme in ("fp8_coat", "int8_dynamic"):
    tx = optax.chain(quantize_state(optax.adamw(1e-2), scheme, shards=8), stochastic_round(3))
    start = tx.init(params)
    for devices in (1, 2, 8) if scheme == "fp8_coat" else (1, 8):
        kind = AxisType.Explicit if devices == 2 else AxisType.Auto
        mesh = Mesh(jax.devices()[:devices], ("fsdp",), axis_types=(kind,))
        spec_of = lambda path, x: specs.get(str(getattr(path[-1], "key", "")), P()) if x.ndim else P()
        place = lambda tree: jax.tree_util.tree_map_with_path(
            lambda path, x: jax.device_put(x, NamedSharding(mesh, spec_of(path, x))), tree)

        @jax.jit
        def step(params, state):
            grads = jax.tree.map(lambda p: p * 0.5, params)  # exact, whatever is fused
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        with jax.set_mesh(mesh):
            carry = place(params), place(start)
            text = step.lower(*carry).compile().as_text()
            for _ in range(3):
                carry = step(*carry)
        moments = carry[1][0].inner[0]
        for name, x in carry[0].items():
            for tree in (moments.mu, moments.nu, carry[1][0].largest["0/mu"]):
                y = tree[name]
                assert y is None or y.sharding.is_equivalent_to(x.sharding, y.ndim), (name, y.sharding, x.sharding)
        parts = sorted(jax.tree_util.tree_leaves_with_path(carry), key=lambda pair: str(pair[0]))
        bits = hashlib.sha256(b"".join(np.asarray(x).tobytes() for _, x in parts)).hexdigest()
        cut = [row for row in describe_state(carry[1]).values() if "cuts" in row]
        found[f"{scheme} {devices}"] = bits, [c for c in COLLECTIVES if f" {c}(" in text], cut
# Products by powers of two are exact. CPUs compile an interpreted kernel with its block, and may round others twice.
weights = {"w": jax.random.normal(jax.random.key(0), (1024, 128))}
for devices, kind in ((1, AxisType.Auto), (8, AxisType.Auto), (8, AxisType.Explicit)):
    mesh = Mesh(jax.devices()[:devices], ("fsdp",), axis_types=(kind,))
    place = NamedSharding(mesh, P("fsdp", None))
    tx = quantize_state(optax.sgd(2.0**-5, 0.5), "int8_linear", axis=-2, shards=8, apply=True, implementation="pallas",
                        shardings=None if kind == AxisType.Explicit else lambda path, moment: place)
    start = weights, tx.init(weights)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.tree.map(lambda p: p * 0.5, params), state, params)
        return updates.weights, state

    with jax.set_mesh(mesh):
        carry = jax.tree.map(lambda x: jax.device_put(x, place if x.ndim else NamedSharding(mesh, P())), start)
        assert "pallas_call" in str(jax.make_jaxpr(step)(*carry))
        text = step.lower(*carry).compile().as_text()
        carry = step(*step(*carry))
    assert carry[0]["w"].sharding.is_equivalent_to(place, 2)
    bits = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(carry))).hexdigest()
    found[f"kernel {devices} {kind}"] = bits, [c for c in COLLECTIVES if f" {c}(" in text], []
print(json.dumps(found))
"""


@pytest.mark.slow
def test_no_mesh_changes_a_bit_or_sends_anything():
    flags = "--xla_force_host_platform_device_count=8"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
    code = f"COLLECTIVES = {COLLECTIVES!r}\n{WORKER}"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for scheme in ("fp8_coat", "int8_dynamic", "kernel"):
        rows = [row for name, row in found.items() if name.startswith(scheme)]
        assert all(row[1:] == [[], []] for row in rows), "collectives, and groups that are cut"
        assert len({row[0] for row in rows}) == 1 < len(rows), found
