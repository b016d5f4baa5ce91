"""Report: the contractions or layers of a traced function, each with its recipe or the reason it is in float."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxquant.backends import Backend
from jaxquant.config.rules import Resolver
from jaxquant.core.matmul_dtypes import MatmulDtypes, matmul_dtypes
from jaxquant.core.recipe import Recipe
from jaxquant.terminal import Tabular
from jaxquant.trace.analysis import Analysis
from jaxquant.trace.plan import Contraction
from jaxquant.trace.reach import NOT_FLOAT

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contraction, or all contractions of one layer.

    Attributes:
      path: path of the layer; for a contraction without a parameter, its name scopes.
      operation: primitive of the traced program.
      lhs, rhs: shapes of the operands, in one step of the enclosing scans.
      weight: "lhs" or "rhs", or None if no operand is computed only from parameters.
      stack: lengths of the scans over the weight, outermost first.
      batch: sizes of the weight's batch axes, whose elements are quantized separately.
      kernel_shape: shape of the weight in one step of the scans, or () without a weight.
      out_features: number of outputs.
      precision: precision that the program requests.
      recipe: config string, or None for float.
      backend: "aqt", "qwix" or "native", or None for float.
      dtypes: operand dtypes of the three matmuls, by "fwd", "dlhs" and "drhs". The properties of these names return
        their text, such as "int8 × int8"; "float (int8 dequantized)" is a float matmul on values that were rounded to
        int8.
      reason: rule or default that decided, or the reason for which it stays in float.
      is_float_matmul: False for products of integers and products without a contracted axis, which no rule concerns.
      is_out_of_reach: whether it has a parameter and stays in float under all rules.
      input_shapes: for a layer, the shape of its activation in each of its contractions.
      parameter_shapes: for a layer, the shapes of all parameters in the module of its weight, by name.
    """

    path: str
    operation: str
    lhs: Shape
    rhs: Shape
    weight: str | None
    stack: Shape
    batch: Shape
    kernel_shape: Shape
    out_features: int
    precision: Any
    recipe: str | None
    backend: str | None
    dtypes: dict[str, MatmulDtypes]
    reason: str
    is_float_matmul: bool
    is_out_of_reach: bool
    input_shapes: tuple[Shape, ...] = ()
    parameter_shapes: tuple[tuple[str, Shape], ...] = ()

    @property
    def fwd(self) -> str:
        return str(self.dtypes["fwd"])

    @property
    def dlhs(self) -> str:
        return str(self.dtypes["dlhs"])

    @property
    def drhs(self) -> str:
        return str(self.dtypes["drhs"])


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Report(Tabular, Sequence[Row]):
    """Contractions of a function, or layers of a model, in the order of the program; prints as a table.

    Attributes:
      rows: contractions or layers.
      unit: name of what a row describes, in the plural.
    """

    rows: tuple[Row, ...]
    unit: str = "contractions"

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def quantized(self) -> list[Row]:
        """Rows with a recipe."""
        return [row for row in self.rows if row.recipe is not None]

    def _lines(self) -> list[Sequence[str]]:
        names = ("path", "operation", "lhs", "rhs", "recipe", "reason")
        cells = (
            (r.path or "-", r.operation, _shape(r.lhs), _shape(r.rhs), r.recipe or "float", r.reason) for r in self
        )
        return [names, *cells]

    def summary(self) -> str:
        """Describe in one line how many rows are quantized."""
        return f"{len(self.quantized)} of {len(self.rows)} {self.unit} are quantized"


def _shape(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "-"


def row_of(site: Contraction, backend: Backend) -> Row:
    """Return the row of a contraction with a decision; ``backend`` runs its recipe."""
    lhs, rhs = (*site.shapes, (), ())[:2]
    return Row(
        path=site.path,
        operation=site.operation,
        lhs=lhs,
        rhs=rhs,
        weight=None if site.side is None else ("lhs", "rhs")[site.side],
        stack=tuple(length for _, length in site.stack),
        batch=site.batch,
        kernel_shape=() if site.side is None else site.shapes[site.side],
        out_features=site.out_features,
        precision=site.precision,
        is_float_matmul=site.is_float_matmul,
        is_out_of_reach=site.is_out_of_reach or site.is_unsupported,
        **decision_fields(site.recipe, site.reason, backend, site.operation, site.dtype, bool(site.split)),
    )


def decision_fields(
    recipe: Recipe | None, reason: str, backend: Backend, operation: str, dtype: str, is_split: bool = False
) -> dict[str, Any]:
    """Return the fields of a row that hold the decision."""
    runner = None if recipe is None else backend.runner(operation, recipe, dtype, is_split).name
    return {
        "recipe": None if recipe is None else recipe.name,
        "backend": runner,
        "dtypes": matmul_dtypes(recipe),
        "reason": reason,
    }


@dataclasses.dataclass(frozen=True, eq=False)
class Decided:
    """Name stack entry of a quantized program that holds the layers of its model. It adds no text to the stack.

    Attributes:
      rows: function that returns ``layer_rows``.
      name: text of the scope.
    """

    rows: Callable[[], list[Row]]
    name: str = ""

    def wrap(self, names: list[str]) -> None:
        """Leave the names unchanged; a scope would add its own."""

    @functools.cached_property
    def layers(self) -> dict[str, Row]:
        """Layers by path."""
        return {row.path: row for row in self.rows()}


def layer_rows(analysis: Analysis, resolver: Resolver | None, backend: Backend, has_tables: bool = False) -> list[Row]:
    """Return a row for each layer path of a function: every contraction with a parameter.

    An embedding table is included if a rule quantizes it, or with ``has_tables``. For a kernel that cannot be
    quantized, the row has the decision of the rules, so that ``coverage`` can compare it with the actual program.

    Args:
      analysis: analysis of the function, with decisions.
      resolver: resolver of the config, or None if quantization is off.
      backend: backend that runs the recipes.
      has_tables: whether float embedding tables are included.
    """
    layers: dict[str, list[Contraction]] = {}
    for site in analysis.plan.contractions():
        is_table = any(leaf.index in analysis.looked_up for leaf in site.leaves)
        if site.names and (has_tables or not is_table or site.recipe is not None):
            layers.setdefault(site.path, []).append(site)
    mixed = {analysis.path([index]) for index in analysis.mixed}
    rows = []
    for path, sites in layers.items():
        site = next((each for each in sites if each.recipe is not None), sites[-1])
        row = row_of(site, backend)
        if resolver is None:
            row = dataclasses.replace(row, reason="quantization is off")
        elif _is_lost_kernel(site) and path not in mixed:
            decision = resolver(path, site.out_features)
            why = f"{decision.reason}; not quantized: {site.reason}"
            decided = decision_fields(decision.recipe, why, backend, site.operation, site.dtype)
            row = dataclasses.replace(row, **decided)
        inputs = tuple(each.shapes[1 - each.side] for each in sites if each.side is not None)
        siblings = analysis.module_shapes(min(site.leaves, key=lambda leaf: leaf.index)) if site.leaves else {}
        rows.append(dataclasses.replace(row, input_shapes=inputs, parameter_shapes=tuple(siblings.items())))
    return rows


def _is_lost_kernel(site: Contraction) -> bool:
    """Whether a contraction cannot be quantized although its parameter is named like a kernel of flax's layers."""
    is_kernel = all(name.rpartition("/")[2] == "kernel" for name in site.names)
    return site.is_lost and site.operation == "dot_general" and is_kernel and site.reason != NOT_FLOAT
