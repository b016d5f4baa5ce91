"""Held-out losses of FP4 schemes against float's of the same seeds: each run one line of JSON, then a table."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from benchmarks.schemes import ROOT, Row
from benchmarks.seeds import Trials, mean
from jaxquant.config.recipes import RECIPES
from jaxquant.config.rules import Rule
from jaxquant.core.recipe import Recipe, TensorSpec

RECORD = ROOT / "benchmarks" / "fp4-losses.jsonl"
FLOAT, NVFP4, COMPOSED = "float", "nvfp4", "fp8_current forward, quartet2 backward"


def _without_noise() -> Recipe:
    """NVFP4 whose output gradient is rounded to nearest."""
    recipe = RECIPES[NVFP4].recipe
    assert recipe is not None
    dlhs, drhs = recipe.dlhs, recipe.drhs
    assert isinstance(dlhs.lhs, TensorSpec)
    assert isinstance(drhs.rhs, TensorSpec)
    return dataclasses.replace(
        recipe,
        name="nvfp4_nearest",
        dlhs=dataclasses.replace(dlhs, lhs=dataclasses.replace(dlhs.lhs, rounding="nearest")),
        drhs=dataclasses.replace(drhs, rhs=dataclasses.replace(drhs.rhs, rounding="nearest")),
    )


def _string(quantization: str | dict[str, str], **options: Any) -> Row:
    return {"quantization": quantization, "quant_backend": "native", **options}


TRIALS: Trials = {
    FLOAT: (3, {}),
    NVFP4: (3, _string("nvfp4")),
    "quartet2 4/6": (3, _string("quartet2", four_over_six=True)),
    COMPOSED: (3, _string({"fwd": "fp8_current", "dlhs": "quartet2", "drhs": "quartet2"})),
    "quartet2": (3, _string("quartet2")),
    "tetrajet_v2": (1, _string("tetrajet_v2")),
    "nvfp4 4/6": (1, _string("nvfp4", four_over_six=True)),
    "nvfp4 without Hadamard": (1, _string("te_nvfp4_no_rht")),
    "nvfp4 without stochastic rounding": (
        1,
        {"rules": (Rule("layers/.*", _without_noise()),), "quant_backend": "native"},
    ),
    "fp8_block": (1, _string("fp8_block")),
    "mxfp8": (1, _string("mxfp8")),
}
"""Scheme -> number of seeds, fields of the run's configuration."""

GOALS = {"quartet2 4/6": 0.8, COMPOSED: 1 / 3}
"""Scheme -> largest share of NVFP4's gap."""

OPEN_DATA = {NVFP4: 1.0, "nvfp4 4/6": 0.97, "tetrajet_v2": 0.89, "quartet2": 0.83, "quartet2 4/6": 0.74, COMPOSED: 0.09}
"""Scheme -> its share of NVFP4's gap in the runs of Quartet II's authors (200M parameters, 98 tokens each).

The composition's is of 100M parameters and a forward in bfloat16.
"""


def table(lines: dict[tuple[str, int], Row]) -> list[Row]:
    """Compare held-out losses of the quickstart model under FP4 schemes with those of the float runs of the same seeds.

    A seed is of the initial parameters, the order of the data and the noise. A run whose line is in the record is not
    trained again, and one that was interrupted goes on from its checkpoint. Figures after ± are the standard error of
    the mean over seeds; the training gap is that of the mean training loss over the last third of the steps.

    Args:
      lines: of the record, by scheme and seed.
    """
    held_out = {key: line["held_out_loss"] for key, line in lines.items()}
    gaps, training = _gaps(held_out), _gaps({key: _end_of_training(line) for key, line in lines.items()})
    rows = []
    for name in TRIALS:
        seeds = sorted(seed for scheme, seed in gaps if scheme == name)
        if not seeds:
            continue
        pairs = [seed for seed in seeds if (NVFP4, seed) in gaps and name != FLOAT]
        share = sum(gaps[name, n] for n in pairs) / sum(gaps[NVFP4, n] for n in pairs) if pairs else None
        row: Row = {
            "scheme": name,
            "held-out loss": " / ".join(f"{held_out[name, seed]:.4f}" for seed in seeds),
            "difference": mean([held_out[name, n] - held_out[FLOAT, n] for n in seeds], "+.4f"),
            "gap %": " / ".join(f"{gaps[name, seed]:+.2f}" for seed in seeds),
            "mean gap %": mean([gaps[name, seed] for seed in seeds], "+.2f"),
            "of nvfp4's": "–" if share is None else f"{share:.2f}",
            "goal": "–",
            "training gap %": mean([training[name, seed] for seed in seeds], "+.2f"),
            "open data": OPEN_DATA.get(name, "–"),
        }
        if share is not None and (goal := GOALS.get(name)):
            held, trained = ([each[name, n] - goal * each[NVFP4, n] for n in pairs] for each in (gaps, training))
            far = f"{mean(held, '+.2f')} points from it, training {mean(trained, '+.2f')}"
            row["goal"] = f"≤ {goal:.2f}: {'held' if share <= goal else 'missed'}, {far}"
        rows.append((statistics.mean(gaps[name, seed] for seed in seeds), row))
    return [row for _, row in sorted(rows, key=lambda each: each[0])]


def _gaps(losses: dict[tuple[str, int], float]) -> dict[tuple[str, int], float]:
    """Return the excess over the float run of the same seed in percent, of runs that have one."""
    return {
        (name, seed): 100 * (loss / losses[FLOAT, seed] - 1)
        for (name, seed), loss in losses.items()
        if name in TRIALS and (FLOAT, seed) in losses
    }


def _end_of_training(line: Row) -> float:
    """Return the mean training loss over the last third of a run, whose batches are those of all runs of its seed."""
    return statistics.mean(loss for step, loss in line["train_loss"].items() if int(step) > 2 * line["steps"] / 3)
