"""8-bit moments, bfloat16 weights and FP8 residuals, whose held-out losses are compared with those of float32."""

from __future__ import annotations

from jaxquant.bench.schemes import RESULTS, Row
from jaxquant.bench.seeds import Trial

RECORD, STEPS = RESULTS / "optimizer-losses.jsonl", 1000
MATMULS: dict[str, Row] = {"float": {}, "fp8": {"quantization": "fp8", "quant_backend": "native"}}
_BF16: Row = {"weight_dtype": "bfloat16"}
OPTIMIZERS: dict[str, tuple[str, Row]] = {
    "float32": ("float32", {}),
    "fp8_coat": ("float32", {"optimizer_state": "fp8_coat"}),
    "int8_dynamic": ("float32", {"optimizer_state": "int8_dynamic"}),
    "bfloat16 weights, rounded at random": ("float32", _BF16 | {"stochastic_rounding": True}),
    "bfloat16 weights, rounded to nearest": ("float32", _BF16),
    "norms and gates saved in FP8": ("float32", {"saved_activations": "fp8"}),
    "Muon, float32": ("Muon, float32", {"optimizer": "muon"}),
    "Muon, int8_linear": ("Muon, float32", {"optimizer": "muon", "optimizer_state": "int8_linear"}),
}
"""Variant -> (base to compare with, config fields of the run)."""
TRIALS = {
    f"{name}, {matmuls} matmuls": Trial(f"{base}, {matmuls} matmuls", fields | more)
    for matmuls, more in MATMULS.items()
    for name, (base, fields) in OPTIMIZERS.items()
}
