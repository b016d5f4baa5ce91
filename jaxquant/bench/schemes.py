"""Schemes to measure: each pair of a config string and a backend in the recipe table, once."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jaxquant.config.recipes import RECIPES

QUICKSTART = str(resources.files("jaxquant.training").joinpath("configs/quickstart.yml"))
ROOT = Path(__file__).resolve().parents[2]
"""Root of the checkout."""
RESULTS = Path("benchmarks/results")
"""Folder of the committed results, from the root of a checkout."""
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A config string on a backend; ``also`` lists other config strings with the same row of the table."""

    string: str
    backend: str
    also: tuple[str, ...] = ()

    @property
    def config(self) -> dict[str, Any]:
        if not self.string:
            return {}
        bits = {"quant_cfg_path": "configs/intmp/int8_weight_only.json"} if self.string == "intmp" else {}
        return bits | {"quantization": self.string, "quant_backend": self.backend}

    @property
    def cells(self) -> Row:
        return {"quantization": " = ".join((self.string or "none", *self.also)), "backend": self.backend or "–"}


UNQUANTIZED = Scheme("", "")


def schemes(strings: Sequence[str], backends: Sequence[str]) -> list[Scheme]:
    """Return the schemes of the recipe table, each row once; ``auto`` selects the default backend of a row.

    Raises:
      ValueError: a string is unknown, or no scheme matches.
    """
    for string in strings:
        if not RECIPES.get(string) or not string:
            raise ValueError(f"--string {string!r} is unknown; use one of {', '.join(filter(None, RECIPES))}")
    found: list[Scheme] = []
    seen: set[int] = set()
    for string in strings or [name for name in RECIPES if name]:
        row = RECIPES[string]
        if id(row) in seen:
            continue
        seen.add(id(row))
        also = tuple(name for name, other in RECIPES.items() if other is row and name != string)
        for backend in row.backends or ("",):
            if not backends or backend in backends or ("auto" in backends and backend == row.auto):
                found.append(Scheme(string, backend, also))
    if not found:
        raise ValueError(f"no --string of {strings} runs on a --backend of {backends}; change --string or --backend")
    return found


def print_progress(text: str) -> None:
    """Print the progress of a measurement to stderr."""
    print(text, file=sys.stderr, flush=True)
