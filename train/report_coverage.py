"""The report's table of what the traced step of each run really multiplies."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any

from jaxquant.core.matmul_dtypes import MatmulDtypes
from train.runs import Run

MATMULS = ("fwd", "dlhs", "drhs")
DtypeCell = Callable[[str, Sequence[MatmulDtypes], str], str]


def coverage_table(runs: Sequence[Run], dtype_cell: DtypeCell) -> str:
    """Build one HTML row a module path: its three matmuls in every run, times a step, and why a float one is float.

    Args:
      runs: those without a ``coverage.json`` are left out.
      dtype_cell: builds a table cell of (text, dtypes, matmul).
    """
    runs = [run for run in runs if run.coverage]
    if not runs:
        return "<p class=note>No run here has a coverage.json.</p>"
    found = [{layer["path"]: layer for layer in run.coverage["layers"]} for run in runs]
    paths = list(dict.fromkeys(path for layers in found for path in layers))
    heads = "".join(f"<th colspan=4 class=first>{html.escape(run.name)}</th>" for run in runs)
    names = "".join(f"<th{' class=first' if name == 'fwd' else ''}>{name}</th>" for name in (*MATMULS, "times"))
    rows = "".join(_row(path, [layers.get(path) for layers in found], dtype_cell) for path in paths)
    totals = "".join(f"<td colspan=4 class='first float'>{html.escape(run.coverage['summary'])}</td>" for run in runs)
    return (
        f"<table class=layers><thead><tr><th rowspan=2>module</th>{heads}</tr><tr>{names * len(runs)}</tr></thead>"
        f"<tbody>{rows}<tr><td>total</td>{totals}</tr></tbody></table>"
    )


def _row(path: str, layers: Sequence[dict[str, Any] | None], dtype_cell: DtypeCell) -> str:
    cells = [f"<td class=path>{html.escape(path or '(no module)')}</td>"]
    for layer in layers:
        if layer is None:
            cells.append("<td colspan=4 class='first missing'>not in this run</td>")
        elif all(layer[name] in ("float", "") for name in MATMULS):
            reason = html.escape(layer["reason"])
            cells.append(
                f"<td colspan=3 class='first float'>float<small>{reason}</small></td><td>{layer['times']}</td>"
            )
        else:
            for name in MATMULS:
                stored = layer.get("dtypes", {}).get(name, ())  # a run of an older version stored text alone
                cells.append(dtype_cell(layer[name], [MatmulDtypes.from_json(each) for each in stored], name))
            cells.append(f"<td>{layer['times']}</td>")
    return f"<tr>{''.join(cells)}</tr>"
