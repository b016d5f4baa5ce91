"""coverage: every contraction that a function runs, with the dtypes that it really has, and why the float ones are."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jaxquant.audit.dataflow import contractions
from jaxquant.audit.places import Placed, place, weight_side
from jaxquant.config.quant_config import QuantConfig
from jaxquant.config.rules import Resolver
from jaxquant.core.dtypes import ELEMENTS, element
from jaxquant.core.recipe import FORWARD, Recipe, TensorSpec
from jaxquant.inject.layers import LayerReport

_BACKWARD = ("dlhs", "drhs", "bwd")
_JITTED = type(jax.jit(lambda: None))
MATMULS = ("fwd", "dlhs", "drhs")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One contraction.

    Operands stand as in a recipe, whatever order the program has: activation and weight in ``fwd``, output gradient and
    weight in ``dlhs``, activation and output gradient in ``drhs``.

    Attributes:
      path: "/"-joined module path, as rules spell it.
      matmul: "fwd", "dlhs", "drhs", or "bwd" for a backward matmul of which it cannot be told.
      operation: "dot_general", "ragged_dot_general", "conv_general_dilated", or "pallas_call" for one in a kernel.
      lhs_shape, rhs_shape: shapes of the operands; of one block in a kernel, of one shard under ``shard_map``.
      lhs_dtype, rhs_dtype: "float32 (int8 dequantized)" is a float operand that was rounded to int8.
      result_dtype: dtype that the matmul returns.
      lhs_scale, rhs_scale: granularity (per tensor, per channel, per tile) and scaling (dynamic: from the tensor
        itself, delayed: from quant state, static: a constant) of an operand that was quantized, else "".
      times: how often one call of the function runs it; see ``dataflow.Contraction``.
      flops: of one time.
      is_recomputed: a forward matmul that the backward pass does again.
      is_low: it multiplies low-precision operands.
      wanted: operand dtypes that the config asks for, () for float or where no config says.
      reason: why it has these dtypes.
      fault: "" or what is wrong with them.
    """

    path: str
    matmul: str
    operation: str
    lhs_shape: tuple[int, ...]
    rhs_shape: tuple[int, ...]
    lhs_dtype: str
    rhs_dtype: str
    result_dtype: str
    lhs_scale: str
    rhs_scale: str
    times: int
    flops: int
    is_recomputed: bool
    is_low: bool
    wanted: tuple[str, ...]
    reason: str
    fault: str

    @property
    def dtypes(self) -> str:
        """Operand dtypes in one word, as ``LayerReport`` spells them."""
        if self.is_low:
            return f"{self.lhs_dtype} × {self.rhs_dtype}"
        dtypes = (self.lhs_dtype, self.rhs_dtype)
        held = [dtype.partition("(")[2][:-1] or dtype for dtype in dtypes if "(" in dtype or dtype in ELEMENTS]
        return f"float ({', '.join(held)})" if held else "float"

    @property
    def scales(self) -> str:
        """Scales of the quantized operands in one word."""
        found = [scale for scale in (self.lhs_scale, self.rhs_scale) if scale]
        return " × ".join(dict.fromkeys(found))


@dataclasses.dataclass(frozen=True)
class Coverage:
    """What a function multiplies.

    Attributes:
      rows: every contraction, in the order of the program.
      missing: layers that the config quantizes and that no contraction was found for.
    """

    rows: tuple[Row, ...]
    missing: tuple[str, ...] = ()

    def share(self, *matmuls: str) -> float:
        """Give the share of the FLOPs of these matmuls (default: all) that run on operands of at most 8 bits."""
        rows = [row for row in self.rows if not matmuls or row.matmul in matmuls]
        total = sum(row.times * row.flops for row in rows)
        return sum(row.times * row.flops for row in rows if row.is_low) / total if total else 0.0

    def summary(self) -> str:
        """Say in one line how much of the function runs in low precision."""
        low = sum(row.times for row in self.rows if row.is_low)
        text = f"{low} of {sum(row.times for row in self.rows)} matmuls in at most 8 bits"
        if self.rows:
            text += f"; share of the FLOPs: forward {self.share('fwd'):.1%}"
        if any(row.matmul != "fwd" for row in self.rows):
            text += f", backward {self.share(*_BACKWARD):.1%}"
        return text

    def layers(self) -> list[dict[str, Any]]:
        """Give one entry a path: the dtypes of its three matmuls, scales, times and the reason."""
        paths: dict[str, list[Row]] = {}
        for row in self.rows:
            paths.setdefault(row.path, []).append(row)
        return [_layer(path, rows) for path, rows in paths.items()]

    def table(self) -> Any:
        """Make a ``rich.table.Table`` with a line for every path; "e4m3" is float8_e4m3fn.

        Raises:
          ImportError: rich is not installed.
        """
        try:
            from rich.table import Table
        except ImportError:
            raise ImportError("Coverage.table needs the package rich; run pip install 'jaxquant[train]'") from None
        columns = ("path", *MATMULS, "scales", "times", "reason")
        table = Table(box=None, caption=self.summary(), caption_justify="left", caption_style="", pad_edge=False)
        for name in columns:
            table.add_column(name, justify="right" if name == "times" else "left", overflow="fold")
        for entry in self.layers():
            table.add_row(*(_short(str(entry[name])) for name in columns))
        return table

    def text(self, width: int = 140) -> str:
        """Give ``table`` as plain text.

        Args:
          width: columns of the page.
        """
        table = self.table()
        table.caption = None  # it would be wrapped to the table's width
        from rich.console import Console

        file = io.StringIO()
        Console(file=file, width=width).print(table)
        return "\n".join([*(line.rstrip() for line in file.getvalue().rstrip().splitlines()), self.summary()])

    def to_json(self) -> str:
        """Write everything as JSON: ``summary``, ``missing``, ``layers`` (one a path) and ``rows``."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        shares = {"forward": self.share("fwd"), "backward": self.share(*_BACKWARD)}
        return json.dumps(
            {
                "summary": self.summary(),
                "low_precision_share": shares,
                "missing": self.missing,
                "layers": self.layers(),
                "rows": rows,
            },
            indent=1,
        )

    def check(self) -> None:
        """Refuse a function in which a layer does not run in the dtypes that its recipe says.

        Raises:
          ValueError: names path, matmul, what was wanted and what was found, of the first such contraction.
        """
        wrong = [f"{row.path or 'the model itself'} {row.matmul}: {row.fault}" for row in self.rows if row.fault]
        wrong += [f"{path}: the config quantizes it and no contraction of it was found" for path in self.missing]
        if wrong:
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise ValueError(
                f"strict: {wrong[0]}{more}; leave the layer out with a rule {{path: ..., recipe: null}}, choose "
                "another quant_backend, or set strict to false"
            )


def coverage(
    fn: Callable[..., Any],
    *args: Any,
    config: Any = None,
    layers: Iterable[LayerReport] | None = None,
    **kwargs: Any,
) -> Coverage:
    """List every contraction that a function runs, forward and backward, without running it.

    The function is traced and all that it calls is looked into: jitted functions, scans, branches, rematerialized
    blocks, shards, Pallas kernels. What is listed is what the program asks for; a compiler may still drop what nobody
    reads, or fall back to another dtype.

    Args:
      fn: any function of arrays, such as a training step; jitted or not, quantized by whatever library.
      args, kwargs: its arguments, arrays or ``jax.ShapeDtypeStruct``.
      config: anything that ``QuantConfig.from_any`` takes, for reasons and for ``Coverage.check``.
      layers: what ``describe_layers`` says of the model, which knows the layers better than ``config`` alone.

    Raises:
      TypeError: fn cannot be called.
    """
    if not callable(fn):
        raise TypeError(f"coverage takes a function and its arguments, got {type(fn).__name__}")
    jitted: Any = fn if isinstance(fn, _JITTED) else jax.jit(fn)
    traced = jitted.trace(*args, **kwargs)
    return of_trace(traced, config=config, layers=layers)


def of_trace(traced: Any, config: Any = None, layers: Iterable[LayerReport] | None = None) -> Coverage:
    """List the contractions of a traced function, ``jax.jit(fn).trace(*args)``; else as ``coverage``."""
    paths = jax.tree_util.tree_flatten_with_path(traced.args_info)[0]
    names = [tuple(_key(key) for key in path[1:]) for path, _ in paths]  # the first key tells args from kwargs
    decide = _decider(config, layers)
    placed = place(contractions(traced.jaxpr, names), decide.reports)
    rows = tuple(_row(each, decide) for each in placed)
    seen = {row.path for row in rows}
    return Coverage(rows, tuple(path for path, report in decide.reports.items() if report.recipe and path not in seen))


def _key(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


@dataclasses.dataclass(frozen=True)
class _Decision:
    wanted: dict[str, tuple[str, ...]]
    reason: str


@dataclasses.dataclass(frozen=True)
class _Decider:
    """What a config makes of a contraction: of known layers by their report, else by its rules."""

    reports: dict[str, LayerReport]
    resolver: Resolver | None
    has_config: bool

    @property
    def is_off(self) -> bool:
        return self.has_config and not self.reports and self.resolver is None

    def __call__(self, each: Placed) -> _Decision | None:
        """Decide, or give None for what is no linear layer."""
        if each.path in self.reports:
            report = self.reports[each.path]
            wanted = {name: _dtypes_of(getattr(report, name)) for name in MATMULS}
            return _Decision(wanted, _reason(report.recipe, report.reason))
        forward = each.forward
        if self.reports or self.resolver is None or forward is None or not _has_kernel(forward):
            return None
        decision = self.resolver(each.path, _out_features(forward))
        recipe = decision.recipe
        if recipe is None:
            return _Decision(dict.fromkeys(MATMULS, ()), decision.reason)
        wanted = {name: _recipe_dtypes(recipe, name) for name in MATMULS}
        return _Decision(wanted, _reason(recipe.name, decision.reason))


def _reason(recipe: str | None, reason: str) -> str:
    return reason if recipe is None or repr(recipe) in reason else f"{recipe}, by {reason}"


def _decider(config: Any, layers: Iterable[LayerReport] | None) -> _Decider:
    resolver = None if config is None else QuantConfig.from_any(config).resolver()
    reports = {report.path: report for report in layers or ()}
    return _Decider(reports, resolver, config is not None or layers is not None)


def _has_kernel(each: Placed) -> bool:
    return any(name and name[-1] in ("kernel", "value") for name in each.parameters)


def _out_features(forward: Placed) -> int:
    """Count the outputs of a layer: the free axes of its weight."""
    side, numbers = weight_side(forward), forward.contraction.dimension_numbers
    if side is None or numbers is None:
        return 0
    shape = (forward.contraction.lhs, forward.contraction.rhs)[side].shape
    used = {*numbers[0][side], *numbers[1][side]}
    return math.prod(size for axis, size in enumerate(shape) if axis not in used)


def _dtypes_of(text: str) -> tuple[str, ...]:
    """Read "int8 × int8" of a ``LayerReport``; () for float."""
    return () if text.startswith("float (") or text == "float" else tuple(text.split(" × "))


def _recipe_dtypes(recipe: Recipe, name: str) -> tuple[str, ...]:
    matmul = getattr(recipe, name)
    specs = [
        (forward if spec == FORWARD else spec)
        for spec, forward in ((matmul.lhs, recipe.fwd.lhs), (matmul.rhs, recipe.fwd.rhs))
    ]
    found = tuple(spec.dtype for spec in specs if isinstance(spec, TensorSpec))
    return found if len(found) == 2 else ()


def _row(each: Placed, decide: _Decider) -> Row:
    contraction = each.contraction
    sides = [(contraction.lhs, each.origins[0]), (contraction.rhs, each.origins[1])]
    if each.swapped:
        sides.reverse()
    (lhs, left), (rhs, right) = sides
    found = (left.element, right.element)
    is_low = all(found)
    decision = decide(each)
    wanted: tuple[str, ...] = ()
    fault = ""
    if decision is not None:
        wanted = decision.wanted["dlhs" if each.matmul == "bwd" else each.matmul]
        choices = [decision.wanted["dlhs"], decision.wanted["drhs"]] if each.matmul == "bwd" else [wanted]
        if not any(_fits(found, choice) for choice in choices):
            got = " × ".join((left.dtype, right.dtype))
            fault = f"{' × '.join(wanted) or 'float'} is wanted ({decision.reason}) and {got} is there"
        reason = decision.reason
        if not is_low and not wanted and any(decision.wanted.values()):
            reason = f"{each.matmul} stays float in {decision.reason}"
    elif is_low:
        reason = "" if not decide.has_config else "no layer that the config knows"
        if decide.has_config:
            fault = f"float is wanted (no linear layer of the model) and {left.dtype} × {right.dtype} is there"
    else:
        reason = _float_reason(each, decide)
    return Row(
        each.path,
        each.matmul,
        contraction.operation,
        lhs.shape,
        rhs.shape,
        left.dtype,
        right.dtype,
        contraction.out.dtype,
        left.scale,
        right.scale,
        contraction.times,
        contraction.flops,
        each.is_recomputed,
        is_low,
        wanted,
        fault or reason,
        fault,
    )


def _fits(found: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether operands have the dtypes that are wanted; a wider integer holds the values of a narrower one."""
    if not wanted:
        return not all(found)
    return all(map(_holds, found, wanted))


def _holds(found: str, wanted: str) -> bool:
    if found == wanted or not found:
        return found == wanted
    a, b = element(found), element(wanted)
    return a.kind == b.kind == "int" and a.bits > b.bits


def _float_reason(each: Placed, decide: _Decider) -> str:
    names = [name for name in (each.forward or each).parameters if name]
    if any(name[-1] == "embedding" for name in names):
        return "embeddings stay float"
    if not names:
        return "no parameter: activation × activation"
    if decide.has_config:
        return "quantization is off" if decide.is_off else "not a linear layer of the model"
    return "float operands: no quantization reached it"


_SHORT = {"float8_e4m3fnuz": "e4m3fnuz", "float8_e5m2fnuz": "e5m2fnuz"} | {
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "float4_e2m1fn": "e2m1",
}


def _short(text: str) -> str:
    for name, short in _SHORT.items():
        text = text.replace(name, short)
    return text


def _layer(path: str, rows: Sequence[Row]) -> dict[str, Any]:
    def dtypes(*matmuls: str) -> str:
        return ", ".join(dict.fromkeys(row.dtypes for row in rows if row.matmul in matmuls))

    return {
        "path": path,
        "fwd": dtypes("fwd"),
        "dlhs": dtypes("dlhs", "bwd"),
        "drhs": dtypes("drhs", "bwd"),
        "scales": "; ".join(dict.fromkeys(row.scales for row in rows if row.scales)),
        "times": sum(row.times for row in rows),
        "reason": "; ".join(dict.fromkeys(row.reason for row in rows if row.reason)),
    }
