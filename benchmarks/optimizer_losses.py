"""optimizer_losses: held-out losses of 8-bit moments, bfloat16 weights and FP8 residuals against those of float32."""

from __future__ import annotations

from benchmarks.schemes import ROOT, Row
from benchmarks.seeds import Trials, mean

RECORD = ROOT / "benchmarks" / "optimizer-losses.jsonl"
BASELINE, MUON = "float32", "Muon, float32"
MATMULS: dict[str, Row] = {"float": {}, "fp8": {"quantization": "fp8", "quant_backend": "native"}}
_BF16: Row = {"weight_dtype": "bfloat16"}
OPTIMIZERS: dict[str, tuple[str, float, Row]] = {
    BASELINE: (BASELINE, 0.0, {}),
    "fp8_coat": (BASELINE, 0.1, {"optimizer_state": "fp8_coat"}),
    "int8_dynamic": (BASELINE, 0.1, {"optimizer_state": "int8_dynamic"}),
    "bfloat16 weights, rounded at random": (BASELINE, 0.2, _BF16 | {"stochastic_rounding": True}),
    "bfloat16 weights, rounded to nearest": (BASELINE, 0.0, _BF16),
    "norms and gates saved in FP8": (BASELINE, 0.0, {"saved_activations": "fp8"}),
    MUON: (MUON, 0.0, {"optimizer": "muon"}),
    "Muon, int8_linear": (MUON, 0.1, {"optimizer": "muon", "optimizer_state": "int8_linear"}),
}
"""What is in fewer bits -> what it is compared with, the excess in percent aimed at (0: none), fields of a run."""
TRIALS: Trials = {
    f"{name}, {matmuls} matmuls": (3, fields | more)
    for matmuls, more in MATMULS.items()
    for name, (_, _, fields) in OPTIMIZERS.items()
}


def table(lines: dict[tuple[str, int], Row]) -> list[Row]:
    """Compare held-out losses with those of AdamW or Muon, float32 moments, weights and residuals.

    A seed is of the initial parameters, the order of the data and the noise; each run is compared with that of its seed
    and its matmuls with the same optimizer in float32. A run whose line is in the record is not trained again, and one
    that was interrupted goes on from its checkpoint. Figures after ± are the standard error of the mean over seeds.

    Args:
      lines: of the record, by scheme and seed.
    """
    losses = {key: line["held_out_loss"] for key, line in lines.items()}
    rows = []
    for matmuls in MATMULS:
        for optimizer, (baseline, goal, _) in OPTIMIZERS.items():
            name, base = f"{optimizer}, {matmuls} matmuls", f"{baseline}, {matmuls} matmuls"
            seeds = sorted(seed for scheme, seed in losses if scheme == name and (base, seed) in losses)
            if not seeds:
                continue
            excess = [100 * (losses[name, n] / losses[base, n] - 1) for n in seeds]
            kept = "held" if sum(excess) / len(excess) <= goal else "missed"
            rows.append(
                {
                    "optimizer": optimizer,
                    "matmuls": matmuls,
                    "held-out loss": " / ".join(f"{losses[name, n]:.4f}" for n in seeds),
                    "difference": mean([losses[name, n] - losses[base, n] for n in seeds], "+.4f"),
                    "excess %": mean(excess, "+.2f"),
                    "goal": f"≤ {goal:.1f}: {kept}" if goal else "–",
                }
            )
    return rows
