"""Rules that select the recipe of each layer and state the reason for the selection."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from jaxquant.config.patterns import full_matcher
from jaxquant.config.recipes import spell
from jaxquant.core.recipe import Recipe
from jaxquant.core.typed import check_fields, show

HEADS = ("head", "lm_head", "logits", "logits_dense", "embed_out", "output")
"""Last path parts that name an output head."""
ROUTER_ENDINGS = ("gate", "router")
ROUTER_MAX_OUTPUTS = 256
SWITCHES = ("quantize_router_proj", "quantize_logits_proj", "quantize_mtp")
"""Config fields with MaxText's names; each quantizes a kind of layer that stays in float by default."""
_NUMBERED = re.compile(r"(?:^|(?<=/))[^/]*?([0-9]+)(?=/)")
"""Regex of the numbered parts of a path, except the last part, which is the layer's own name."""
LOW_RANK_ENDINGS = ("lora_a", "lora_b")
"""Last path parts of low-rank factors, which stay in float: the matmuls are small, and rounding would harm tuning."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """Rule of a user's config, which sets the recipe of all layers that match a regex.

    Attributes:
      path: regex that must match the complete "/"-joined module path.
      recipe: config string or composition for the matching layers, or a ``Recipe`` (only in Python); None leaves them
        in float.
    """

    path: str
    recipe: str | Recipe | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipe", spell(self.recipe, f"recipe of rule {self.path!r}"))
        check_fields(self)
        compile_pattern(self.path, "rule path")

    @classmethod
    def prepare_mapping(cls, mapping: Mapping[str, Any]) -> Mapping[str, Any]:
        """Replace a composition (mapping) under ``recipe`` with its config string.

        Raises:
          ValueError, TypeError: raised by ``spell``.
        """
        if not isinstance(mapping.get("recipe"), Mapping):
            return mapping
        return {**mapping, "recipe": spell(mapping["recipe"], f"recipe of rule {mapping.get('path')!r}")}


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """The recipe of one layer and the reason for it.

    Attributes:
      recipe: recipe of the layer; None is float.
      reason: reason in words.
      rule: regex of the rule or ``intmp`` entry that decided, or None.
      implementation: implementation of the matmuls, or None for automatic selection.
      hint: rule that the user may want to add, as a suffix of the reason in reports, or "".
    """

    recipe: Recipe | None
    reason: str
    rule: str | None = None
    implementation: str | None = None
    hint: str = ""


def compile_pattern(pattern: str, place: str) -> Callable[[str], object]:
    """Compile a regex.

    Raises:
      ValueError: the pattern is not a regex; the message has the pattern and its place.
    """
    try:
        return full_matcher(pattern)
    except ValueError as error:
        raise ValueError(f"{place} {show(pattern)} is not a regular expression: {error}") from None


def default_exclusion(path: str, out_features: int, switches: Collection[str] = ()) -> str | None:
    """Return the reason that a layer stays in float by default, or None.

    Embeddings, norms and attention scores are not passed to this function, because they have no linear kernel.

    Args:
      path: "/"-joined module path.
      out_features: number of outputs; only a narrow "gate" is a router, because a SwiGLU gate is wide.
      switches: fields of ``SWITCHES`` that are enabled.
    """
    last = path.rsplit("/", 1)[-1]
    if path.split("/", 1)[0] == "mtp_block" and "quantize_mtp" not in switches:
        return "multi-token prediction ('mtp_block'), left in float by default"
    if (last in HEADS or path.endswith("lm_head/linear")) and "quantize_logits_proj" not in switches:
        return f"output head ({last!r}), left in float by default"
    router = next((part for part in path.split("/") if part.lower().endswith(ROUTER_ENDINGS)), None)
    if router is not None and out_features <= ROUTER_MAX_OUTPUTS and "quantize_router_proj" not in switches:
        return f"router ({router!r} with {out_features} outputs), left in float by default"
    if last.endswith(LOW_RANK_ENDINGS):
        return f"low-rank factor ({last!r}), left in float by default"
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class PathEntry:
    """Regex on layer paths with the recipe of the matching layers, from a user's rule or an ``intmp`` file.

    Attributes:
      pattern: regex that must match the complete "/"-joined module path.
      recipe: recipe of the matching layers; None is float.
      place: config field that contains the pattern, for errors.
      is_rule: whether the entry is a user's rule.

    Raises:
      ValueError: the pattern is not a regex.
    """

    pattern: str
    recipe: Recipe | None
    place: str
    is_rule: bool

    def __post_init__(self) -> None:
        compile_pattern(self.pattern, self.place)

    def matches(self, path: str) -> bool:
        return bool(compile_pattern(self.pattern, self.place)(path))


@dataclasses.dataclass(frozen=True)
class Resolver:
    """Function that selects the recipe of a layer: by rules, ``intmp`` entries, default exclusions, or the base recipe.

    Attributes:
      entries: rules and entries; the first match decides.
      base: decision for all other layers.
      implementation: implementation of every quantized layer.
      float_ends: number of blocks at the beginning and at the end that ``float_blocks`` leaves in float.
      switches: fields of ``SWITCHES`` that are enabled.
    """

    entries: tuple[PathEntry, ...]
    base: Decision
    implementation: str | None = None
    float_ends: tuple[int, int] = (0, 0)
    switches: tuple[str, ...] = ()

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """Distinct recipes that a layer can get, starting with the base recipe."""
        recipes = (self.base.recipe, *(entry.recipe for entry in self.entries))
        return tuple(dict.fromkeys(recipe for recipe in recipes if recipe is not None))

    @property
    def patterns(self) -> tuple[tuple[str, Recipe | None], ...]:
        """Regexes of the entries with their recipes; the first match wins."""
        return tuple((entry.pattern, entry.recipe) for entry in self.entries)

    def __call__(self, path: str, out_features: int) -> Decision:
        """Return the decision for one layer.

        Args:
          path: "/"-joined module path, spelled as in the model.
          out_features: number of outputs.
        """
        entry = self._find_entry(path)
        if entry is not None:
            verb = "left in float by " if entry.recipe is None else ""
            reason = f"{verb}{entry.place} {entry.pattern!r}"
            return Decision(entry.recipe, reason, entry.pattern, self.implementation)
        excluded = default_exclusion(path, out_features, self.switches)
        return self.base if excluded is None else Decision(None, excluded)

    def float_blocks(self, paths: Iterable[str], must_have: bool = True) -> dict[str, str]:
        """Return the layers of the first and last blocks that stay in float, with reasons; rules can override this.

        A block is the outermost numbered part of a path, such as ``layers_3`` or ``blocks/7``, if the model has several
        parts of this name with different numbers. The last part of a path is the layer's own name and is not a block.
        Blocks of each name are counted separately.

        Args:
          paths: paths of all layers of a model.
          must_have: whether a model without blocks is an error.

        Raises:
          ValueError: the model has no blocks (for example if its layers are scanned), or no block would be quantized.
        """
        first, last = self.float_ends
        setting = f"float_first_blocks {first} and float_last_blocks {last}"
        parts = {path: [(path[: m.start(1)], int(m[1])) for m in _NUMBERED.finditer(path)] for path in paths}
        numbers: dict[str, set[int]] = {}
        for name, number in (part for each in parts.values() for part in each):
            numbers.setdefault(name, set()).add(number)
        blocks = {path: [part for part in each if len(numbers[part[0]]) > 1][:1] for path, each in parts.items()}
        if not (first or last):
            return {}
        if must_have and not any(blocks.values()):
            raise ValueError(
                f"{setting} need several numbered blocks, such as layers_3/ or blocks/7/, in the paths of the layers, "
                f"but this model has {', '.join(list(parts)[:4])}; if the layers are scanned, set scan_layers: false; "
                "otherwise set both fields to 0 and use rules to leave layers in float"
            )
        floats = {}
        for path, (name, number) in ((path, part) for path, in_path in blocks.items() for part in in_path):
            known = sorted(numbers[name])
            if first + last >= len(known):
                raise ValueError(f"{setting} leave all {len(known)} blocks {name}* in float; lower one number")
            if self._find_entry(path) is None and number in known[:first] + known[len(known) - last :]:
                floats[path] = f"block {name}{number}, left in float by {setting}"
        return floats

    def check_no_float_blocks(self) -> None:
        """Raise if float blocks are configured, for callers that do not know the paths of all layers.

        Raises:
          NotImplementedError: float blocks are configured.
        """
        if any(self.float_ends):
            raise NotImplementedError(
                "float_first_blocks and float_last_blocks need the paths of all layers, but only some paths are known "
                "before the first call of the complete model; pass example inputs: "
                "jaxquant.maybe_quantize_model(model, config, *inputs), or use rules instead of the two fields"
            )

    def _find_entry(self, path: str) -> PathEntry | None:
        return next((entry for entry in self.entries if entry.matches(path)), None)

    def check_used(self, paths: Iterable[str]) -> None:
        """Raise if a rule has no effect in a model.

        Args:
          paths: paths of all linear layers of the model.

        Raises:
          ValueError: the regex of a rule or ``intmp`` entry matches no path, or earlier rules match all its layers.
        """
        paths = list(paths)
        first = {path: self._find_entry(path) for path in paths}
        for entry in self.entries:
            matched = [path for path in paths if entry.matches(path)]
            if not matched:
                paths.sort(key=lambda path: -difflib.SequenceMatcher(None, entry.pattern, path).ratio())
                shown = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
                raise ValueError(
                    f"{entry.place} {entry.pattern!r} matches no layer; the model's layers are {shown or 'none'}"
                )
            # Only rules are checked: an intmp file lists general entries first, so a later entry may match all layers
            # of an earlier entry.
            if entry.is_rule and all(first[path] is not entry for path in matched):
                raise ValueError(
                    f"{entry.place} {entry.pattern!r} has no effect, because earlier rules match the same layers, such "
                    f"as {matched[0]}; move this rule up, or remove the rule"
                )
