"""Result of coverage: a row for every contraction; can be printed, written as JSON and checked."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from jaxquant.core.dtypes import ELEMENTS
from jaxquant.core.matmul_dtypes import MatmulDtypes
from jaxquant.terminal import Tabular

MATMULS = ("fwd", "dlhs", "drhs")
_BACKWARD = ("dlhs", "drhs", "bwd")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One contraction.

    Operands are in the order of a recipe, regardless of the order in the program: activation and weight in ``fwd``,
    output gradient and weight in ``dlhs``, activation and output gradient in ``drhs``.

    Attributes:
      path: "/"-joined path of the parameter, as in rules, or else of the name scopes. The path is "" if the parameter
        is itself an argument, or if there is no parameter and no scope.
      matmul: "fwd", "dlhs", "drhs", "bwd" for a backward matmul of unknown side, or "update" in an optimizer such as
        Muon.
      operation: "dot_general", "ragged_dot_general", "conv_general_dilated", or "pallas_call" for a matmul in a kernel.
      lhs_shape, rhs_shape: shapes of the operands; shapes of blocks in a kernel, shapes of shards in a ``shard_map``.
      dtypes: dtypes of both operands; ``str(dtypes)`` is spelled as in ``trace.report.Row``.
      result_dtype: dtype that the matmul returns.
      lhs_scale, rhs_scale: granularity (per tensor, per channel, per tile) and scaling (dynamic: from the tensor
        itself, delayed: from quant state, static: a constant) of a quantized operand, else "".
      times: number of executions in one call of the function; see ``dataflow.Location``.
      flops: FLOPs of one execution.
      is_recomputed: whether the backward pass recomputes a forward matmul.
      expected: operand dtypes that the config selects, () for float or without a config.
      reason: reason for the dtypes of the operands.
      fault: difference from the expected dtypes, or "".
      source: file, line and function of the caller.
      has_parameter: whether the contraction multiplies a parameter, or is the gradient of such a matmul.
    """

    path: str
    matmul: str
    operation: str
    lhs_shape: tuple[int, ...]
    rhs_shape: tuple[int, ...]
    dtypes: MatmulDtypes
    result_dtype: str
    lhs_scale: str
    rhs_scale: str
    times: int
    flops: int
    is_recomputed: bool
    expected: tuple[str, ...]
    reason: str
    fault: str
    source: str = ""
    has_parameter: bool = False

    @property
    def name(self) -> str:
        """Name for reports: the path, or else a description, or the place in the source."""
        return self.path or ("the model itself" if self.has_parameter else self.source) or "no path"

    @property
    def is_low(self) -> bool:
        """Whether the operands have low precision."""
        return self.dtypes.is_low

    @property
    def scales(self) -> str:
        """Text of the scales of the quantized operands."""
        found = [scale for scale in (self.lhs_scale, self.rhs_scale) if scale]
        return " × ".join(dict.fromkeys(found))


@dataclasses.dataclass(frozen=True, repr=False)
class Coverage(Tabular):
    """Contractions of a function, with faults; prints as a table with a line per path ("e4m3" is float8_e4m3fn).

    Attributes:
      rows: every contraction, in the order of the program.
      missing: backward matmuls that layers to quantize should have but that the program does not contain, such as
        "mlp/wi drhs". Only models that the function differentiates are checked.
      faults: faults of the function as a whole.
      state_faults: faults in the use of quant state.
      frozen: layers with a backward pass whose quant state is frozen with ``state.frozen``.
    """

    rows: tuple[Row, ...]
    missing: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    state_faults: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    _right = ("times",)

    def share(self, *matmuls: str) -> float:
        """Return the share of the FLOPs of these matmuls (default: all) whose operands have at most 8 bits."""
        rows = [row for row in self.rows if not matmuls or row.matmul in matmuls]
        total = sum(row.times * row.flops for row in rows)
        return sum(row.times * row.flops for row in rows if row.is_low) / total if total else 0.0

    def summary(self) -> str:
        """Return one line with the share of the function that runs in low precision."""
        low = sum(row.times for row in self.rows if row.is_low)
        text = f"{low} of {sum(row.times for row in self.rows)} matmuls in at most 8 bits"
        if self.rows:
            text += f"; share of the FLOPs: forward {self.share('fwd'):.1%}"
        if any(row.matmul != "fwd" for row in self.rows):
            text += f", backward {self.share(*_BACKWARD):.1%}"
        if self.frozen:
            text += f"; quant state frozen on purpose: {', '.join(self.frozen)}"
        return text

    def layers(self) -> list[dict[str, Any]]:
        """Return one entry per path for display: shapes, the dtypes of its three matmuls, scales, times, reason.

        Contractions without a path are grouped by their place in the source. ``dtypes`` holds the dtypes as data: lists
        of ``MatmulDtypes`` by "fwd", "dlhs" and "drhs".
        """
        paths: dict[str, list[Row]] = {}
        for row in self.rows:
            paths.setdefault(row.name, []).append(row)
        return [_summarize_layer(path, rows) for path, rows in paths.items()]

    def _lines(self) -> list[Sequence[str]]:
        names = ("path", "shapes", *MATMULS, "scales", "times", "reason")
        return [names, *([_shorten(str(entry[name])) for name in names] for entry in self.layers())]

    def to_json(self) -> str:
        """Return everything as JSON: ``summary``, ``missing``, ``layers`` (one entry per path) and ``rows``."""
        shares = {"forward": self.share("fwd"), "backward": self.share(*_BACKWARD)}
        return json.dumps(
            {
                "summary": self.summary(),
                "low_precision_share": shares,
                "missing": self.missing,
                "state_faults": self.state_faults,
                "frozen": self.frozen,
                "layers": self.layers(),
                "rows": self.rows,
            },
            indent=1,
            default=dataclasses.asdict,
        )

    def check(self, without: Sequence[str] = ()) -> None:
        """Raise an error if a layer does not run in the dtypes of its recipe, or its quant state does not advance.

        Args:
          without: entries of ``missing`` that are expected to be missing: "mlp/wi drhs" for a frozen layer, "head dlhs"
            for a layer after a ``stop_gradient``.

        Raises:
          ValueError: a contraction is missing or has unexpected dtypes, and the message has its path, matmul, expected
            and actual dtypes; a step with gradients treats quant state as a weight, or does not update it and does not
            freeze it with ``state.frozen``; ``faults`` is not empty; or an entry of ``without`` is not missing.
        """
        if unknown := [name for name in without if name not in self.missing]:
            raise ValueError(
                f"without has {unknown[0]!r}, which is not missing; missing: {', '.join(self.missing) or 'none'}"
            )
        if faults := (*self.state_faults, *self.faults):
            raise ValueError(faults[0])
        wrong = [f"{row.name} {row.matmul}: {row.fault}" for row in self.rows if row.fault]
        missing = [name for name in self.missing if name not in without]
        wrong += [f"{name}: this matmul of the config is not in the program" for name in missing]
        if wrong:
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise ValueError(
                f"strict: {wrong[0]}{more}; exclude the layer with a rule {{path: ..., recipe: null}}, choose "
                "another quant_backend, or set strict to false"
            )


def _shorten(text: str) -> str:
    for name in sorted(ELEMENTS, key=len, reverse=True):
        text = text.replace(name, ELEMENTS[name].short)
    return text


def _format_shapes(rows: Sequence[Row]) -> str:
    """Format the shapes of the forward matmuls, or of all rows if there are no forward matmuls."""
    shown = [row for row in rows if row.matmul == "fwd"] or rows
    pairs = dict.fromkeys((row.lhs_shape, row.rhs_shape) for row in shown)
    found = [" · ".join("x".join(map(str, shape)) or "scalar" for shape in pair) for pair in pairs]
    return "; ".join([*found[:2], *(["..."] if len(found) > 2 else [])])


def _summarize_layer(path: str, rows: Sequence[Row]) -> dict[str, Any]:
    dtypes = {
        name: list(dict.fromkeys(row.dtypes for row in rows if row.matmul in matmuls))
        for name, matmuls in (("fwd", ("fwd",)), ("dlhs", ("dlhs", "bwd")), ("drhs", ("drhs", "bwd")))
    }
    return {
        "path": path,
        "shapes": _format_shapes(rows),
        **{name: ", ".join(dict.fromkeys(map(str, found))) for name, found in dtypes.items()},
        "scales": "; ".join(dict.fromkeys(row.scales for row in rows if row.scales)),
        "times": sum(row.times for row in rows),
        "reason": "; ".join(dict.fromkeys(row.reason for row in rows if row.reason)),
        "dtypes": dtypes,
    }
