"""What conversion keeps and saves: exactness and bytes of every recipe, losses, memory of converting and of loading."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.schemes import ROOT, Row, Scheme, tell
from benchmarks.steps import QUICKSTART, train_run
from jaxquant import serving
from jaxquant import state as quantization_state
from jaxquant.config.loader import load_yaml
from jaxquant.core.typed import build as build_dataclass
from train.checkpoint import Checkpoints, write_config
from train.config import TrainConfig
from train.conversion import convert_run
from train.data import make_iterators
from train.frameworks import make_model
from train.model import Decoder
from train.serving import contenders, evaluate
from train.step import build, model_config

POST_TRAINING = ("int8", "int8w", "int4w", "fp8", "fp8_current")
FRAMEWORKS = ("linen", "nnx")
MEMORY_MODEL = {
    "emb_dim": 1024,
    "mlp_dim": 4096,
    "num_layers": 12,
    "num_query_heads": 16,
    "num_kv_heads": 16,
    "head_dim": 64,
    "sequence_length": 128,
    "batch_size": 1,
    "dtype": "bfloat16",
}
"""A model of 201 million parameters."""


def measure_roundtrip(
    chosen: Sequence[Scheme],
    steps: int,
    frameworks: Sequence[str] = FRAMEWORKS,
    overrides: dict[str, Any] | None = None,
) -> list[Row]:
    """Train the quickstart model under every scheme, convert, write and load it, and compare logits with the trained.

    "max |Δ|" is the largest difference of a logit between the trained model's forward pass and the served model's, on
    one batch. The bytes are those of the checkpoint's arrays, and of all its files; of 533,120 parameters 40,960 are
    an embedding, which stays in float.
    """
    quickstart = load_yaml(str(ROOT / QUICKSTART)) | {"batch_size": 4, "health_every": 0} | (overrides or {})
    rows = []
    for scheme in chosen:
        config: TrainConfig = build_dataclass(TrainConfig, quickstart | scheme.config | {"run_dir": "unused"})
        params, quant_state, batch = _train(config, steps)
        shape = model_config(config, params["token_embedder"]["embedding"].shape[0])
        tokens = jnp.zeros((1, config.sequence_length), jnp.int32)
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder) / "served"
            variables = quantization_state.merge(params, quant_state)
            converted = serving.convert(variables, config, tokens, model=Decoder(shape))["params"]
            serving.save(directory, converted, {})
            loaded = serving.load(directory).params
            stored = serving.read_manifest(directory).bytes
            files = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        for framework in frameworks:
            if framework == "nnx" and scheme.backend == "aqt":
                continue  # converted AQT kernels are read by Linen models and traced functions
            here = dataclasses.replace(config, framework=framework)
            served = dataclasses.replace(here, checkpoint_is_quantized=True)
            logits = [
                _forward(make_model(each, shape, tokens), kept, batch)
                for each, kept in ((here, (params, quant_state)), (served, (loaded, {})))
            ]
            rows.append(
                {
                    **scheme.cells,
                    "framework": framework,
                    "max |Δ|": float(np.abs(logits[0] - logits[1]).max()),
                    "bytes": stored,
                    "of f32": f"{100 * stored / (4 * count):.1f}%",
                    "of bf16": f"{100 * stored / (2 * count):.1f}%",
                    "files": files,
                }
            )
            tell(f"{scheme.string} {scheme.backend} {framework}: max |Δ| {rows[-1]['max |Δ|']}")
    return rows


def _train(config: TrainConfig, steps: int) -> tuple[Any, Any, dict[str, np.ndarray]]:
    data = make_iterators(config, config.batch_size)
    program = build(config, data.vocab_size)
    state = program.init()
    for _ in range(steps):
        state, metrics = program.step(state, dict(next(data.train)), jnp.bool_(True))
    if not bool(metrics["healthy"]):
        raise RuntimeError(f"training under {config.quantization!r} diverged")
    return state.params, state.quant_state, dict(next(data.held_out()))


def _forward(model: Any, kept: tuple[Any, Any], batch: dict[str, np.ndarray]) -> np.ndarray:
    @jax.jit
    def run(params: Any, quant_state: Any) -> jax.Array:
        inputs = [jnp.asarray(batch[name]) for name in ("inputs", "segment_ids", "positions")]
        return model.apply(params, quant_state, *inputs, rngs={"quant": jax.random.key(0)})

    return np.asarray(run(*kept))


def measure_serving(steps: int, folder: Path, batches: int | None = None) -> list[Row]:
    """Compare held-out losses: of trained runs as they serve, and of an unquantized run quantized after training.

    "agreement" is the share of positions where a model's likeliest next token is that of the same run in float. Runs
    and converted checkpoints that are in the folder already are taken as they are.
    """
    rows = []
    for string in ("", "int8", "fp8"):
        run = folder / (string or "unquantized")
        train_run(run, Scheme(string, "auto" if string else ""), steps)
        made = []
        for recipe in ("",) if string else POST_TRAINING:
            out = folder / f"served-{string or 'post-training'}{'-' if recipe else ''}{recipe}"
            if not out.exists():
                convert_run(run, out, {"quantization": recipe} if recipe else {}, say=tell)
            made.append(out)
        for row in evaluate(contenders(run, made), batches=batches):
            row["model"] = row["model"].replace(f"{folder}/", "")
            rows.append({"run": string or "unquantized", **row})
    return rows


def measure_serving_memory(
    overrides: dict[str, Any] | None = None, strings: Sequence[str] = ("int8w", "int4w")
) -> list[Row]:
    """Measure the memory of converting a run's checkpoint and of opening the result, in processes of their own.

    The peak is the process's largest resident set; "idle" is that of a process which has imported the same and done
    nothing. A layer is the largest kernel of one layer in float32. What tracing and compiling take is in the peaks.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        config: TrainConfig = build_dataclass(TrainConfig, MEMORY_MODEL | (overrides or {}) | {"run_dir": str(run)})
        write_untrained(run, config)
        layer = 4 * config.emb_dim * config.mlp_dim
        idle = _peak("import train.conversion, train.serving")
        for string in strings:
            out = Path(folder) / string
            words = f"{str(run)!r}, {str(out)!r}, {{'quantization': {string!r}}}, say=len"
            converting = _peak(f"import train.conversion, train.serving; train.conversion.convert_run({words})")
            loading = _peak(f"import train.conversion, train.serving as s; s.open_served({str(out)!r})")
            opened = _peak(f"import train.conversion, train.serving as s; s.open_served({str(run)!r})")
            quantized = serving.read_manifest(out).bytes
            floats = sum(4 * x.size for x in jax.tree.leaves(_abstract(config).params))
            rows.append(
                {
                    "quantization": string,
                    "float32 MB": _mb(floats),
                    "quantized MB": _mb(quantized),
                    "layer MB": _mb(layer),
                    "idle MB": _mb(idle),
                    "converting: peak - idle": _mb(converting - idle),
                    "loading: peak - idle": _mb(loading - idle),
                    "loading the float run": _mb(opened - idle),
                }
            )
    return rows


def _abstract(config: TrainConfig) -> Any:
    return build(config, 320).abstract_state


def write_untrained(run: Path, config: TrainConfig) -> None:
    """Write a run's folder with a checkpoint of its first state, optimizer included."""
    program = build(config, 320)
    write_config(run, config)
    with Checkpoints(run, config) as checkpoints:
        checkpoints.save(0, program.init(), {})
        checkpoints.wait()


def _peak(code: str) -> int:
    """Run Python code in a process of its own; its largest resident set in bytes."""
    beginning = "from train.memory import return_large_blocks; return_large_blocks(); "
    ending = "\nfrom train.memory import peak_resident_bytes; print(peak_resident_bytes())"
    done = subprocess.run([sys.executable, "-c", beginning + code + ending], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{code} failed:\n{done.stderr[-4000:]}")
    return int(done.stdout.splitlines()[-1])


def _mb(count: int) -> float:
    return round(count / 1e6, 1)
