"""Shard MaxText's sparse experts over eight devices, quantized by jaxquant, and compare them with one device.

    python validation/maxtext_experts.py CHECKOUT

This runs MaxText's own ``RoutedMoE`` with ``sparse_matmul`` and ``jax.lax.ragged_dot``, on eight simulated CPU devices.
``MESHES`` has the variants: experts over four devices, with rows exchanged (MaxText's default) or gathered
(``use_ring_of_experts``), weights over eight devices (FSDP), or both experts and weights sharded. The gathered variant
needs MaxText's megablox; an equivalent function is registered for it. XLA has no ``ragged_all_to_all`` on CPUs; an
equivalent function with ``all_gather`` replaces it.

Each row of the table has the number of low-precision matmuls among the experts' nine, forward and backward. The next
three columns have the largest relative difference between eight devices and one: of the output, of the next step's
quant state, and of the gradients of parameters and input. The last column compares one device's gradients with the
float gradients. The requirements are the same as for ``maxtext_tests.py``.
"""

from __future__ import annotations

import argparse
import inspect
import os
import pathlib
import sys
from typing import Any

from ecosystem import EXPERTS, TINY

from jaxquant import terminal

MESHES: dict[str, dict[str, Any]] = {
    "experts × 4, exchanged": {"ici_expert_parallelism": 4, "ici_data_parallelism": 2, "ici_fsdp_parallelism": 1},
    "experts × 4, gathered": {
        "ici_expert_parallelism": 4,
        "ici_data_parallelism": 2,
        "ici_fsdp_parallelism": 1,
        "use_ring_of_experts": True,
        "megablox": True,
    },
    "FSDP × 8": {"ici_fsdp_parallelism": 8},
    "experts × 2, FSDP × 4": {"ici_expert_parallelism": 2, "ici_fsdp_parallelism": 4},
}
STRINGS = ("", "int8", "fp8", "fp8_block", "mxfp8", "nvfp4")
KERNELS = ("wi_0", "wi_1", "wo")
BATCH, LENGTH, EMBEDDING, HIDDEN = 16, 32, 64, 64


def exchange(operand: Any, output: Any, starts: Any, sizes: Any, places: Any, received: Any, *, axis_name: str) -> Any:
    """Return the result of ``jax.lax.ragged_all_to_all``, computed with ``jax.lax.all_gather``."""
    import jax
    import jax.numpy as jnp

    del received
    own = jax.lax.axis_index(axis_name)
    rows, starts, sizes, places = (jax.lax.all_gather(x, axis_name) for x in (operand, starts, sizes, places))
    row = jnp.arange(output.shape[0])
    for source in range(rows.shape[0]):
        place = row - places[source, own]
        is_sent = (place >= 0) & (place < sizes[source, own])
        sent = jnp.take(rows[source], starts[source, own] + place, axis=0, mode="clip")
        output = jnp.where(is_sent[:, None], sent, output)
    return output


def gmm_name() -> str:
    """Return the name under which reports list MaxText's grouped kernel, a function with a custom derivative."""
    from maxtext.kernels.megablox import ops

    lines, first = inspect.getsourcelines(ops.gmm)
    (at,) = (number for number, line in enumerate(lines, first) if "gmm_fwd_bwd = lambda" in line)
    return f"<lambda> at {ops.__file__}:{at}"


def grouped(lhs: Any, rhs: Any, sizes: Any, offset: Any) -> Any:
    """Compute the matmul of MaxText's grouped kernel: only the groups whose weights are on this device."""
    import jax

    return jax.lax.ragged_dot(lhs, rhs, jax.lax.dynamic_slice_in_dim(sizes, offset, rhs.shape[0]))


def step(config: Any, mesh: Any, string: str) -> tuple[dict[str, Any], int]:
    """Return a layer's output, gradients and next state on a mesh, and the number of its matmuls in 8 bits."""
    import jax
    import jax.numpy as jnp
    from flax import linen, nnx
    from jax.sharding import NamedSharding, PartitionSpec
    from maxtext.layers import initializers, moe

    import jaxquant

    layer = moe.RoutedMoE(
        config=config,
        num_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        mesh=mesh,
        kernel_init=initializers.nd_dense_init(1.0, "fan_in", "truncated_normal"),
        kernel_axes=("embed", "mlp"),
        rngs=nnx.Rngs(params=0),
        intermediate_dim=HIDDEN,
    )
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    params = jax.tree.map(jnp.asarray, nnx.to_pure_dict(params))
    x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, EMBEDDING))
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec(("data", "fsdp", "expert"))))

    def apply(params: Any, x: Any) -> Any:
        return nnx.merge(graph, params, rest)(x)[0]

    with jax.set_mesh(mesh), linen.logical_axis_rules(config.logical_axis_rules):
        own = {"quantization_local_shard_count": 1} if string == "int8" else {}
        q = jaxquant.quantize(apply, {"quantization": string, "quant_backend": "native", **own})
        state = q.init(params, x)

        def run(params: Any, state: Any, x: Any) -> dict[str, Any]:
            loss = lambda params, state, x: (jnp.sum(jnp.sin(out := q(params, state, x))), out)  # noqa: E731
            (grads, seen, dx), out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(params, state, x)
            return {"out": out, "grads": (grads, dx), "state": jaxquant.state.update(state, seen) if state else {}}

        rows = jaxquant.coverage(run, params, state, x).rows
        low = [row for row in rows if str(row.dtypes) != "float" and row.path.split("/")[-1] in KERNELS]
        return jax.device_get(jax.jit(run)(params, state, x)), len(low)


def main() -> int:
    """Run every string on every mesh."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=pathlib.Path, help="checkout of MaxText")
    checkout = parser.parse_args().checkout.resolve()
    terminal.accept_all_characters()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    sys.path[:0] = [str(checkout / "src"), str(checkout)]
    import jax
    import numpy as np
    from maxtext.configs import pyconfig
    from maxtext.utils import maxtext_utils

    import jaxquant

    jax.lax.ragged_all_to_all = exchange
    jaxquant.register_function(gmm_name(), grouped)
    print("| experts | quantization | low, of 9 | output | next state | gradients | these from float's |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    base = str(checkout / "src/maxtext/configs/base.yml")
    given = TINY | EXPERTS | {"num_experts": 8, "base_emb_dim": EMBEDDING, "base_moe_mlp_dim": HIDDEN}
    given |= {"sparse_matmul": True, "megablox": False, "dtype": "float32"}

    def apart(found: Any, wanted: Any) -> str:
        pairs = zip(*map(jax.tree.leaves, (found, wanted)), strict=True)
        far = [np.linalg.norm(a - b) / (np.linalg.norm(b) or 1) for a, b in pairs]
        return f"{max(far):.1e}" if far else "–"

    for name, fields in MESHES.items():
        config = pyconfig.initialize(["", base, *(f"{key}={value}" for key, value in (given | fields).items())])
        devices = maxtext_utils.create_device_mesh(config)
        mesh = jax.sharding.Mesh(devices, config.mesh_axes)
        alone = jax.sharding.Mesh(devices.ravel()[:1].reshape((1,) * devices.ndim), config.mesh_axes)
        exact, _ = step(config, alone, "")
        for string in STRINGS:
            one, _ = step(config, alone, string)
            many, low = step(config, mesh, string)
            parts = (apart(many[part], one[part]) for part in ("out", "state", "grads"))
            cells = [name, string or "float", str(low), *parts, apart(one["grads"], exact["grads"])]
            print(f"| {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
