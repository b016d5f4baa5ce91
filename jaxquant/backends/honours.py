"""The generic check: whatever a recipe asks that a backend does not say it honours is refused by its name.

A backend lists, for each dataclass that makes up a recipe, the fields that it honours and a rule for each. Every other
field, those that are added later among them, must have its default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxquant.core.recipe import MatmulSpec, Recipe, TensorSpec

NATIVE_INSTEAD = "use quant_backend 'native'"


@dataclasses.dataclass(frozen=True, slots=True)
class FieldValue:
    """One field of a recipe that has not its default.

    Attributes:
      recipe: the recipe.
      place: "fwd_lhs" for an operand, "fwd" for a matmul, "" for the recipe itself.
      owners: the dataclasses that hold the field, the recipe first.
      field: its name, dotted below an operand ("calibration.method").
      value: what it asks.
    """

    recipe: Recipe
    place: str
    owners: tuple[Any, ...]
    field: str
    value: Any

    @property
    def spec(self) -> TensorSpec:
        """The operand's spec, for a field of an operand."""
        return next(owner for owner in self.owners if isinstance(owner, TensorSpec))

    @property
    def matmul(self) -> MatmulSpec:
        """The matmul, for a field of a matmul or an operand."""
        return next(owner for owner in self.owners if isinstance(owner, MatmulSpec))

    @property
    def is_gradient(self) -> bool:
        """Whether the operand is an output gradient."""
        return self.place in ("dlhs_lhs", "drhs_rhs")


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """A missing capability of a backend.

    Attributes:
      what: completes "AQT has no …"; empty names the field and its value.
      instead: what would do.
      place: operand that the error names, where that is not where the field is.
    """

    what: str = ""
    instead: str = NATIVE_INSTEAD
    place: str = ""


HonourRule = Callable[[FieldValue], Gap | None]
Honours = Mapping[type, Mapping[str, HonourRule]]


def any_value(asked: FieldValue) -> None:
    """Honour every value."""


def only(*values: Any) -> HonourRule:
    """Return a rule that honours these values beside the default."""
    return lambda asked: None if asked.value in values else Gap()


def refuse(title: str, recipe: Recipe, place: str, what: str, instead: str = NATIVE_INSTEAD) -> NotImplementedError:
    """Make the error of a backend that cannot do what a recipe asks.

    Args:
      title: the backend's name in errors.
      recipe: the recipe.
      place: the operand ("fwd_lhs") or matmul ("fwd"); "" for the recipe itself.
      what: completes "AQT has no …".
      instead: what would do.
    """
    kind = "" if not place else f" operand {place}" if "_" in place else f" matmul {place}"
    return NotImplementedError(f"recipe {recipe.name!r}{kind}: {title} has no {what}; {instead}")


def check_honoured(title: str, honours: Honours, recipe: Recipe) -> None:
    """Refuse a recipe that asks what a backend does not honour.

    Args:
      title: the backend's name in errors.
      honours: the fields that it honours, by the dataclass that has them.
      recipe: the recipe.

    Raises:
      NotImplementedError: names recipe, operand and field, and what would do.
    """
    for asked in _asked(recipe, honours, recipe, "", (), ""):
        rule = honours[type(asked.owners[-1])].get(asked.field.rpartition(".")[2])
        lack = Gap() if rule is None else rule(asked)
        if lack is not None:
            what = lack.what or f"{asked.field} {asked.value!r}"
            raise refuse(title, recipe, lack.place or asked.place, what, lack.instead)


def _asked(
    recipe: Recipe, honours: Honours, owner: Any, place: str, owners: tuple[Any, ...], prefix: str
) -> Iterator[FieldValue]:
    """Walk the fields that have not their default, into every dataclass that the backend knows."""
    owners = (*owners, owner)
    for field in dataclasses.fields(owner):
        value = getattr(owner, field.name)
        if not _has_default(field) or value != _default(field):
            if type(value) in honours:
                inner = f"{place}_{field.name}".lstrip("_") if isinstance(owner, Recipe | MatmulSpec) else place
                dotted = f"{prefix}{field.name}." if isinstance(owner, TensorSpec) or prefix else ""
                yield from _asked(recipe, honours, value, inner, owners, dotted)
            else:
                yield FieldValue(recipe, place, owners, prefix + field.name, value)


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
