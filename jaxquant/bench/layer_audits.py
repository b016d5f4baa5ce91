"""Implementations of the matmuls in a Llama 3 8B and a Mixtral 8x7B layer, compiled without the chip.

A step computes the forward and the backward pass, with the attention that the training program chooses: gradients of
parameters (float32), input (bfloat16) and quant state. The ratio is unquantized time over quantized time, both
estimated by the audit; no layer was timed here (``on-chip.md`` has measurements). "moved MB" counts only operations
other than matmuls. "why" is the reason why operands are wider than 8 bits. More than 8192 tokens are several sequences.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxquant import state as quantization_state
from jaxquant.aot.chips import CHIPS, chip
from jaxquant.aot.outcome import compare, locate
from jaxquant.aot.price import estimate
from jaxquant.aot.program import HloStep, read_program
from jaxquant.aot.report import table
from jaxquant.aot.topology import devices
from jaxquant.audit.coverage import of_trace
from jaxquant.audit.rows import Row as Covered
from jaxquant.bench.schemes import Row, print_progress
from jaxquant.core.sharding import on_device_of
from jaxquant.inject.model import maybe_quantize_model
from jaxquant.ops import implementation
from jaxquant.training.attention import choose_attention, make_mask
from jaxquant.training.layers import AttentionContext, DecoderConfig, DecoderLayer

LLAMA = DecoderConfig(
    vocab_size=128256,
    emb_dim=4096,
    mlp_dim=14336,
    num_layers=1,
    num_query_heads=32,
    num_kv_heads=8,
    head_dim=128,
    dtype="bfloat16",
)
LONGEST = 8192
"""Maximum number of tokens of a sequence; more tokens are split into several sequences."""
LAYERS = {"Llama 3 8B": LLAMA, "Mixtral 8x7B": dataclasses.replace(LLAMA, num_experts=8, num_experts_per_tok=2)}
STRINGS = ("bf16", "fp8", "fp8_block", "fp8_block pallas", "mxfp8", "int8")
"""``bf16`` (float training) and config strings; a second word is the requested implementation."""
UNKNOWN = "not known: "
"""Prefix of the text for a matmul whose implementation is unknown."""


def step(config: DecoderConfig, options: Row, platform: str, tokens: int) -> tuple[Any, tuple[Any, ...]]:
    """Return the measured function of a layer and the shapes of its arguments.

    Args:
      config: shape of the layer.
      options: fields of ``QuantConfig``.
      platform: platform of the chip.
      tokens: number of tokens, in one sequence or in several sequences of length ``LONGEST``.
    """
    batch, length = max(tokens // LONGEST, 1), min(tokens, LONGEST)
    kind = choose_attention("auto", platform, config, length, config.dtype)
    x = jax.ShapeDtypeStruct((batch, length, config.emb_dim), jnp.bfloat16)
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    inputs = x, AttentionContext(positions, make_mask(kind, jnp.zeros((batch, length), jnp.int32), None))
    model = maybe_quantize_model(DecoderLayer(dataclasses.replace(config, attention=kind)), options, *inputs)
    keys = {"params": jax.random.key(1), "quant": jax.random.key(2)}
    params, state = quantization_state.split(jax.eval_shape(model.init, keys, *inputs))

    def gradients(params: Any, state: Any, x: jax.Array, key: jax.Array) -> Any:
        def loss(params: Any, state: Any, x: jax.Array) -> jax.Array:
            out, _ = model.apply(quantization_state.merge(params, state), x, *inputs[1:], rngs={"quant": key})
            return jnp.mean(jnp.square(out.astype(jnp.float32)))

        return jax.grad(loss, argnums=(0, 1, 2))(params, state, x)

    return gradients, (params, quantization_state.warm(state), x, jax.eval_shape(lambda: jax.random.key(0)))


def measure(name: str, string: str, target: str, tokens: int, config: DecoderConfig | None = None) -> Row:
    """Compile a layer under a config string for a chip; return its row, without comparisons to the unquantized layer.

    Args:
      name: one of ``LAYERS``.
      string: one of ``STRINGS``.
      target: chip, one of ``CHIPS``.
      tokens: same as for ``step``.
      config: shape of the layer; None selects the shape by name.
    """
    began, where = time.perf_counter(), chip(target)
    quantization, _, asked_for = string.partition(" ")
    options = {} if string == "bf16" else {"quantization": quantization}
    options |= {"implementation": asked_for} if asked_for else {}
    mesh = Mesh(devices(where)[:1], ("x",))
    function, shapes = step(config or LAYERS[name], options, where.platform, tokens)
    place = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)
    with on_device_of(placed):  # otherwise attention is traced for the local device
        traced = jax.jit(function).trace(*placed)
    covered = [row for row in of_trace(traced).rows if row.has_parameter]
    made = implementation.choices_made() if asked_for else []
    refused = [each.reason for piece, each in made if piece == implementation.BLOCKS and each.name == "xla"]
    lowered = traced.lower()
    hlo, text = lowered.compiler_ir("hlo"), lowered.compile().as_text()
    assert hlo is not None
    assert text is not None
    program = read_program(text)
    outcome = compare(read_program(hlo.as_hlo_module().to_string(), is_optimized=False), program)
    found = {
        "layer": name,
        "string": string,
        "chip": target,
        "tokens": tokens,
        "ms": round(1e3 * estimate(where, program).step, 3),
        "moved MB": round(program.moved / 1e6),
        "unknown calls": ", ".join(program.unknown),
        "fell back": outcome.fell_back,
        "matmuls": list(_rows(covered, program, dict(each.split(" → ") for each in outcome.merged), refused)),
    }
    print_progress(f"{name}, {string}, {target}: {time.perf_counter() - began:.0f} s")
    return found


def _rows(covered: Sequence[Covered], program: HloStep, fused: dict[str, str], refused: Sequence[str]) -> Iterator[Row]:
    """Yield dtypes and operation of each matmul of a parameter, and the reason if an operand is wider than 8 bits."""
    calls = [(*_layer_and_matmul(each.path), f"{each.dtypes} by {each.kind}") for each in program.matmuls]
    calls += [(*_layer_and_matmul(each.path), f"{each.dtype} by {each.name}") for each in program.kernels if each.flops]
    hosts = {_layer_and_matmul(path): host for path, host in fused.items()}
    for row in covered:
        places = ((path, name) for path in (row.path, row.path.rpartition("/")[0]) for name in (row.matmul, "bwd"))
        on = next((found for place in places if (found := [what for *own, what in calls if tuple(own) == place])), None)
        host = hosts.get((row.path, row.matmul))
        nowhere = f"{UNKNOWN}no matmul has its name; the program has {program.count()}"
        what = f"in {host}" if host else ", ".join(dict.fromkeys(on)) if on else nowhere
        why = [] if row.is_low else [row.reason, *(refused if "dequantized" in row.reason else ())]
        yield {"weight": row.path, "matmul": row.matmul, "runs on": what, "why": "; ".join(why)}


def _layer_and_matmul(path: str) -> tuple[str, str]:
    """Return the layer and the matmul of a path in the compiled program."""
    name, phase = locate(path)
    name = name.removeprefix(f"{DecoderLayer.__name__}/")  # jax 0.12 keeps this prefix
    words = [word.removeprefix("aqt_") for word in path.split("/")]
    own = next((each for each in ("dlhs", "drhs") if each in words), "fwd" if phase == "forward" else "bwd")
    return "/".join(each for each in name.split("/") if not each.startswith(("jaxquant_", "aqt_", "ragged_dot"))), own


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Return rows with the ratio to the unquantized row of the same layer and chip, and that row's bytes.

    Raises:
      ValueError: a layer was not compiled unquantized for a chip.
    """
    plain = {(row["layer"], row["chip"]): row for row in rows if row["string"] == "bf16"}
    found = []
    for row in rows:
        if (other := plain.get((row["layer"], row["chip"]))) is None:
            raise ValueError(f"{row['layer']} on {row['chip']} has no unquantized row; compile bf16 too")
        found.append(row | {"× bf16": round(other["ms"] / row["ms"], 2), "bf16 moved MB": other["moved MB"]})
    order = [list(LAYERS), list(CHIPS), STRINGS]
    return sorted(found, key=lambda row: [at.index(row[key]) for at, key in zip(order, _KEYS, strict=True)])


_KEYS = ("layer", "chip", "string")


def page(rows: Sequence[Row]) -> str:
    """Return a page with the rows of ``with_ratios``: figures, then matmuls grouped by implementation."""
    lines = [
        "# What the matmuls of a decoder layer run on",
        "",
        (__doc__ or "").partition("\n\n")[2].strip(),
    ]
    figures = [*_KEYS, "tokens", "ms", "× bf16", "moved MB", "bf16 moved MB"]
    lines += ["", *table([{key: row[key] for key in figures} for row in rows]), ""]
    for row in rows:
        if row["string"] == "bf16":
            continue
        lines += [f"## {row['layer']}, {row['string']}, {row['chip']}", ""]
        alike: dict[tuple[str, str], list[str]] = {}
        for each in row["matmuls"]:
            alike.setdefault((each["runs on"], each["why"]), []).append(f"{each['weight']} {each['matmul']}")
        lines += table([{"runs on": on, "matmuls": ", ".join(n), "why": why} for (on, why), n in alike.items()])
        lines += ["", *(f"- fell back: {each}" for each in row["fell back"]), ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    chosen = sys.argv[4:] or [each for each in STRINGS if sys.argv[1] in ("h100", "h200") or "pallas" not in each]
    names = [name for name in LAYERS if name.startswith(sys.argv[3])]
    print(json.dumps([measure(name, string, sys.argv[1], int(sys.argv[2])) for name in names for string in chosen]))
