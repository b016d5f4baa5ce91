"""Race of numeric formats: seconds, steps and memory until a decoder reaches a fixed held-out loss."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.linen import fp8_ops

from jaxquant import state as quantization_state
from jaxquant.bench import here
from jaxquant.bench.compare_libraries import by_qwix, int8_of_aqt
from jaxquant.bench.curves import Panel, draw
from jaxquant.bench.schemes import Row, print_progress
from jaxquant.inject.model import maybe_quantize_model
from jaxquant.training.config import TrainConfig
from jaxquant.training.data import make_iterators
from jaxquant.training.model import Decoder, DecoderConfig
from jaxquant.training.step import model_config

CONTENDERS = ("bf16", "flax fp8", "Qwix int8", "AQT int8")
CONTENDERS += tuple(f"jaxquant {string}" for string in ("fp8", "fp8_current", "int8", "fp8_full", "fp8_block"))
SHAPE: Row = {"num_layers": 8, "emb_dim": 1024, "mlp_dim": 4096, "num_query_heads": 16, "num_kv_heads": 8}
LARGE: Row = SHAPE | {"steps": 300, "batch_size": 32, "sequence_length": 1024, "learning_rate": 1e-3, "eval_batches": 4}
SMALL: Row = {"num_layers": 1, "emb_dim": 128, "mlp_dim": 256, "num_query_heads": 2, "num_kv_heads": 2}
SMALL |= {"steps": 60, "batch_size": 8, "sequence_length": 128, "learning_rate": 4e-3, "eval_batches": 2}
STREAMS: tuple[str, ...] = ("params", "quant", "stochastic_rounding")


@dataclasses.dataclass(frozen=True)
class _WithOp(DecoderConfig):
    """Config of a decoder whose linear layers use another library's op."""

    op: Any = None

    def dense(self, features: Any, axis: Any = -1, use_bias: bool = False) -> nn.DenseGeneral:
        dtypes: dict[str, Any] = {"dtype": jnp.dtype(self.dtype), "param_dtype": jnp.float32}
        return nn.DenseGeneral(features, axis=axis, use_bias=use_bias, dot_general_cls=self.op, **dtypes)


def _model(name: str, shape: DecoderConfig, tokens: jax.Array) -> nn.Module:
    library, _, string = name.partition(" ")
    if library == "jaxquant":
        return maybe_quantize_model(Decoder(shape), {"quantization": string}, tokens)
    if library == "Qwix":
        return by_qwix(Decoder(shape), ".*/(query|key|value|out|wi_0|wi_1|wo)")
    op = {"flax": fp8_ops.Fp8DirectDotGeneralOp, "AQT": int8_of_aqt}.get(library)
    return Decoder(_WithOp(**{f.name: getattr(shape, f.name) for f in dataclasses.fields(shape)}, op=op))


def train(name: str, fields: Mapping[str, Any]) -> Row:
    """Train one contender; returns times, peak memory and held-out losses by step.

    Args:
      name: one of ``CONTENDERS``.
      fields: fields of ``TrainConfig``.
    """
    config = TrainConfig(**fields, scan_layers=False)
    data = make_iterators(config, config.batch_size)
    batches = [jax.device_put(dict(next(data.train))) for _ in range(config.steps)]
    held_out = [jax.device_put(dict(batch)) for batch in data.held_out()]
    module = _model(name, model_config(config, data.vocab_size), batches[0]["inputs"])
    schedule = optax.warmup_cosine_decay_schedule(0, config.learning_rate, config.steps // 10, config.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))
    collection, key = quantization_state.OVERWRITE_WITH_GRADIENT, jax.random.key(0)
    advance = quantization_state.update if name.startswith("jaxquant") else lambda _, observed: observed

    def loss(params: Any, state: Any, batch: Any, key: jax.Array) -> jax.Array:
        inputs = (batch["inputs"], batch["segment_ids"], batch["positions"])
        rngs = dict.fromkeys(STREAMS, key)
        losses = module.apply({"params": params, collection: state}, *inputs, targets=batch["targets"], rngs=rngs)
        weights = batch["segment_ids"] != 0
        return (losses * weights).sum() / weights.sum()  # pyright: ignore[reportOperatorIssue]

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params: Any, state: Any, moments: Any, batch: Any, key: jax.Array) -> Any:
        gradients, observed = jax.grad(loss, argnums=(0, 1))(params, state, batch, key)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), advance(state, observed), moments

    variables = jax.jit(module.init)(dict.fromkeys(STREAMS, key), batches[0]["inputs"])
    run = (variables["params"], variables.get(collection, {}), optimizer.init(variables["params"]))
    began, evaluate, curve, spent = time.perf_counter(), jax.jit(loss), [], 0.0
    compiled = step.lower(*run, batches[0], key).compile()
    row: Row = {"row": name, "compile s": round(time.perf_counter() - began, 1)}
    began = time.perf_counter()
    for number, batch in enumerate(batches, 1):
        run = compiled(*run, batch, jax.random.fold_in(key, number))
        if number % max(1, config.steps // 20) == 0:
            spent += time.perf_counter() - began if jax.block_until_ready(run) else 0
            losses = [float(evaluate(*run[:2], each, key)) for each in held_out]
            curve.append((number, round(spent, 3), round(sum(losses) / len(losses), 4)))
            began = time.perf_counter()
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    rate = round(curve[-1][0] * config.batch_size * config.sequence_length / spent)
    return row | {"tokens/s": rate, "peak GB": peak and round(peak / 1e9, 2), "curve": curve}


def speedrun(folder: Path, is_small: bool, only: Sequence[str], steps: int | None) -> int:
    """Run ``race`` and write its table; a CPU always runs the small sizes. Returns the exit code."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # contenders run in separate processes
    is_small = is_small or jax.default_backend() == "cpu"
    name = "speedrun-small" if is_small else "speedrun"
    return here.report(name, race, [folder / here.stem(name), is_small, only, steps], folder)


def race(path: Path, is_small: bool, only: Sequence[str], steps: int | None) -> list[Row]:
    """Train one decoder on one data set and seed with several libraries, each at its defaults.

    The target is the held-out loss that bf16 has after three quarters of its steps. Only the linear layers of the
    blocks are quantized. Seconds do not include compilation and evaluation. A small run compares only losses, because a
    CPU measures its times.

    Args:
      path: path of a JSONL file and a plot, without a suffix. Rows are written to the file as soon as they are known.
      is_small: whether to use sizes for a CPU.
      only: contenders to train, in addition to bf16; empty selects all.
      steps: number of training steps; None selects the default of the size.
    """
    fields = (SMALL if is_small else LARGE) | ({"steps": steps} if steps else {})
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with path.with_suffix(".jsonl").open("w", encoding="utf-8") as file:
        for name in CONTENDERS:
            if name == "bf16" or not only or name in only:
                print_progress(f"training {name}")
                rows.append(_train_separately(name, fields, is_small))
                print(json.dumps(rows[-1]), file=file, flush=True)
    path.with_suffix(".svg").write_text(plot(rows, is_small), encoding="utf-8")
    return table(rows, is_small)


def _train_separately(name: str, fields: Row, is_small: bool) -> Row:
    """Train a contender, on a GPU in a separate process, so that the peak memory is its own."""
    if is_small:
        try:
            return train(name, fields)
        except Exception as error:
            return {"row": name, "note": f"did not run: {str(error).splitlines()[0][:200]}"}
    command = [sys.executable, "-m", "jaxquant.bench.speedrun", name, json.dumps(fields)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"row": name, "note": f"did not run: {done.stderr.strip().splitlines()[-1][:200]}"}
    return json.loads(done.stdout.splitlines()[-1])


def table(rows: Sequence[Row], is_small: bool) -> list[Row]:
    """Return the rows of the table; rows of small runs have no times, because a CPU measures them."""
    curve = rows[0].get("curve", [])
    target = curve[len(curve) * 3 // 4 - 1][2] if curve else 0.0
    made = []
    for row in rows:
        reached = next((point for point in row.get("curve", ()) if point[2] <= target), ("–", "–"))
        cells = {"row": row["row"], f"steps to {target:.3f}": reached[0]}
        timed = {f"s to {target:.3f}": reached[1]} | {n: row.get(n) for n in ("compile s", "tokens/s", "peak GB")}
        last = row.get("curve", [("", "", "–")])[-1][2]
        made.append(cells | ({} if is_small else timed) | {"final loss": last, "note": row.get("note", "")})
    return made


def plot(rows: Sequence[Row], is_small: bool) -> str:
    """Return an SVG of held-out loss against seconds, or against steps for small sizes."""
    curves = {row["row"]: [(p[0] if is_small else p[1], p[2]) for p in row["curve"]] for row in rows if "curve" in row}
    return draw([Panel("held-out loss", "training steps" if is_small else "seconds of training", curves)])


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1], json.loads(sys.argv[2]))))
