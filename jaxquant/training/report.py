"""Comparison of run folders as one HTML page: numbers, curves, bytes, dtypes and health."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import string
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxquant.config.loader import load_yaml
from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.quant_state import TENSORS
from jaxquant.export.sums import check_sums
from jaxquant.training import sums
from jaxquant.training.metrics import warm_median

if TYPE_CHECKING:
    import plotly.graph_objects as go

SMOOTHING = 0.9
"""Weight of the previous value in a smoothed training loss."""
MATMULS = ("fwd", "dlhs", "drhs")
BYTES = {
    "parameter_bytes": "Parameters as trained, without quant state",
    "quant_state_bytes": "Quant state: scales, amax histories, masks",
    "saved_activation_bytes": "Activations saved for the backward pass of one micro-batch",
}
COVERAGE = ("path", "shapes", *MATMULS, "scales", "times", "reason")
"""Columns of the coverage table, which lists every matmul of the traced step by module."""
HEALTH = {  # title, bad values, colours from good to bad, whether the colours show log10, and their range, if fixed
    "sqnr": ("SQNR, dB", "below 20 with eight bits, below 10 with four, or falling", "OrRd_r", False, (5, 45)),
    "saturated": ("Saturated", "above 1 %: the scale is too small for the tensor", "OrRd", True, (-4, -1)),
    "flushed": ("Flushed to zero", "growing in output gradients, which are then lost", "OrRd", True, (-4, 0)),
    "amax": ("Amax", "a row that grows with the steps, or jumps; later values may overflow", "Blues", True, ()),
    "scale": ("Scale, the largest", "a jump; small elements are then flushed", "Blues", True, ()),
    "nonfinite": ("Not finite", "any value above 0; the error started in the first such layer", "OrRd", True, (-4, 0)),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """Contents of a run folder.

    Attributes:
      name: folder name, or the path if two runs have the same name.
      config: configuration of the newest checkpoint, or contents of ``config.yml`` if there is no checkpoint.
      train, held_out: loss by step, in nats per token.
      step_time_s: median step time in seconds, or None if no step was timed.
      summary: contents of ``summary.json``; {} for an unfinished run.
      coverage: contents of ``coverage.json``; {} if the run has none.
      health: lines of ``health.jsonl``; empty if the run did not measure health.
    """

    name: str
    config: dict[str, Any]
    train: dict[int, float]
    held_out: dict[int, float]
    step_time_s: float | None
    summary: dict[str, Any]
    coverage: dict[str, Any] = dataclasses.field(default_factory=dict)
    health: tuple[dict[str, Any], ...] = ()

    @property
    def last_step(self) -> int:
        return max(self.train)

    @property
    def final_loss(self) -> float | None:
        """Last held-out loss, or None if there is no held-out loss."""
        return self.held_out[max(self.held_out)] if self.held_out else None

    def gap(self, baseline: Run | None) -> float | None:
        """Return the excess of the last held-out loss over the baseline's at the same step, in percent, or None."""
        return _gaps(self.held_out, baseline.held_out).get(max(self.held_out)) if baseline and self.held_out else None

    def smoothed(self) -> dict[int, float]:
        """Return the training loss as an exponential mean without start-up bias; non-finite losses are skipped."""
        total = weight = 0.0
        means = {}
        for step, loss in sorted(self.train.items()):
            if math.isfinite(loss):
                total, weight = SMOOTHING * total + loss, SMOOTHING * weight + 1
                means[step] = total / weight
        return means


def load_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Read run folders, in order.

    Raises:
      ValueError: a folder is given twice, has no metrics, or has a damaged file.
      FileNotFoundError: a folder does not exist.
    """
    paths = [Path(folder) for folder in folders]
    if len({path.resolve() for path in paths}) != len(paths):
        raise ValueError(f"run folders {', '.join(map(str, paths))} have a folder twice; pass each folder once")
    names = [path.resolve().name for path in paths]
    unique = len(set(names)) == len(names)
    return [load_run(path, name if unique else str(path)) for path, name in zip(paths, names, strict=True)]


def load_run(folder: Path, name: str) -> Run:
    """Read one run folder."""
    if not folder.is_dir():
        raise FileNotFoundError(f"run folder {folder} does not exist; pass a folder that `jaxquant train` wrote")
    for file in ("metrics.jsonl", "config.yml"):
        if not (folder / file).is_file():
            raise ValueError(f"run folder {folder} has no {file}; pass a folder that `jaxquant train` wrote")
    train: dict[int, float] = {}
    held_out: dict[int, float] = {}
    times: list[float] = []

    def note(row: dict[str, Any]) -> None:
        for name, values in (("loss", train), ("held_out_loss", held_out)):
            if name in row:  # null is a number that is not finite
                values[int(row["step"])] = math.nan if row[name] is None else float(row[name])
        if row.get("step_time_s") is not None:
            times.append(float(row["step_time_s"]))

    _read_lines(folder / "metrics.jsonl", "metrics", note)
    if not train:
        raise ValueError(f"{folder / 'metrics.jsonl'} has no training step; let the run finish at least one step")
    summary, coverage = (_read_json(folder / f"{name}.json") for name in ("summary", "coverage"))
    median = summary.get("step_time_s") or warm_median(times)
    has_all = lambda row: row | {name: row[name] for name in ("step", "sequences", "layers")}  # noqa: E731
    health = folder / "health.jsonl"
    health = _read_lines(health, "health", has_all) if health.is_file() else []
    steps = [int(path.name) for path in folder.glob("checkpoints/*") if path.name.isdecimal()]
    # The configuration of a checkpoint is covered by its checksums.
    made_with = (
        sums.read_record(folder / f"checkpoints/{max(steps)}")["config"] if steps else load_yaml(folder / "config.yml")
    )
    return Run(name, made_with, train, held_out, median, summary, coverage, tuple(health))


def _read_lines(path: Path, kind: str, of: Callable[[dict[str, Any]], Any]) -> list[Any]:
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            if line.strip():
                rows.append(of(json.loads(line)))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            shown = repr(line[:60].decode(errors="backslashreplace"))
            raise ValueError(
                f"{path}, line {number} is not a {kind} line: {shown}; resume the run, or delete that line"
            ) from None
    return rows


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            return {}
        check_sums(path.parent, [path.name], required=False)
        return dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); start the run again") from None


def find_baseline(runs: Iterable[Run]) -> Run | None:
    """Return the unquantized run, or None.

    Raises:
      ValueError: several runs are unquantized.
    """
    plain = [run for run in runs if not run.config.get("quantization") and not run.config.get("rules")]
    if len(plain) > 1:
        names = f"{plain[0].name} and {plain[1].name}"
        raise ValueError(f"runs {names} are both unquantized; pass only one, as the baseline")
    return plain[0] if plain else None


def differing_fields(runs: Sequence[Run]) -> list[str]:
    """Return the configuration fields that differ between runs, without quantization and run_dir."""
    expected = {field.name for field in dataclasses.fields(QuantConfig)} | {"run_dir"}
    names = sorted({name for run in runs for name in run.config} - expected)
    return [name for name in names if any(run.config.get(name) != runs[0].config.get(name) for run in runs)]


def comparison_rows(runs: Sequence[Run]) -> list[dict[str, str]]:
    """Return the rows of the comparison table, one per run, as text."""
    baseline = find_baseline(runs)
    base_s = baseline and baseline.step_time_s
    return [
        {
            "run": run.name,
            "quantization": run.config.get("quantization") or ("by rules" if run.config.get("rules") else "none"),
            "backend": run.summary.get("backend") or "–",
            "steps": f"{run.last_step}" + ("" if run.summary else " (unfinished)"),
            "held-out loss": _or_dash(run.final_loss, "{:.4f}"),
            "gap": "–" if run is baseline else _or_dash(run.gap(baseline), "{:+.2f}%"),
            "step time": _or_dash(run.step_time_s and 1000 * run.step_time_s, "{:.0f} ms"),
            "ratio": _or_dash((base_s and run.step_time_s and run.step_time_s / base_s) or None, "{:.2f}×"),
        }
        for run in runs
    ]


def _or_dash(value: float | None, pattern: str) -> str:
    return "–" if value is None else pattern.format(value)


def notes(runs: Sequence[Run]) -> list[str]:
    """Return sentences about the limits of the comparison."""
    found = []
    if find_baseline(runs) is None:
        found.append("There is no unquantized run, so there are no gaps and ratios.")
    if fields := differing_fields(runs):
        found.append(f"The runs differ in more than quantization: {', '.join(fields)}.")
    if unfinished := [run.name for run in runs if not run.summary]:
        found.append(f"Not finished: {', '.join(unfinished)}; bytes are recorded at the end of a run.")
    return found


def render(runs: Sequence[Run], title: str = "Training runs compared") -> str:
    """Build the HTML page.

    Args:
      runs: runs in the order of the table's rows.
      title: title of the page.
    """
    from plotly.offline import get_plotlyjs

    rows = comparison_rows(runs)
    sections: dict[str, Any] = {"Summary": _table([list(rows[0]), *([*row.values()] for row in rows)]), **charts(runs)}
    for run in runs:
        sections |= health_maps(run)
        if run.coverage:
            lines = [[str(layer[name]) for name in COVERAGE] for layer in run.coverage["layers"]]
            about = f"Matmuls of the traced step, {run.name}: {run.coverage['summary']}"
            sections[about] = _table([COVERAGE, *lines])
    body = [f"<p class=note>{html.escape(note)}</p>" for note in notes(runs)]
    for about, content in sections.items():
        heading, _, more = map(html.escape, about.partition(": "))
        if not isinstance(content, str):
            content.update_layout(template="simple_white", margin={"l": 60, "r": 16, "t": 30, "b": 44})
            shown = {"displayModeBar": False, "responsive": True}
            content = content.to_html(full_html=False, include_plotlyjs=False, config=shown)
        body.append(f"<section><h2>{heading}</h2><p>{more}</p>{content}</section>")
    summaries = [run.summary for run in runs if run.summary]
    words = {f"{word}" for each in summaries for word in (each.get("devices"), each.get("data")) if word}
    versions = {f"jax {each['versions']['jax']}" for each in summaries if "versions" in each}
    subtitle = html.escape(" · ".join([f"{len(runs)} runs", *sorted(versions), *sorted(words)]))
    page = string.Template(
        resources.files("jaxquant.training").joinpath("report_template.html").read_text(encoding="utf-8")
    )
    return page.substitute(title=html.escape(title), subtitle=subtitle, plotly=get_plotlyjs(), sections="".join(body))


def charts(runs: Sequence[Run]) -> dict[str, go.Figure]:
    """Return the charts of losses, gaps, step times and bytes, by caption."""
    import plotly.graph_objects as go
    from plotly.colors import qualitative

    baseline = find_baseline(runs)
    some = qualitative.D3
    colours = {run.name: "gray" if run is baseline else some[number % len(some)] for number, run in enumerate(runs)}

    def curves(unit: str, points: Sequence[tuple[Run, dict[int, float], dict[str, Any]]]) -> go.Figure:
        legend = {"orientation": "h", "yanchor": "bottom", "y": 1}
        figure = go.Figure(
            layout={"xaxis_title": "step", "yaxis_title": unit, "hovermode": "x unified", "legend": legend}
        )
        for run, values, more in points:
            y = [value if math.isfinite(value) else None for value in values.values()]
            name, line = html.escape(run.name), {"color": colours[run.name]}
            figure.add_scatter(x=[*values], y=y, name=name, legendgroup=name, line=line, **more)
        return figure

    def bars(unit: str, values: Sequence[float | None]) -> go.Figure:
        known = [(run, value) for run, value in zip(runs, values, strict=True) if value is not None]
        figure = go.Figure(layout={"xaxis_title": unit, "yaxis_autorange": "reversed", "height": 90 + 40 * len(known)})
        names, marks = [html.escape(run.name) for run, _ in known], {"color": [colours[run.name] for run, _ in known]}
        bar = {"orientation": "h", "marker": marks, "texttemplate": "%{x:.4~s}"}
        return figure.add_bar(x=[value for _, value in known], y=names, **bar)

    dots, loss = {"mode": "lines+markers"}, "loss (nats per token)"
    smoothed = [(run, run.smoothed(), {"mode": "lines"}) for run in runs]
    found = {
        "Training loss: smoothed, each step has weight 0.1": curves(loss, smoothed),
        "Held-out loss: on text that training does not use": curves(loss, [(run, run.held_out, dots) for run in runs]),
    }
    if baseline is not None and len(runs) > 1:
        others = [run for run in runs if run is not baseline]
        gaps = [(run, _gaps(run.held_out, baseline.held_out), dots) for run in others]
        found["Gap to the unquantized run: in held-out loss"] = curves("excess loss (%)", gaps)
    times = [run.step_time_s and 1000 * run.step_time_s for run in runs]
    found["Step time: median of a training step"] = bars("milliseconds", times)
    sizes = {about: [run.summary.get(key) for run in runs] for key, about in BYTES.items()}
    return found | {about: bars("bytes", values) for about, values in sizes.items()}


def _gaps(losses: dict[int, float], reference: dict[int, float]) -> dict[int, float]:
    return {step: 100 * (loss / reference[step] - 1) for step, loss in losses.items() if step in reference}


def health_maps(run: Run) -> dict[str, go.Figure]:
    """Return the health charts of a run by caption: one map for each statistic, layers as rows, steps as columns.

    Non-finite numbers have no colour; a statistic without numbers has no map.
    """
    from plotly.subplots import make_subplots

    found: dict[str, go.Figure] = {}
    for statistic, (title, bad, colours, is_log, limits) in HEALTH.items() if run.health else ():
        values = np.array([[row[tensor][statistic] for tensor in TENSORS] for row in run.health], float)
        values[~np.isfinite(values)] = np.nan  # [steps, tensors, layers]; None becomes NaN
        if np.isnan(values).all() or (statistic == "nonfinite" and not np.nanmax(values)):
            continue
        names, steps = run.health[0]["layers"], [str(row["step"]) for row in run.health]
        floor = np.min(values[values > 0], initial=1) / 10  # colour of zeros on the log scale
        shown = np.log10(np.maximum(values, floor)) if is_log else values
        figure = make_subplots(len(TENSORS), 1, shared_xaxes=True, subplot_titles=[*TENSORS], vertical_spacing=0.08)
        for place in range(len(TENSORS)):
            hover = "%{y}<br>step %{x}: %{text:.4g}<extra></extra>"
            data: dict[str, Any] = {"z": shown[:, place].T, "text": values[:, place].T, "hovertemplate": hover}
            figure.add_heatmap(x=steps, y=names, coloraxis="coloraxis", row=place + 1, col=1, **data)
        unit = f"log<sub>10</sub> {title}" if is_log else title
        axis = {"colorscale": colours, "colorbar_title": unit} | dict(zip(("cmin", "cmax"), limits, strict=False))
        figure.update_layout(coloraxis=axis, height=140 + len(TENSORS) * (40 + 16 * len(names)))
        figure.update_yaxes(autorange="reversed")
        about = f"{title}, {run.name}, of {run.health[-1]['sequences']} sequences per batch: bad is {bad}"
        found[about] = figure
    return found


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table><tr>{'</tr><tr>'.join(lines)}</tr></table>"
