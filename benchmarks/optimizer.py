"""optimizer: bytes that the compiled update of a Llama-3-8B with stacked layers takes and moves, on absent chips."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxquant.aot.chips import chip
from jaxquant.aot.program import read_program
from jaxquant.aot.topology import devices
from jaxquant.core.sharding import on_device_of
from jaxquant.optim import apply_updates, quantize_state, stochastic_round

TOPOLOGIES = {"h200": "8", "v6e": "4x4"}
E, M, D, L, V = 4096, 14336, 128, 32, 128256
SHAPES = {  # and the axis that the devices cut
    "embedding": ((V, E), 1),
    "head": ((E, V), 0),
    "query": ((L, E, 32, D), 1),
    "key": ((L, E, 8, D), 1),
    "value": ((L, E, 8, D), 1),
    "out": ((L, 32, D, E), 3),
    "wi_0": ((L, E, M), 1),
    "wi_1": ((L, E, M), 1),
    "wo": ((L, M, E), 2),
    "norm": ((L, E), None),
}
Row = dict[str, Any]


def row(target: str, variant: str) -> Row:
    """Compile an update for a chip, all parameters and moments donated, gradients made in it.

    Args:
      target: a key of ``TOPOLOGIES``.
      variant: a scheme or ``float32``, and behind it ``+apply``, ``+xla``, ``+bfloat16`` (weights, rounded randomly) or
        ``+guarded`` (clipped by the gradients' norm, and left as it was where that is not finite, as in training).
    """
    scheme, *flags = variant.split("+")
    mesh = Mesh(np.array(devices(chip(target), TOPOLOGIES[target])), ("fsdp",))

    def place(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        shape, axis = SHAPES.get(getattr(path[-1], "key", ""), ((), None))
        fits = axis is not None and x.ndim == len(shape) and x.shape[axis] % mesh.size == 0
        spec = PartitionSpec(*("fsdp" if fits and i == axis else None for i in range(x.ndim)))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    dtype = jnp.bfloat16 if "bfloat16" in flags else jnp.float32
    like = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, _) in SHAPES.items()}
    params = jax.tree_util.tree_map_with_path(place, like)
    tx: Any = optax.adamw(1e-3, b2=0.95, weight_decay=0.1)
    if scheme != "float32":
        way = "xla" if "xla" in flags else None
        shardings = lambda path, _: params[path.split("/")[-1]].sharding  # noqa: E731
        tx = quantize_state(tx, scheme, apply="apply" in flags, implementation=way, shardings=shardings)
    if "bfloat16" in flags:
        tx = optax.chain(tx, stochastic_round())
    if "guarded" in flags:
        tx = optax.chain(optax.clip_by_global_norm(1.0), tx)

    def step(params: Any, state: Any, scale: jax.Array) -> Any:
        grads = {
            name: jax.lax.with_sharding_constraint(jnp.full(p.shape, scale * i, p.dtype), placed[name].sharding)
            for i, (name, p) in enumerate(params.items(), 1)  # all different, or they would share memory
        }
        grads = jax.lax.optimization_barrier(grads)
        updates, new = tx.update(grads, state, params)
        made = apply_updates(params, updates), new
        if "guarded" not in flags:
            return made
        changes = jnp.isfinite(optax.tree.norm(grads))
        return jax.tree.map(lambda new, old: jnp.where(changes, new, old), made, (params, state))

    placed = params
    with on_device_of(params):
        state = jax.tree_util.tree_map_with_path(place, jax.eval_shape(tx.init, params))
        out = jax.tree.map(lambda x: x.sharding, (params, state))
        scale = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
        made = jax.jit(step, donate_argnums=(0, 1), out_shardings=out).lower(params, state, scale).compile()
    memory, text = made.memory_analysis(), made.as_text()
    assert memory is not None
    assert text is not None
    count = sum(math.prod(shape) for shape, _ in SHAPES.values()) / mesh.size
    gradient = jnp.dtype(dtype).itemsize
    program = read_program(text)
    return {
        "chip": f"{mesh.size} {target}",
        "update": variant,
        "state and weights": round(memory.argument_size_in_bytes / count, 2),
        "in place": round(memory.alias_size_in_bytes / count, 2),
        "temporaries": round(memory.temp_size_in_bytes / count - gradient, 2),
        "moved": round(program.moved / count - gradient, 1),
        "collectives": len(program.collectives),
        "kernels": text.count("tpu_custom_call"),
    }


if __name__ == "__main__":
    target, *variants = sys.argv[1:]
    print(json.dumps([row(target, each) for each in variants]))
