"""Folders of runs that nobody trained."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

PATHS = ("self_attention/query", "self_attention/out", "mlp/wi_0")


def _health(step: int, quantization: str) -> dict[str, Any]:
    """A line of health.jsonl: two layers of each path, the last one worse from step to step."""
    names = [f"layers/{path}, layer {layer}" for layer in range(2) for path in PATHS]
    row: dict[str, Any] = {"step": step, "sequences": 2, "layers": names}
    for tensor in ("input", "kernel", "output_grad"):
        count = len(names)
        row[tensor] = {"amax": [1.0 + step] * count, "nonfinite": [0.0] * count}
        for statistic, good, last in (("scale", 0.01, 0.02), ("saturated", 0.0, step / 1000), ("flushed", 0.0, 0.5)):
            row[tensor][statistic] = [good] * (count - 1) + [last] if quantization else [None] * count
        row[tensor]["sqnr"] = [31.5] * (count - 1) + [30 - step / 20] if quantization else [None] * count
    return row


def write_run(
    folder: Path,
    quantization: str,
    excess: float = 0.0,
    seed: int = 0,
    time: float = 0.25,
    steps: int = 300,
    finished: bool = True,
    health_every: int = 0,
    **config: Any,
) -> Path:
    """Write a run whose losses lie ``excess`` (relative) above those of the unquantized one."""
    noise = random.Random(seed)
    folder.mkdir(parents=True)
    fields = {"quantization": quantization, "steps": steps, "run_dir": str(folder), "learning_rate": 0.004} | config
    (folder / "config.yml").write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in fields.items()))
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss = (1.6 + 3.9 * math.exp(-step / 40)) * (1 + excess)
        measured = {"loss": loss + noise.gauss(0, 0.05), "grad_norm": 1.0, "learning_rate": 0.001}
        lines.append({"step": step, **measured, "step_time_s": time, "tokens_per_s": 2048 / time})
        if step % 100 == 0:
            lines.append({"step": step, "held_out_loss": loss})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {
        "steps": steps,
        "quantization": quantization,
        "backend": "native" if quantization else "",
        "held_out_loss": lines[-1].get("held_out_loss"),
        "step_time_s": time,
        "tokens_per_s": 2048 / time,
        "parameter_bytes": 1_700_000,
        "quant_state_bytes": 86_016 if quantization == "fp8" else 0,
        "saved_activation_bytes": 9_500_000 if quantization else 31_000_000,
        "versions": {"jax": "0.10.2"},
        "devices": "1 x cpu",
        "data": "stdlib: 1,000 files",
    }
    if health_every:
        rows = [_health(step, quantization) for step in range(health_every, steps + 1, health_every)]
        (folder / "health.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finished:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder
