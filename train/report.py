"""The comparison of runs as one HTML page that needs nothing else: numbers, curves, bytes, dtypes of the layers."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

from plotly.offline import get_plotlyjs

from jaxquant.core.matmul_dtypes import MatmulDtypes
from train.health_report import STATISTICS, health_maps
from train.runs import Run, differing_fields, find_baseline

MATMULS = ("fwd", "dlhs", "drhs")
BYTES = {
    "parameter_bytes": "Parameters",
    "quant_state_bytes": "Quant state",
    "saved_activation_bytes": "Saved for backward, one micro-batch",
}


def comparison_rows(runs: Sequence[Run]) -> list[dict[str, str]]:
    """Return the table of a comparison, ready to print, one row a run."""
    baseline = find_baseline(runs)
    return [
        {
            "run": run.name,
            "quantization": run.quantization or ("by rules" if run.config.get("rules") else "none"),
            "backend": run.backend or "–",
            "steps": f"{run.last_step}" + ("" if run.is_finished else " (unfinished)"),
            "held-out loss": _or_dash(run.final_loss, "{:.4f}"),
            "gap": "–" if run is baseline else _or_dash(run.gap(baseline), "{:+.2%}"),
            "step time": _or_dash(run.step_time_s and 1000 * run.step_time_s, "{:.0f} ms"),
            "ratio": _or_dash(run.time_ratio(baseline), "{:.2f}×"),
        }
        for run in runs
    ]


def notes(runs: Sequence[Run]) -> list[str]:
    """Describe what limits the comparison."""
    found = [f"{run.note}." for run in runs if run.note]
    if find_baseline(runs) is None:
        found.append("No unquantized run was given, so there is no gap and no ratio.")
    if fields := differing_fields(runs):
        found.append(f"The runs differ in more than quantization: {', '.join(fields)}.")
    if unfinished := [run.name for run in runs if not run.is_finished]:
        found.append(f"Not finished: {', '.join(unfinished)}; bytes and layers are known at the end of a run.")
    return found


def render(runs: Sequence[Run], title: str = "Training runs compared") -> str:
    """Build the page.

    Args:
      runs: in the order of the table's rows.
      title: of the page.
    """
    fill = {
        "TITLE": html.escape(title),
        "SUBTITLE": html.escape(_subtitle(runs)),
        "NOTES": "".join(f"<p class=note>{html.escape(note)}</p>" for note in notes(runs)),
        "SUMMARY": _summary_table(runs),
        "LAYERS": _layer_table([run for run in runs if run.summary.get("layers")]),
        "COVERAGE": _coverage_table([run for run in runs if run.coverage]),
        "HEALTH": _health_sections(),
        "CHARTS": _script_data(charts(runs)),
        "HEALTH_MAPS": _script_data({"runs": health_maps(runs), "statistics": STATISTICS}),
        "PLOTLY": get_plotlyjs().replace("</script", "<\\/script"),
    }
    page = resources.files("train").joinpath("report_template.html").read_text(encoding="utf-8")
    head, *parts = page.split("<!--")
    # One pass over the template: what is filled in (plotly's source, a path) may itself look like a placeholder.
    return head + "".join(fill[name] + rest for name, rest in (part.split("-->", 1) for part in parts))


def _script_data(data: Any) -> str:
    return json.dumps(data).replace("<", "\\u003c")


def _health_sections() -> str:
    return "".join(
        f"<section class='half health'><h2>{about['title']}</h2><p class=about>{about['about']}</p>"
        f"<div class=map data-statistic={name}></div></section>"
        for name, about in STATISTICS.items()
    )


def charts(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return every chart as plain data: where it goes, titles and traces; the page adds light and dark colours."""
    baseline = find_baseline(runs)
    quantized = [run for run in runs if run is not baseline]
    colour = {run.name: index for index, run in enumerate(quantized)}

    def style(run: Run) -> dict[str, Any]:
        return {
            "name": html.escape(run.name),
            "run": -1 if run is baseline else colour[run.name],
            "legendgroup": run.name,
        }

    def line(run: Run, points: dict[int, float], **more: Any) -> dict[str, Any]:
        steps = sorted(points)
        values = [points[step] if math.isfinite(points[step]) else None for step in steps]
        return {"type": "scatter", "x": steps, "y": values, **style(run), **more}

    def curves(at: str, traces: list[dict[str, Any]], y: dict[str, Any]) -> dict[str, Any]:
        return {"at": at, "traces": traces, "x": {"title": "step"}, "y": y, "legend": True}

    def bars(at: str, values: list[float | None], text: list[str], unit: str) -> dict[str, Any]:
        traces = [
            {"type": "bar", "orientation": "h", "x": [v], "y": [html.escape(run.name)], "text": [t], **style(run)}
            for run, v, t in zip(runs, values, text, strict=True)
            if v is not None
        ]
        return {"at": at, "traces": traces, "x": {"title": unit}, "y": {}}

    loss = {"title": "loss (nats per token)"}
    found = [
        curves("train-loss", [line(run, run.smoothed(), mode="lines") for run in runs], loss),
        curves("held-out-loss", [line(run, run.held_out, mode="lines+markers") for run in runs], loss),
    ]
    if baseline is not None and len(runs) > 1:
        traces = []
        for run in quantized:
            smooth = _gaps(run.smoothed(), baseline.smoothed())
            traces.append(line(run, smooth, mode="lines", opacity=0.5, showlegend=False))
            traces.append(line(run, _gaps(run.held_out, baseline.held_out), mode="lines+markers"))
        found.append(curves("gap", traces, {"title": "excess loss (%)", "zero": True, "ticksuffix": " %"}))
    times = [run.step_time_s and 1000 * run.step_time_s for run in runs]
    ratios = [_or_dash(run.time_ratio(baseline), " · {:.2f}×").replace("–", "") for run in runs]
    labels = [f"{time:.0f} ms{ratio}" if time else "" for time, ratio in zip(times, ratios, strict=True)]
    found.append(bars("step-time", times, labels, "milliseconds"))
    for key in BYTES:
        counts: list[float | None] = [run.summary.get(key) for run in runs]
        unit, size = _unit(max((count for count in counts if count is not None), default=0))
        values = [count if count is None else count / size for count in counts]
        text = ["" if value is None else f"{value:,.2f} {unit}" for value in values]
        found.append(bars(key, values, text, unit))
    return found


def _gaps(losses: dict[int, float], reference: dict[int, float]) -> dict[int, float]:
    return {step: 100 * (loss / reference[step] - 1) for step, loss in losses.items() if step in reference}


def _unit(largest: float) -> tuple[str, int]:
    return next((pair for pair in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)) if largest >= pair[1]), ("bytes", 1))


def _or_dash(value: float | None, pattern: str) -> str:
    return "–" if value is None else pattern.format(value)


def _subtitle(runs: Sequence[Run]) -> str:
    versions = [run.summary.get("versions", {}).get("jax") for run in runs]
    devices = {run.summary["devices"] for run in runs if run.summary.get("devices")}
    words = [f"{len(runs)} runs", *sorted(devices)]
    if any(versions):
        words.append("jax " + ", ".join(sorted({version for version in versions if version})))
    data = {run.summary["data"] for run in runs if run.summary.get("data")}
    return " · ".join([*words, *sorted(data)])


def _cells(cells: Sequence[str], tag: str = "td") -> str:
    return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)


def _summary_table(runs: Sequence[Run]) -> str:
    rows = comparison_rows(runs)
    body = "".join(f"<tr>{_cells([*row.values()])}</tr>" for row in rows)
    return f"<table class=summary><thead><tr>{_cells([*rows[0]], 'th')}</tr></thead><tbody>{body}</tbody></table>"


def _layer_table(runs: Sequence[Run]) -> str:
    """Build the table of what the configuration of each finished run makes of its layers."""
    if not runs:
        return "<p class=note>No finished run, so no layers.</p>"
    layers = [{layer["path"]: layer for layer in run.summary["layers"]} for run in runs]
    shapes = {path: layer["kernel_shape"] for found in reversed(layers) for path, layer in found.items()}

    def lead(path: str) -> list[str]:
        return [path, " × ".join(map(str, shapes[path]))]

    return _runs_table(runs, layers, ("layer", "kernel"), lead, MATMULS, _layer_cells)


def _coverage_table(runs: Sequence[Run]) -> str:
    """Build the table of what the traced step of each run multiplies; runs without a ``coverage.json`` are left out."""
    if not runs:
        return "<p class=note>No run here has a coverage.json.</p>"
    layers = [{layer["path"]: layer for layer in run.coverage["layers"]} for run in runs]
    totals = "".join(f"<td colspan=4 class='first float'>{html.escape(run.coverage['summary'])}</td>" for run in runs)
    return _runs_table(
        runs,
        layers,
        ("module",),
        lambda path: [path or "(no module)"],
        (*MATMULS, "times"),
        _coverage_cells,
        f"<tr><td>total</td>{totals}</tr>",
    )


def _runs_table(
    runs: Sequence[Run],
    layers: Sequence[dict[str, dict[str, Any]]],
    heads: Sequence[str],
    lead: Callable[[str], list[str]],
    columns: Sequence[str],
    cells: Callable[[dict[str, Any]], list[str]],
    last: str = "",
) -> str:
    """Build a table with one row a path and ``columns`` for each run.

    Args:
      runs: in order.
      layers: path -> what a run has there, a run each.
      heads, lead: titles of the columns before those of runs, and their texts for a path.
      columns: of each run.
      cells: makes the cells of a run from what it has.
      last: row below the others.
    """

    def row(path: str) -> str:
        name, *more = lead(path)
        missing = f"<td colspan={len(columns)} class='first missing'>not in this run</td>"
        found = "".join("".join(cells(of_run[path])) if path in of_run else missing for of_run in layers)
        return f"<tr><td class=path>{html.escape(name)}</td>{_cells(more)}{found}</tr>"

    paths = dict.fromkeys(path for of_run in layers for path in of_run)
    titles = "".join(f"<th rowspan=2>{head}</th>" for head in heads)
    names = "".join(f"<th colspan={len(columns)} class=first>{html.escape(run.name)}</th>" for run in runs)
    subheads = "".join(f"<th class='{'first' if name == 'fwd' else ''}'>{name}</th>" for name in columns) * len(runs)
    return (
        f"<table class=layers><thead><tr>{titles}{names}</tr><tr>{subheads}</tr></thead>"
        f"<tbody>{''.join(map(row, paths))}{last}</tbody></table>"
    )


def _layer_cells(layer: dict[str, Any]) -> list[str]:
    if layer.get("recipe") is None:
        return [_float_cell(layer.get("reason") or "not quantized")]
    dtypes = {name: MatmulDtypes.from_json(layer["dtypes"].get(name)) for name in MATMULS}
    return [_dtype_cell(str(each), [each], name) for name, each in dtypes.items()]


def _coverage_cells(layer: dict[str, Any]) -> list[str]:
    times = f"<td>{html.escape(str(layer['times']))}</td>"
    if all(layer[name] in ("float", "") for name in MATMULS):
        return [_float_cell(layer["reason"]), times]
    dtypes = {name: [MatmulDtypes.from_json(each) for each in layer["dtypes"].get(name, ())] for name in MATMULS}
    return [*(_dtype_cell(layer[name], dtypes[name], name) for name in MATMULS), times]


def _float_cell(reason: str) -> str:
    return f"<td colspan=3 class='first float'>float<small>{html.escape(reason)}</small></td>"


def _dtype_cell(text: str, dtypes: Sequence[MatmulDtypes], matmul: str) -> str:
    kind = next((each.kind for each in dtypes if each.is_low), "float")
    return f"<td class='{kind}{' first' if matmul == 'fwd' else ''}'>{html.escape(text)}</td>"
