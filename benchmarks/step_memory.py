"""step_memory: what the whole training step of a Llama-3-8B holds on absent chips, by the optimizer's state."""

from __future__ import annotations

import sys
from typing import Any

from jaxquant.aot.compile import audit_program
from jaxquant.aot.memory import WEIGHTS, largest_batch
from jaxquant.aot.plugin import PROGRAM
from jaxquant.aot.report import Audit, table

CONFIG = "configs/models/llama3-8b.yml"
SLICES = {"h200": ("8", 8), "v6e": ("4x4", 16)}
"""Target -> its topology, and the sequences of 8192 tokens of a batch, one a device."""
STATES = ("float32", "fp8_coat", "int8_dynamic", "int8_linear")
VARIANTS = tuple(f"{state}{weights}" for state in STATES for weights in ("", "+bfloat16"))
NOTES = (
    "The step that `python -m train configs/models/llama3-8b.yml` runs, unquantized, batches of one sequence of 8192 "
    "tokens a device, compiled without the chip. Bytes a parameter are those of a device times devices over "
    "parameters. Temporaries hold the gradients and activations."
)


def row(target: str, variant: str) -> dict[str, Any]:
    """Compile a step.

    Args:
      target: a key of ``SLICES``.
      variant: a row of ``VARIANTS``, where bfloat16 is of the weights, rounded randomly; ``+largest`` behind it looks
        for the largest batch that fits, too, which compiles about five steps.
    """
    state, *flags = variant.split("+")
    topology, sequences = SLICES[target]
    words = [f"optimizer_state={state}"]
    words += ["weight_dtype=bfloat16", "stochastic_rounding=true"] if "bfloat16" in flags else []

    def compiled(size: int) -> Audit:
        given = [*words, f"batch_size={size}"]
        return audit_program(PROGRAM, CONFIG, given, target=target, topology=topology, name=variant)

    found = compiled(sequences)
    a_byte = next(part["bytes a parameter"] / part["bytes"] for part in found.parts if part["part"] == WEIGHTS)
    made: dict[str, Any] = {"chip": f"{found.devices} {target}", "state": variant.removesuffix("+largest")}
    made["arguments a parameter"] = round(sum(part["bytes"] for part in found.parts) * a_byte, 2)
    for name in ("temporaries", "peak"):
        made[f"{name}, GB"] = round(found.memory[name] / 1e9, 2) if found.memory else found.refusal[:200]
    made["fits"] = found.fits
    if "largest" in flags:
        made["largest batch"] = largest_batch(compiled, sequences)[0]
    print(f"{made}, compiled in {found.compile_seconds:.0f} s", file=sys.stderr, flush=True)
    return made


def page(rows: list[dict[str, Any]]) -> str:
    """Write the table."""
    columns = dict.fromkeys(key for each in rows for key in each)
    whole = [{key: each.get(key, "") for key in columns} for each in rows]
    return "\n".join(["# Memory of a whole step of Llama-3-8B", "", NOTES, "", *table(whole), ""])
