"""The optimizer kernel in the interpreter: the numbers of XLA's program, and unsupported cases."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxquant.aot.topology import environment
from jaxquant.kernels.optimizer_update import reference, tpu
from jaxquant.kernels.optimizer_update.reference import Result
from jaxquant.kernels.optimizer_update.tuning import blocks_for
from jaxquant.ops.implementation import choices_made
from jaxquant.optim import apply_updates, describe_state, quantize_state, run
from jaxquant.optim.run import OP_NAME

OPTIMIZED = None  # XLA's program of a step computes the bits of the kernel

MATRIX = {"w": jax.random.normal(jax.random.key(0), (256, 128)), "b": jnp.ones(128)}
HEADS = {"w": jax.random.normal(jax.random.key(1), (2, 96, 4, 32))}
CASES = {
    "adamw": (optax.adamw(1e-2), "fp8_coat", -2, MATRIX),
    "adam of dynamic": (optax.adam(1e-2), "int8_dynamic", -2, MATRIX | {"v": MATRIX["w"][:, ::-1]}),
    "lion, schedule": (optax.lion(optax.cosine_decay_schedule(1e-3, 9)), "fp8_coat", -3, HEADS),
}


def test_blocks_that_do_not_divide():
    """Use a function of exact operations, so that the result does not depend on the compiler."""

    def body(scalars: Any, arrays: Any) -> Any:
        x, codes, largest = arrays
        groups = x.reshape(-1, 32, *x.shape[1:])
        top = jnp.maximum(jnp.abs(groups).max(1), largest)
        return [x * scalars[0] + codes.astype(jnp.float32), top]

    x = jnp.round(jax.random.normal(jax.random.key(0), (2, 288, 1100)) * 16)
    arrays = [x, x[:, ::-1].astype(jnp.int8), jnp.full((2, 9, 1100), 40, jnp.uint8)]
    results = [Result("bfloat16"), Result("uint8", 32, 2)]
    given = body, [jnp.float32(2)], arrays, results
    assert blocks_for(288, (1100,), 32, 32)[1] < 1100
    for found, wanted in zip(tpu.update(*given, step=32, interpret=True), reference.update(*given), strict=True):
        assert found.dtype == wanted.dtype
        assert np.array_equal(found, wanted)


def two_steps(tx: Any, params: Any, bad: float = 1.0) -> Any:
    """Return weights and state after two steps; in the first step, one gradient is ``bad``."""

    @jax.jit
    def step(params: Any, state: Any, number: jax.Array, bad: jax.Array) -> Any:
        grads = jax.tree.map(lambda p: jnp.sin(jnp.arange(p.size) * number).reshape(p.shape).astype(p.dtype), params)
        grads["w"] = grads["w"].at[(3,) * params["w"].ndim].set(bad.astype(params["w"].dtype))
        updates, state = tx.update(grads, state, params)
        return apply_updates(params, updates), state

    state = tx.init(params)
    for number, value in ((1.0, bad), (2.0, 1.0)):
        params, state = step(params, state, jnp.float32(number), jnp.float32(value))
    return params, state


@pytest.mark.parametrize("way", ["pallas", None])
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_and_the_parts_in_turn_of_gpus_are_the_program_of_xla_to_the_bit(
    case: str, way: str | None, monkeypatch: pytest.MonkeyPatch
):
    tx, scheme, axis, params = CASES[case]
    bad = np.nan if case == "adamw" else 1.0
    wanted = two_steps(quantize_state(tx, scheme, axis=axis, apply=True, implementation="xla"), params, bad)
    if way is None:
        monkeypatch.setattr(run, "platform_of", lambda x: "gpu")
    quantized = quantize_state(tx, scheme, axis=axis, apply=True, implementation=way)
    found = two_steps(quantized, params, bad)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
    rows = [row for path, row in describe_state(found[1]).items() if path.endswith("/w")]
    assert rows
    assert all(f"along axis {axis}" in row for row in rows)


CLIPPED, ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), optax.adam(1e-3)
REFUSED: dict[str, tuple[Any, dict[str, Any], int]] = {
    "has an array operand that does not belong": (CLIPPED, MATRIX, -2),
    "has float16 operands, which kernels on TPUs": (ADAM, jax.tree.map(lambda x: x.astype(jnp.float16), MATRIX), -2),
    "needs another group axis than the last": (ADAM, MATRIX, -1),
    "needs groups of a multiple of 32 rows, not of 40": (ADAM, {"w": jnp.ones((40, 128))}, -2),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_xla_computes_and_why(why: str):
    inner, params, axis = REFUSED[why]
    tx = quantize_state(inner, "fp8_coat", axis=axis, implementation="pallas")
    text = str(jax.make_jaxpr(tx.update)(params, jax.eval_shape(tx.init, params), params))
    assert "pallas_call" not in text
    assert any(why in choice.reason for piece, choice in choices_made() if piece == OP_NAME), choices_made()


def test_a_state_goes_on_along_its_own_axis():
    rows, other = (quantize_state(optax.adam(1e-2), "fp8_coat", axis=axis) for axis in (-2, -1))
    state = rows.init(MATRIX)
    wanted, found = (jax.jit(tx.update)(MATRIX, state, MATRIX) for tx in (rows, other))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_new_weights_are_no_updates():
    tx = quantize_state(optax.adam(1e-2), "fp8_coat", apply=True)
    updates, _ = tx.update(MATRIX, tx.init(MATRIX), MATRIX)
    with pytest.raises(ValueError, match="NewWeights"):
        optax.apply_updates(MATRIX, updates)
    with pytest.raises(ValueError, match=r"call update\(gradients, state, params\)"):
        tx.update(MATRIX, tx.init(MATRIX))
    for each in (optax.chain(tx, optax.scale(-1.0)), optax.MultiSteps(tx, 2)):
        with pytest.raises((TypeError, ValueError, NotImplementedError)):
            each.update(MATRIX, each.init(MATRIX), MATRIX)


WORKER = """
import json, sys
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxquant.aot.chips import chip
from jaxquant.aot.topology import devices
from jaxquant.core.sharding import on_device_of
from jaxquant.optim import quantize_state, update_where

found = {}
for target in sys.argv[1:]:
    mesh = Mesh(np.array(devices(chip(target))), ("fsdp",))
    scale = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    specs = {"matrix": P("fsdp", None), "heads": P(None, "fsdp"), "columns": P(None, "fsdp")}
    shapes = {"matrix": (2048, 384), "heads": (2, 2048, 8, 128), "columns": (2304, 2048)}
    place = lambda name, x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, specs.get(name, P()) if x.ndim else P()))
    name = lambda path: str(getattr(path[-1], "key", ""))
    params = {n: place(n, jax.ShapeDtypeStruct(s, jnp.float32)) for n, s in shapes.items()}
    for scheme in ("fp8_coat", "int8_dynamic") if target == "v6e" else ("fp8_coat",):
        shardings = lambda path, _: params[path.split("/")[-1]].sharding
        tx = quantize_state(optax.adamw(1e-3), scheme, apply=True, shardings=shardings)

        def step(params, state, grads, scale):
            return update_where(scale < 1, tx, grads, state, params)

        with on_device_of(params):
            state = jax.tree_util.tree_map_with_path(lambda p, x: place(name(p), x), jax.eval_shape(tx.init, params))
            made = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params, scale).compile()
        memory, text = made.memory_analysis(), made.as_text()
        weights = sum(np.prod(s) for s in shapes.values()) / mesh.size
        found[f"{target} {scheme}"] = {
            "kernels": text.count('custom_call_target="tpu_custom_call"'),
            "kept": (memory.argument_size_in_bytes - memory.alias_size_in_bytes) / weights,
            "temporaries": memory.temp_size_in_bytes / weights,
        }
print(json.dumps(found))
"""


@pytest.mark.aot
def test_tpus_update_in_place_and_need_no_memory():
    command = [sys.executable, "-c", WORKER, "v5e", "v6e", "v7x"]
    done = subprocess.run(command, env=environment(), cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, row in json.loads(done.stdout.splitlines()[-1]).items():
        assert row["kernels"] == 3, name
        assert row["kept"] < 4.05, name  # the gradients
        assert row["temporaries"] < 0.05, name
