"""One MLP step, quantized by each library and compiled by the same compiler: its matmuls and memory traffic.

The measured function: y = silu(x · W1) · W2, loss = mean(y²) in float32, and its gradients with respect to x, W1, W2
and the quant state: six matmuls. 4096 tokens, widths 4096 → 8192 → 4096, bfloat16 activations, float32 weights and
weight gradients. Inputs are weights, x and quant state; outputs are gradients and quant state. There is no optimizer,
and the loss is not an output. Amax histories are not empty. Layers are ``flax.linen.Dense``, quantized as a user would
quantize them. ``program.read_program`` counts the matmuls and bytes.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import fp8_ops
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxquant import state as quant_state
from jaxquant.aot.chips import Chip, chip
from jaxquant.aot.price import estimate
from jaxquant.aot.program import HloStep, read_program
from jaxquant.aot.topology import devices
from jaxquant.inject.model import maybe_quantize_model


class Mlp(nn.Module):
    """Two dense layers without bias; ``op`` is the argument ``dot_general_cls`` of ``nn.Dense``."""

    hidden: int
    out: int
    op: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def dense(width: int) -> nn.Dense:
            return nn.Dense(width, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=self.op)

        return dense(self.out)(nn.silu(dense(self.hidden)(x)))


@dataclasses.dataclass(frozen=True)
class Setup:
    """A row of the table: library, options, and name of the row of another library to compare with.

    ``keys``: source of random keys. ``quantize``: function of a library that quantizes the model.
    """

    name: str
    config: dict[str, Any]
    op: Any = None
    peer: str = ""
    keys: str = "threefry2x32"
    quantize: Callable[[nn.Module], nn.Module] | None = None


def _setup(string: str, backend: str, peer: str = "", **options: Any) -> Setup:
    words = " ".join(str(value) for value in list(options.values())[:1])
    name = " ".join(filter(None, ("jaxquant" if backend == "native" else backend, string, words)))
    return Setup(name, {"quantization": string, "quant_backend": backend} | options, peer=peer)


def int8_of_aqt() -> Any:
    """Return AQT's op for a Flax layer, with int8 in all three matmuls."""
    from aqt.jax.v2 import config as aqt_config
    from aqt.jax.v2.flax import aqt_flax

    accumulators: dict[str, Any] = {f"{kind}_accumulator_dtype": jnp.int32 for kind in ("fwd", "dlhs", "drhs")}
    return aqt_flax.AqtDotGeneral(aqt_config.config_v3(fwd_bits=8, dlhs_bits=8, drhs_bits=8, **accumulators))


def by_qwix(model: nn.Module, path: str = ".*") -> nn.Module:
    """Return a Linen model whose layers at ``path``, a regular expression, are trained by Qwix in int8."""
    import qwix

    dtypes = dict.fromkeys(("weight_qtype", "act_qtype", "bwd_qtype"), "int8")
    rule = qwix.QtRule(module_path=path, **dtypes, bwd_stochastic_rounding="uniform", channelwise_noise_axes=(0, 1))
    return qwix.quantize_model(model, qwix.QtProvider([rule]))


_GENERATORS = ("threefry2x32", "unsafe_rbg")
_FIXED = {f"{name}_quantization_calibration_method": "fixed,224" for name in ("weight", "act", "bwd")}
ENTRIES = (
    Setup("bf16", {}),
    Setup("flax fp8", {}, fp8_ops.Fp8DirectDotGeneralOp),
    _setup("fp8_full", "qwix", **_FIXED),
    _setup("fp8_full", "qwix"),
    _setup("int8", "qwix"),
    _setup("int8", "aqt"),
    *(Setup(f"Qwix itself, int8, {keys}", {}, keys=keys, quantize=by_qwix) for keys in _GENERATORS),
    *(Setup(f"AQT itself, int8, {keys}", {}, int8_of_aqt, keys=keys) for keys in _GENERATORS),
    _setup("aqt_fp8", "aqt"),
    _setup("aqt_fp8_full", "aqt"),
    _setup("fp8", "native", "flax fp8"),
    _setup("fp8_current", "native", "flax fp8"),
    _setup("fp8_full", "native", "qwix fp8_full"),
    _setup("fp8_full", "native", "qwix fp8_full fixed,224", **_FIXED),
    _setup("int8", "native", "qwix int8"),
    _setup("int8_delayed", "native"),
    *(_setup(string, "native") for string in ("fp8_block", "mxfp8", "nvfp4", "quartet2")),
    *(_setup(string, "native", f"jaxquant {string}", implementation="pallas") for string in ("fp8_block", "mxfp8")),
)


def step(entry: Setup, tokens: int = 4096, width: int = 4096, hidden: int = 8192) -> tuple[Any, tuple[Any, ...]]:
    """Return the measured function of an entry, and the shapes of the arguments.

    Args:
      entry: entry of the table.
      tokens, width, hidden: number of rows of x, of features of x and y, and of features between the layers.
    """
    x = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
    model: Any = Mlp(hidden, width, entry.op)
    if entry.config:
        model = maybe_quantize_model(model, entry.config, x)
    if entry.quantize:
        model = entry.quantize(model)
    key = jax.eval_shape(lambda: jax.random.key(0, impl=entry.keys))
    keys = dict.fromkeys(("params", "quant", "stochastic_rounding"), jax.random.key(0, impl=entry.keys))
    params, state = quant_state.split(jax.eval_shape(model.init, keys, x))
    state = quant_state.warm(state)  # amax histories as after the first step

    def gradients(params: Any, state: Any, x: jax.Array, key: jax.Array) -> Any:
        def loss(params: Any, state: Any, x: jax.Array) -> jax.Array:
            variables = {"params": params, quant_state.OVERWRITE_WITH_GRADIENT: state}  # flax's ops use it too
            y = model.apply(variables, x, rngs=dict.fromkeys(keys, key))
            return jnp.mean(jnp.square(y.astype(jnp.float32)))

        return jax.grad(loss, argnums=(0, 1, 2))(params, state, x)

    return gradients, (params, state, x, key)


def measure(
    entry: Setup, target: str, tokens: int = 4096, width: int = 4096, hidden: int = 8192
) -> tuple[HloStep, int]:
    """Compile an entry for an absent chip; return the compiled program and the bytes of its temporaries.

    Args:
      entry: entry to compile.
      target: chip, one of ``CHIPS``.
      tokens, width, hidden: same as for ``step``.
    """
    mesh = Mesh(devices(chip(target))[:1], ("x",))
    where = NamedSharding(mesh, PartitionSpec())
    function, shapes = step(entry, tokens, width, hidden)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes)
    compiled = jax.jit(function).lower(*placed).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    return read_program(text), memory.temp_size_in_bytes


def rows(target: str, names: Sequence[str] = (), tokens: int = 4096) -> list[dict[str, Any]]:
    """Measure the entries whose name contains one of ``names`` (by default all of them), as rows of a table.

    Args:
      target: chip, one of ``CHIPS``.
      names: parts of entries' names; a part that starts with "=" must be at the start of a name.
      tokens: rows of x.

    Raises:
      ValueError: no entry has such a name.
    """
    found = []
    for entry in ENTRIES:
        if names and not any(name in f"={entry.name}" for name in names):
            continue
        found.append(row(entry.name, *measure(entry, target, tokens), chip(target)))
        peer = next((each for each in found if each["step"] == entry.peer), None)
        found[-1]["peer"], found[-1]["beside the peer"] = entry.peer, difference_from_peer(found[-1], peer)
        if plain := next((each["us"] for each in found if each["step"] == "bf16"), None):
            found[-1]["× bf16"] = f"{plain / found[-1]['us']:.2f}"
    if not found:
        known = ", ".join(entry.name for entry in ENTRIES)
        raise ValueError(f"--only {' and '.join(map(repr, names))} matches no row; use one of {known}")
    return found


def difference_from_peer(row: dict[str, Any], peer: dict[str, Any] | None) -> str:
    """Return the differences between a row and its peer's row, or "" if the peer was not measured."""
    return ", ".join(f"{row[name] - peer[name]:+}" for name in ("other MB", "big moves")) if peer else ""


def matmuls(program: HloStep) -> str:
    """Return the matmuls of a compiled program by the dtypes of their operands, such as ``6 s8``."""
    return ", ".join(f"{count} {dtypes}" for dtypes, count in sorted(program.count().items()))


def row(name: str, program: HloStep, temporaries: int, where: Chip) -> dict[str, Any]:
    """Return the table row of a program with some bytes of temporaries; ``price.estimate`` computes the time."""
    eight = sum(matmul.times for matmul in program.matmuls if matmul.bits == 8)
    inside, beside = program.cycles
    casts = [kernel for kernel in program.kernels if not kernel.flops]
    beside += sum(kernel.cycles * kernel.times for kernel in casts)
    took = estimate(where, program)
    clock = {"kcycles": round((inside + beside) / 1e3), "matmuls, rest": f"{inside // 1000}, {beside // 1000}"}
    return {
        "step": name,
        "8-bit matmuls": f"{eight} of {sum(program.count().values())}",
        "matmuls": matmuls(program),
        "other MB": round((program.moved + sum(kernel.bytes * kernel.times for kernel in casts)) / 1e6),
        "big moves": program.big_moves,
        "moves": sum(move.times for move in program.moves),
        "temporaries MB": round(temporaries / 1e6),
        "us": round(1e6 * took.step),
        **(clock if inside else {}),
    }


if __name__ == "__main__":
    print(json.dumps(rows(sys.argv[1], sys.argv[3:], int(sys.argv[2]))))
