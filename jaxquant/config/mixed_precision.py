"""Reader of ``intmp`` files, which map regexes on layer paths to bits, clipping and tile size of the forward matmul."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any, NamedTuple

from jaxquant.config.loader import load_yaml
from jaxquant.core.calibration import Calibration
from jaxquant.core.recipe import MatmulSpec, Recipe, TensorSpec
from jaxquant.core.tensor_spec import keep_grid
from jaxquant.core.typed import Typed, build, show

DEFAULT = "__default__"
_DTYPES = {4: "int4", 8: "int8"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedPrecisionEntry(Typed):
    """One value of an ``intmp`` file, with the built-in defaults of the format.

    Attributes:
      w_bits, a_bits: bits of the weight and of the activation: 4, 8, or None for float.
      w_scale, a_scale: fraction of the absmax that the range covers; a fraction below 1 clips values.
      tile_size: number of neighbours along every contraction axis that share a scale; -1 for the complete axis.
    """

    w_bits: int | None = None
    a_bits: int | None = None
    w_scale: float = 1.0
    a_scale: float = 1.0
    tile_size: int = -1


class MixedPrecision(NamedTuple):
    """A resolved ``intmp`` file.

    Attributes:
      entries: pairs of a regex and a recipe (None for float), in reversed file order. **The first match wins.**
      default: recipe of layers that no regex matches; None is float.
    """

    entries: tuple[tuple[str, Recipe | None], ...]
    default: Recipe | None


def load_mixed_precision(path: str | os.PathLike[str]) -> MixedPrecision:
    """Read an ``intmp`` file (JSON or YAML, by its suffix) as a list of regexes whose first match wins.

    An entry inherits missing fields from ``__default__``, which inherits from the built-in defaults. In the file the
    **last** match wins, as in MaxText, so this function returns the entries in reversed order.

    Args:
      path: path of a .json, .yml or .yaml file, relative to the working directory.

    Raises:
      ValueError: the file is missing or malformed, a key is unknown, or bits, scale or tile size are out of range; the
        message names the file and the entry.
      TypeError: a value has the wrong type.

    Source: MaxText's mixed-precision configs.
    """
    path = os.fspath(path)
    if not path:
        raise ValueError("quantization 'intmp' needs a file; set quant_cfg_path to the path of a JSON or YAML file")
    if os.path.splitext(path)[1].lower() not in (".json", ".yml", ".yaml"):
        raise ValueError(f"quant_cfg_path {show(path)} must end in .json, .yml or .yaml")
    content = load_yaml(path, "quant_cfg_path")
    default = _read_entry(content.get(DEFAULT, {}), MixedPrecisionEntry(), f"{path}: {DEFAULT!r}")
    entries = [
        (pattern, _make_recipe(_read_entry(value, default, f"{path}: {pattern!r}")))
        for pattern, value in content.items()
        if pattern != DEFAULT
    ]
    return MixedPrecision(tuple(reversed(entries)), _make_recipe(default))


def _read_entry(value: Any, default: MixedPrecisionEntry, place: str) -> MixedPrecisionEntry:
    build(MixedPrecisionEntry, value, place)  # reports unknown keys and wrong types before the defaults are merged in
    entry = build(MixedPrecisionEntry, {**dataclasses.asdict(default), **value}, place)
    for side in ("w", "a"):
        field, bits, scale = f"{side}_scale", getattr(entry, f"{side}_bits"), getattr(entry, f"{side}_scale")
        if bits not in (None, *_DTYPES):
            raise ValueError(f"{place}.{side}_bits must be 4, 8 or null, got {bits}")
        if not 0 < scale < math.inf:
            raise ValueError(f"{place}.{field} must be above 0 and finite, got {scale:g}; use 1 to clip no values")
        if field in value and scale < 1 and bits is None:
            raise ValueError(f"{place}.{field} {scale:g} has no effect, because {side}_bits is null; set {side}_bits")
    if entry.tile_size != -1 and entry.tile_size < 1:
        raise ValueError(f"{place}.tile_size must be -1 (no tiles) or at least 1, got {entry.tile_size}")
    return entry


def _make_spec(bits: int | None, scale: float, tile_size: int) -> TensorSpec | None:
    if bits is None:
        return None
    tiled = tile_size != -1
    return TensorSpec(
        _DTYPES[bits],
        "per_tile" if tiled else "per_channel",
        Calibration("absmax", min(scale, 1.0)),
        tile_size=tile_size if tiled else None,
        reciprocal=True,  # rounds like AQT
        tiling="each_axis" if tiled else "nested",
    )


def _make_recipe(entry: MixedPrecisionEntry) -> Recipe | None:
    lhs = _make_spec(entry.a_bits, entry.a_scale, entry.tile_size)
    rhs = _make_spec(entry.w_bits, entry.w_scale, entry.tile_size)
    if lhs is None and rhs is None:
        return None
    return Recipe("intmp", fwd=MatmulSpec(lhs, rhs and keep_grid(rhs), "int32" if lhs and rhs else None))
