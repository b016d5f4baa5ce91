"""Check of a recipe against the fields that a backend supports; every other field must have its default.

A backend lists the supported fields of each dataclass of a recipe, with a rule for each. Fields that are added later
are unsupported until a backend lists them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxquant.core.recipe import MatmulSpec, Recipe, TensorSpec

NATIVE_INSTEAD = "use quant_backend 'native'"


@dataclasses.dataclass(frozen=True, slots=True)
class FieldValue:
    """A recipe field with a value other than its default.

    Attributes:
      recipe: recipe of the field.
      place: operand ("fwd_lhs") or matmul ("fwd") of the field, or "" for the recipe itself.
      owners: dataclasses that contain the field, the recipe first.
      name: name of the field, dotted below an operand ("calibration.method").
      value: value of the field.
    """

    recipe: Recipe
    place: str
    owners: tuple[Any, ...]
    name: str
    value: Any

    @property
    def spec(self) -> TensorSpec:
        """The operand's spec, if the field belongs to an operand."""
        return next(owner for owner in self.owners if isinstance(owner, TensorSpec))

    @property
    def matmul(self) -> MatmulSpec:
        """The matmul, if the field belongs to a matmul or an operand."""
        return next(owner for owner in self.owners if isinstance(owner, MatmulSpec))

    @property
    def is_gradient(self) -> bool:
        """Whether the operand is an output gradient."""
        return self.place in ("dlhs_lhs", "drhs_rhs")


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """A missing capability of a backend.

    Attributes:
      missing: object of the sentence "AQT does not support …", or "" for the name and value of the field.
      instead: alternative for the user.
      place: operand for the error, or "" for the operand of the field.
    """

    missing: str = ""
    instead: str = NATIVE_INSTEAD
    place: str = ""


HonourRule = Callable[[FieldValue], Gap | None]
Honours = Mapping[type, Mapping[str, HonourRule]]


def any_value(field: FieldValue) -> None:
    """Rule that supports every value."""


def only(*values: Any) -> HonourRule:
    """Return a rule that supports these values and the default."""
    return lambda field: None if field.value in values else Gap()


def refuse(title: str, recipe: Recipe, place: str, missing: str, instead: str = NATIVE_INSTEAD) -> NotImplementedError:
    """Return the error of a backend that does not support a recipe.

    Args:
      title: name of the backend in errors.
      recipe: recipe with the unsupported field.
      place: operand ("fwd_lhs") or matmul ("fwd"), or "" for the recipe itself.
      missing: object of the sentence "AQT does not support …".
      instead: alternative for the user.
    """
    at = f" in {place}" if place else ""
    return NotImplementedError(f"{title} does not support {missing}, which recipe {recipe.name!r} has{at}; {instead}")


def check_honoured(title: str, honours: Honours, recipe: Recipe) -> None:
    """Raise if a backend does not support a recipe.

    Args:
      title: name of the backend in errors.
      honours: rules of the supported fields, by dataclass and field name.
      recipe: recipe to check.

    Raises:
      NotImplementedError: a field is not supported; the error names recipe, operand, field and an alternative.
    """
    for field in _nondefault_fields(recipe, honours, recipe, "", (), ""):
        rule = honours[type(field.owners[-1])].get(field.name.rpartition(".")[2])
        gap = Gap() if rule is None else rule(field)
        if gap is not None:
            missing = gap.missing or f"{field.name} {field.value!r}"
            raise refuse(title, recipe, gap.place or field.place, missing, gap.instead)


def _nondefault_fields(
    recipe: Recipe, honours: Honours, owner: Any, place: str, owners: tuple[Any, ...], prefix: str
) -> Iterator[FieldValue]:
    """Yield the fields with a value other than their default, in every dataclass that the backend lists."""
    owners = (*owners, owner)
    for field in dataclasses.fields(owner):
        value = getattr(owner, field.name)
        if not _has_default(field) or value != _default(field):
            if type(value) in honours:
                inner = f"{place}_{field.name}".lstrip("_") if isinstance(owner, Recipe | MatmulSpec) else place
                dotted = f"{prefix}{field.name}." if isinstance(owner, TensorSpec) or prefix else ""
                yield from _nondefault_fields(recipe, honours, value, inner, owners, dotted)
            else:
                yield FieldValue(recipe, place, owners, prefix + field.name, value)


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
