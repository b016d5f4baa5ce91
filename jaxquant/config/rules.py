"""Rules: which recipe each layer gets, and the reason in words."""

from __future__ import annotations

import dataclasses
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
"""Fields of a config that quantize layers which are left in float by default, under MaxText's names."""
_NUMBERED = re.compile(r"(?:^|(?<=/))[^/]*?([0-9]+)(?=/)")
"""A numbered part of a path, but its last, which names the layer itself."""
LOW_RANK_ENDINGS = ("lora_a", "lora_b")
"""Last path parts of low-rank factors: their matmuls are thin, and a tuned difference is what rounding would hurt."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """One user rule.

    Attributes:
      path: regex, matched in full against the "/"-joined module path.
      recipe: config string or composition for the layers that it matches, or a recipe of one's own (in Python: YAML
        has strings); None leaves them in float.
    """

    path: str
    recipe: str | Recipe | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipe", spell(self.recipe, f"recipe of rule {self.path!r}"))
        check_fields(self)
        compile_pattern(self.path, "rule path")

    @classmethod
    def prepare_mapping(cls, mapping: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take a mapping for a composition of config strings: numbers of one's own come from Python.

        Raises:
          ValueError, TypeError: as ``spell``.
        """
        if not isinstance(mapping.get("recipe"), Mapping):
            return mapping
        return {**mapping, "recipe": spell(mapping["recipe"], f"recipe of rule {mapping.get('path')!r}")}


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What one layer gets.

    Attributes:
      recipe: its numbers; None is float.
      reason: why, in words.
      rule: regex of the rule or ``intmp`` entry that decided, or None.
      implementation: what computes its matmuls; None picks.
    """

    recipe: Recipe | None
    reason: str
    rule: str | None = None
    implementation: str | None = None


def compile_pattern(pattern: str, place: str) -> Callable[[str], object]:
    """Compile a regex.

    Raises:
      ValueError: not a regex; names it, its place and what is wrong.
    """
    try:
        return full_matcher(pattern)
    except ValueError as error:
        raise ValueError(f"{place} {show(pattern)} is not a regular expression: {error}") from None


def default_exclusion(path: str, out_features: int, switches: Collection[str] = ()) -> str | None:
    """Return the reason that a layer is left in float where no rule says otherwise, or None.

    Embeddings, norms and attention scores have no kernel of a linear layer and never come here.

    Args:
      path: "/"-joined module path.
      out_features: number of outputs: only a narrow "gate" is a router, a SwiGLU gate is wide.
      switches: those of ``SWITCHES`` that are on.
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
class Entry:
    """A regex that decides by path: a user's rule, or an entry of an ``intmp`` file.

    Attributes:
      pattern: matched in full against the "/"-joined module path.
      recipe: of the layers that it matches; None is float.
      place: where the user wrote it, for errors.
      is_rule: whether it is a user's rule.

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
    """Decide the recipe of every layer: user rules, ``intmp`` entries, default exclusions, base recipe.

    Attributes:
      entries: the rules and entries; the first that matches decides.
      base: what the layers get that nothing else decides.
      implementation: of every layer that is quantized.
      float_ends: how many first and last blocks ``float_blocks`` leaves in float.
      switches: fields of ``SWITCHES`` that are on.
    """

    entries: tuple[Entry, ...]
    base: Decision
    implementation: str | None = None
    float_ends: tuple[int, int] = (0, 0)
    switches: tuple[str, ...] = ()

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """Every recipe that a layer can get, each once, the base first."""
        recipes = (self.base.recipe, *(entry.recipe for entry in self.entries))
        return tuple(dict.fromkeys(recipe for recipe in recipes if recipe is not None))

    @property
    def patterns(self) -> tuple[tuple[str, Recipe | None], ...]:
        """The regexes that decide by path, with the recipe of each, first match first."""
        return tuple((entry.pattern, entry.recipe) for entry in self.entries)

    def __call__(self, path: str, out_features: int) -> Decision:
        """Decide one layer.

        Args:
          path: "/"-joined module path, in the model's own spelling.
          out_features: number of outputs.
        """
        entry = self._first(path)
        if entry is not None:
            verb = "left in float by " if entry.recipe is None else ""
            reason = f"{verb}{entry.place} {entry.pattern!r}"
            return Decision(entry.recipe, reason, entry.pattern, self.implementation)
        excluded = default_exclusion(path, out_features, self.switches)
        return self.base if excluded is None else Decision(None, excluded)

    def float_blocks(self, paths: Iterable[str], must_have: bool = True) -> dict[str, str]:
        """Return the layers of the first and last blocks that stay in float where no rule decides, each with a reason.

        A block is the outermost numbered part of a path of which there are several, such as ``layers_3`` or
        ``blocks/7``; a layer's own name is none. Blocks of each name are counted by themselves.

        Args:
          paths: paths of all layers of a model.
          must_have: whether it is an error that there are no blocks.

        Raises:
          ValueError: no blocks, as where layers are scanned, or none that would be quantized.
        """
        first, last = self.float_ends
        asked = f"float_first_blocks {first} and float_last_blocks {last}"
        parts = {path: [(path[: m.start(1)], int(m[1])) for m in _NUMBERED.finditer(path)] for path in paths}
        numbers: dict[str, set[int]] = {}
        for name, number in (part for each in parts.values() for part in each):
            numbers.setdefault(name, set()).add(number)
        blocks = {path: [part for part in each if len(numbers[part[0]]) > 1][:1] for path, each in parts.items()}
        if not (first or last):
            return {}
        if must_have and not any(blocks.values()):
            raise ValueError(
                f"{asked} count blocks by numbered path parts above the layers' own names, such as layers_3/ or "
                f"blocks/7/, and the model's layers have none ({', '.join(list(parts)[:4])}); scanned layers share one "
                "path and one recipe: give each a path of its own (scan_layers: false); leave a numbered layer in "
                "float by a rule; or set both to 0"
            )
        floats = {}
        for path, (name, number) in ((path, part) for path, found in blocks.items() for part in found):
            known = sorted(numbers[name])
            if first + last >= len(known):
                raise ValueError(f"{asked} leave none of the {len(known)} blocks {name}* quantized; lower them")
            if self._first(path) is None and number in known[:first] + known[len(known) - last :]:
                floats[path] = f"block {name}{number}, left in float by {asked}"
        return floats

    def check_alone(self) -> None:
        """Refuse float blocks where some layers are decided without the paths of the others.

        Raises:
          NotImplementedError: there would be some.
        """
        if any(self.float_ends):
            raise NotImplementedError(
                "float_first_blocks and float_last_blocks need the paths of all layers, and here some are decided "
                "before the others; call the whole model first, name the blocks in rules, or give example inputs: "
                "jaxquant.maybe_quantize_model(model, config, *inputs)"
            )

    def _first(self, path: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.matches(path)), None)

    def check_used(self, paths: Iterable[str]) -> None:
        """Refuse a rule that does nothing in a model.

        Args:
          paths: paths of all its linear layers.

        Raises:
          ValueError: a rule or ``intmp`` entry whose regex matches no path, or a rule that earlier rules cover wholly.
        """
        paths = list(paths)
        first = {path: self._first(path) for path in paths}
        for entry in self.entries:
            matched = [path for path in paths if entry.matches(path)]
            if not matched:
                shown = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
                raise ValueError(
                    f"{entry.place} {entry.pattern!r} matches no layer; the model's layers are {shown or 'none'}"
                )
            # An intmp file is general first, so that a later entry may cover an earlier one; a rule that never wins
            # is a slip of the pen.
            if entry.is_rule and all(first[path] is not entry for path in matched):
                raise ValueError(
                    f"{entry.place} {entry.pattern!r} never decides: the first match wins and earlier rules take "
                    f"every layer that it matches, such as {matched[0]}"
                )
