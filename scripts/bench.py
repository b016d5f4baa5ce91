#!/usr/bin/env python3
"""Measure what quantization costs and gains: `steps`, `health` (time), `trace` (program size), `memory`, `losses`.

Each prints a table and writes it to benchmarks/NAME-DEVICE.{json,md} with date, machine and versions.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import jaxquant
from jaxquant import RECIPES
from jaxquant.audit.cost import inlined_lines, program_lines, saved_for_backward
from jaxquant.config.loader import build as build_dataclass
from jaxquant.config.loader import load_yaml
from train.config import TrainConfig
from train.data import make_iterators
from train.health_cost import measure_health
from train.report import comparison_rows
from train.runs import load_runs
from train.step import build

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = "configs/quickstart.yml"
QUICK_STRINGS = ("int8", "fp8", "fp8_full")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "qwix", "aqtp", "numpy")
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A config string on a backend; ``also`` names the strings that share its row of the table."""

    string: str
    backend: str
    also: tuple[str, ...] = ()

    @property
    def config(self) -> dict[str, Any]:
        if not self.string:
            return {}
        options = load_yaml(str(ROOT / f"configs/quant/{self.string}.yml")) if self.string == "intmp" else {}
        if path := options.get("quant_cfg_path"):
            options["quant_cfg_path"] = str(ROOT / path)
        return options | {"quantization": self.string, "quant_backend": self.backend}

    @property
    def cells(self) -> Row:
        return {"quantization": " = ".join((self.string or "none", *self.also)), "backend": self.backend or "–"}


UNQUANTIZED = Scheme("", "")


def schemes(strings: Sequence[str] | None, backends: Sequence[str] | None) -> list[Scheme]:
    """List the pairs of the table of recipes, strings with one row once; ``auto`` is the first backend of a row.

    Raises:
      ValueError: an unknown string, or nothing left.
    """
    for string in strings or ():
        if not RECIPES.get(string) or not string:
            raise ValueError(
                f"--strings {string!r} is not a known recipe; known are {', '.join(filter(None, RECIPES))}"
            )
    found: list[Scheme] = []
    seen: set[int] = set()
    for string in strings or [name for name in RECIPES if name]:
        row = RECIPES[string]
        if id(row) in seen:
            continue
        seen.add(id(row))
        also = tuple(name for name, other in RECIPES.items() if other is row and name != string)
        for backend in (row.auto, *(name for name in row.backends if name != row.auto)):
            if not backends or backend in backends or ("auto" in backends and backend == row.auto):
                found.append(Scheme(string, backend, also))
    if not found:
        raise ValueError(f"--strings {strings} and --backends {backends} leave nothing to measure")
    return found


# -- step time ---------------------------------------------------------------------------------------------------------


class _Stepper:
    """A compiled training step of the quickstart model and its state."""

    def __init__(self, scheme: Scheme, quickstart: dict[str, Any]):
        config = build_dataclass(TrainConfig, quickstart | scheme.config | {"run_dir": "unused"})
        data = make_iterators(config, config.batch_size)
        program = build(config, data.vocab_size)
        self.scheme, self._step = scheme, program.step
        self._batch = jax.tree.map(np.asarray, dict(next(data.train)))
        self._state = program.init()
        self.times: list[float] = []
        began = time.perf_counter()
        self._run()
        self.first = time.perf_counter() - began
        self._run()

    def _run(self) -> None:
        self._state, values = self._step(self._state, self._batch, jnp.bool_(True))
        jax.block_until_ready((self._state, values))

    def measure(self) -> None:
        began = time.perf_counter()
        self._run()
        self.times.append(time.perf_counter() - began)


def measure_steps(chosen: Sequence[Scheme], rounds: int, overrides: dict[str, Any] | None = None) -> list[Row]:
    """Time training steps, one step of every scheme a round, so that a slow moment of the machine hits all alike.

    The ratio is the median over rounds of a scheme's time over the unquantized one's in that round.
    """
    quickstart = load_yaml(str(ROOT / QUICKSTART)) | (overrides or {})
    steppers = []
    for scheme in (UNQUANTIZED, *chosen):
        steppers.append(_Stepper(scheme, quickstart))
        _tell(f"compiled {scheme.string or 'none'} {scheme.backend} in {steppers[-1].first:.1f} s")
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for stepper in steppers:
            stepper.measure()
    gc.enable()
    base = steppers[0].times
    return [
        {
            **stepper.scheme.cells,
            "step ms": round(1000 * statistics.median(stepper.times), 1),
            "ratio": round(statistics.median(a / b for a, b in zip(stepper.times, base, strict=True)), 3),
            "first step s": round(stepper.first, 1),
        }
        for stepper in steppers
    ]


def measure_health_of(chosen: Sequence[Scheme], rounds: int, overrides: dict[str, Any] | None = None) -> list[Row]:
    rows = []
    for scheme in (UNQUANTIZED, *chosen):
        fields = load_yaml(str(ROOT / QUICKSTART)) | scheme.config | {"run_dir": "unused"} | (overrides or {})
        rows.append({**scheme.cells, **measure_health(build_dataclass(TrainConfig, fields), rounds)})
        _tell(f"measured {scheme.string or 'none'} {scheme.backend}")
    return rows


measure_health_of.__doc__ = measure_health.__doc__


# -- program size and saved bytes --------------------------------------------------------------------------------------


class _Stack(nn.Module):
    """Dense layers in bf16 with float32 parameters, as large-model training has them, one a width."""

    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for index, width in enumerate(self.widths):
            x = nn.Dense(width, use_bias=False, dtype=jnp.bfloat16, name=f"dense_{index}")(x)
        return x


def stack_loss(scheme: Scheme, widths: tuple[int, ...]) -> tuple[Callable[..., Any], Any]:
    """Give a scalar function of (params, quant_state, inputs) of a stack of dense layers, and abstract arguments."""
    x = jax.ShapeDtypeStruct((256, 128), jnp.bfloat16)
    model = jaxquant.maybe_quantize_model(_Stack(widths), scheme.config, x)
    keys = {"params": jax.random.key(0), "quant": jax.random.key(1)}
    params, state = jaxquant.state.split(jax.eval_shape(model.init, keys, x))

    def loss(params: Any, state: Any, x: jax.Array) -> jax.Array:
        variables = jaxquant.state.merge(params, state)
        return model.apply(variables, x, rngs={"quant": jax.random.key(2)}).astype(jnp.float32).sum()

    return loss, (params, state, x)


def measure_trace(chosen: Sequence[Scheme], layers: int = 4) -> list[Row]:
    """Count StableHLO lines of the gradient of a stack that one more bf16 dense layer adds: (lines(2N) - lines(N)) / N.

    `same shape`: layers of one shape, helper functions once. `new shape`: layers of different shapes, so that none
    finds its helper functions made already. `inlined`: every call replaced by the body of its function.

    The goal, at most 3 times as many lines as bf16, is met where layers share a shape, on the native backend; a layer
    of a new shape costs more, on every backend (`new shape ratio`).
    """

    def lower(scheme: Scheme, widths: tuple[int, ...]) -> str:
        loss, args = stack_loss(scheme, widths)
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*args).as_text()

    def count(scheme: Scheme) -> dict[str, float]:
        same = [lower(scheme, (128,) * depth) for depth in (layers, 2 * layers)]
        new = [lower(scheme, tuple(128 + 32 * i for i in range(depth))) for depth in (layers, 2 * layers)]
        texts = {
            "same shape": (same, program_lines),
            "new shape": (new, program_lines),
            "inlined": (same, inlined_lines),
        }
        return {name: (lines(twice) - lines(once)) / layers for name, ((once, twice), lines) in texts.items()}

    base = count(UNQUANTIZED)
    rows = []
    for scheme in (UNQUANTIZED, *chosen):
        counts = count(scheme)
        ratios = {f"{name} ratio": round(lines / base[name], 2) for name, lines in counts.items()}
        rows.append({**scheme.cells, **counts, **ratios})
    return rows


def measure_memory(chosen: Sequence[Scheme], layers: int = 4) -> list[Row]:
    """Count bytes that one more bf16 dense layer saves for backward, parameters, quant state and inputs not counted.

    The layer has 256 × 128 activations and a 128 × 128 kernel.
    """

    def count(scheme: Scheme) -> dict[str, float]:
        once, twice = (saved_for_backward(*_flat(stack_loss(scheme, (128,) * depth))) for depth in (layers, 2 * layers))
        return {dtype: (twice[dtype] - once.get(dtype, 0)) / layers for dtype in sorted(twice)}

    base = sum(count(UNQUANTIZED).values())
    rows = []
    for scheme in (UNQUANTIZED, *chosen):
        parts = count(scheme)
        total = sum(parts.values())
        what = ", ".join(f"{dtype} {size:,.0f}" for dtype, size in parts.items() if size)
        rows.append({**scheme.cells, "bytes a layer": round(total), "ratio": round(total / base, 3), "by dtype": what})
    return rows


def _flat(pair: tuple[Callable[..., Any], Any]) -> Iterator[Any]:
    function, args = pair
    yield function
    yield from args


# -- losses ------------------------------------------------------------------------------------------------------------


def measure_losses(chosen: Sequence[Scheme], steps: int, folder: Path) -> list[Row]:
    """Train the quickstart model under every scheme, each in a process of its own, and compare held-out losses.

    A run that is in the folder already is not trained again.
    """
    folders = []
    for scheme in (UNQUANTIZED, *chosen):
        run = folder / "-".join(filter(None, (scheme.string or "none", scheme.backend)))
        words = [f"{name}={value}" for name, value in scheme.config.items()]
        if not (run / "summary.json").is_file():
            _tell(f"training {run.name}")
            command = [sys.executable, "-m", "train", QUICKSTART, *words, f"steps={steps}", f"run_dir={run}"]
            done = subprocess.run([*command, "tensorboard=false"], cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"training {run.name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        folders.append(run)
    runs = load_runs(folders)
    short = [run.name for run in runs if run.last_step != steps]
    if short:
        raise ValueError(f"runs {', '.join(short)} in {folder} have another number of steps; remove them")
    return [
        {**scheme.cells, **{name: row[name] for name in ("steps", "held-out loss", "gap")}}
        for scheme, row in zip((UNQUANTIZED, *chosen), comparison_rows(runs), strict=True)
    ]


# -- writing it down ---------------------------------------------------------------------------------------------------


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def environment() -> Row:
    """Say where and when the figures were taken."""
    device = jax.devices()[0].device_kind
    return {
        "date": datetime.date.today().isoformat(),
        "device": f"{jax.device_count()} x {device}",
        "cpus": os.cpu_count(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def write(name: str, about: str, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write figures as JSON and as a markdown table."""
    where = environment()
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name}-{jax.devices()[0].device_kind.lower().replace(' ', '-')}"
    data, text = folder / f"{stem}.json", folder / f"{stem}.md"
    data.write_text(json.dumps({"name": name, "about": about, **where, "rows": list(rows)}, indent=1) + "\n")
    versions = ", ".join(f"{package} {version}" for package, version in where["versions"].items())
    machine = f"{where['device']}, {where['cpus']} CPUs, {where['platform']}, Python {where['python']}, {versions}"
    lines = [f"# {name}", "", about, "", f"{where['date']}, {machine}.", ""]
    lines += [_line(rows[0]), _line(["---"] * len(rows[0])), *(_line(row.values()) for row in rows)]
    text.write_text("\n".join(lines) + "\n")
    return [data, text]


def _line(cells: Any) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _show(rows: Sequence[Row]) -> None:
    table = Table()
    for name, value in rows[0].items():
        table.add_column(name, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench.py", description=__doc__.splitlines()[0])
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--strings", nargs="+", metavar="S", help="config strings (default: all)")
    shared.add_argument("--backends", nargs="+", choices=("auto", "aqt", "qwix", "native"), help="default: all")
    shared.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK_STRINGS)}, and few repetitions")
    shared.add_argument("--out", default=str(ROOT / "benchmarks"), help="folder to write to (default: benchmarks)")
    commands = parser.add_subparsers(dest="command", required=True)
    steps = commands.add_parser("steps", parents=[shared], help="step time of the quickstart model")
    steps.add_argument("--rounds", type=int, default=30, help="steps of each (default: %(default)s)")
    health = commands.add_parser("health", parents=[shared], help="cost of health every 10 steps, quickstart model")
    health.add_argument("--rounds", type=int, default=8, help="of 20 steps and a pass (default: %(default)s)")
    commands.add_parser("trace", parents=[shared], help="StableHLO lines per quantized layer")
    commands.add_parser("memory", parents=[shared], help="bytes saved for backward per layer")
    losses = commands.add_parser("losses", parents=[shared], help="held-out losses of the quickstart model")
    losses.add_argument("--steps", type=int, default=300, help="(default: %(default)s)")
    losses.add_argument(
        "--runs", default=str(ROOT / "runs" / "losses"), help="folder of the runs (default: runs/losses)"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 0 on success, 2 when what was asked cannot be measured."""
    words = _parse(arguments)
    strings = words.strings or (list(QUICK_STRINGS) if words.quick else None)
    try:
        chosen = schemes(strings, words.backends)
        measure: dict[str, tuple[Callable[[], list[Row]], Callable[..., Any]]] = {
            "steps": (lambda: measure_steps(chosen, 5 if words.quick else words.rounds), measure_steps),
            "health": (lambda: measure_health_of(chosen, 2 if words.quick else words.rounds), measure_health),
            "trace": (lambda: measure_trace(chosen), measure_trace),
            "memory": (lambda: measure_memory(chosen), measure_memory),
            "losses": (lambda: measure_losses(chosen, words.steps, Path(words.runs)), measure_losses),
        }
        run, described = measure[words.command]
        rows = run()
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _show(rows)
    about = " ".join((described.__doc__ or "").split())
    for path in write(words.command, about, rows, Path(words.out)):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
