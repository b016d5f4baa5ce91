"""Matmuls of every config string on its default backend, compiled for a chip, or the error message.

The function is ``compare_libraries``'s MLP step at 256 tokens and widths 256 → 512 → 256.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from jaxquant.aot.report import table
from jaxquant.bench.compare_libraries import Setup, matmuls, measure
from jaxquant.config.recipes import RECIPES

STRINGS = [name for n, name in enumerate(RECIPES) if RECIPES[name] not in list(RECIPES.values())[:n]]
"""Config strings, without strings that repeat a recipe."""


def cell(string: str, target: str) -> str:
    """Return the matmuls of the compiled step under a config string, or the error message.

    Args:
      string: one of ``STRINGS``.
      target: chip, one of ``CHIPS`` of ``jaxquant.aot``.

    Raises:
      jax.errors.JaxRuntimeError: the compiler failed.
    """
    config = {"quantization": string} if string else {}
    file = {"quant_cfg_path": "configs/intmp/int8_weight_only.json"} if string == "intmp" else {}
    try:
        program, _ = measure(Setup(string, config | file), target, 256, 256, 512)
    except NotImplementedError as refused:
        return f"refused: {refused}"
    return matmuls(program)


def cells(target: str, only: Sequence[str] = ()) -> dict[str, str]:
    """Return the cells of a chip by config string; an empty ``only`` selects all config strings."""
    return {string: cell(string, target) for string in STRINGS if not only or string in only}


def page(rows: Sequence[dict[str, str]]) -> str:
    """Return a markdown page with the table of config strings and chips, and the error messages below the table."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    short = [{key: row.get(key, "").partition(":")[0] for key in columns} for row in rows]
    refused = sorted({cell for row in rows for cell in row.values() if cell.startswith("refused: ")})
    title = "# Every config string, compiled for chips that are not here"
    notes = "An MLP step with `quant_backend: auto`, and its matmuls as compiled; an empty cell was not compiled."
    return "\n".join([title, "", notes, "", *table(short), "", *(f"- {each}" for each in refused)]) + "\n"


if __name__ == "__main__":
    print(json.dumps(cells(sys.argv[1], sys.argv[2:])))
