"""Quantization of a checkpoint as data: ordered rules, each with the spec of its layers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterable

from jaxquant.config.patterns import full_matcher
from jaxquant.export.hf.section import Section
from jaxquant.export.hf.spec import LayerSpec

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"), "w13": ("w1", "w3")}
"""Names of layers that a model may fuse, with the names of their parts in the checkpoint."""

HEAD_PATTERN = r"(?:.*\.)?(?:lm_head|embed_out|head|output)"
ROUTER_PATTERN = r"(?:.*\.)?(?:gate|router)"


@dataclasses.dataclass(frozen=True, slots=True)
class LayerRule:
    """Rule that decides the quantization of matching layers.

    Attributes:
      pattern: regex for the full dotted name of a module; unused if the rule has ``names``.
      spec: quantization of the matching layers, or None for float.
      origin: config key that the rule comes from.
      names: exact names of modules, instead of a pattern.
      covers_children: whether a name also covers the modules below it.
    """

    pattern: str
    spec: LayerSpec | None
    origin: str
    names: frozenset[str] = frozenset()
    covers_children: bool = False

    def matches(self, module: str) -> bool:
        if not self.names:
            return bool(full_matcher(self.pattern)(module))
        parents = itertools.accumulate(module.split("."), "{}.{}".format) if self.covers_children else (module,)
        return any(name in self.names for name in parents)

    @property
    def path(self) -> str:
        """Equivalent regex for paths joined with "/", as in ``config.rules``."""
        if self.names:
            names = "|".join(re.escape(name.replace(".", "/")) for name in sorted(self.names))
            return f"(?:{names})(?:/.*)?" if self.covers_children else names
        return self.pattern.replace(r"\.", "/").replace("[^.]", "[^/]")


@dataclasses.dataclass(frozen=True)
class CheckpointQuantization:
    """Quantization of a checkpoint.

    Attributes:
      method: name of the quantization method, such as ``compressed-tensors``.
      rules: rules in order; the first that matches a module decides.
      kv_cache: name of the dtype of the KV cache, or None.
    """

    method: str
    rules: tuple[LayerRule, ...]
    kv_cache: str | None = None

    def decide(self, module: str) -> LayerRule | None:
        """Return the rule of a linear layer, or None if no rule matches and the layer stays in float.

        A fused layer uses the rule of its parts, unless a rule matches exactly the name of the fused layer.

        Args:
          module: dotted name in the checkpoint, without ``.weight``.

        Raises:
          ValueError: the parts of a fused layer are quantized differently.
        """
        stem, _, last = module.rpartition(".")
        shards = [f"{stem}.{part}" if stem else part for part in FUSED.get(last, ())]
        named = self._first(module)
        if not shards or (named is not None and (module in named.names or named.pattern == re.escape(module))):
            return named
        decisions = [self._first(shard) for shard in shards]
        if len({rule and rule.spec for rule in decisions}) > 1:
            raise ValueError(
                f"{module} fuses {', '.join(shards)}, which the checkpoint quantizes differently; keep these "
                "layers separate"
            )
        return decisions[0]

    def spec(self, module: str) -> LayerSpec | None:
        """Return the quantization of a linear layer, or None for float; see ``decide``."""
        rule = self.decide(module)
        return rule.spec if rule is not None else None

    @functools.cached_property
    def specs(self) -> tuple[LayerSpec, ...]:
        """Distinct specs, in the order of the rules."""
        return tuple(dict.fromkeys(rule.spec for rule in self.rules if rule.spec is not None))

    def _first(self, module: str) -> LayerRule | None:
        return next((rule for rule in self.rules if rule.matches(module)), None)


def read_lists(
    config: Section, keys: Iterable[str], to_regex: Callable[[str, str], str], spec: LayerSpec | None = None
) -> list[LayerRule]:
    """Return a rule for each entry in the lists of modules of a config.

    Args:
      config: section with the lists.
      keys: keys of the lists; each is optional.
      to_regex: function that converts an entry and its position to a regex.
      spec: quantization of the listed modules, or None for float.
    """
    return [
        LayerRule(to_regex(name, f"{config.where(key)}[{index}]"), spec, config.where(key))
        for key in keys
        for index, name in enumerate(config.texts(key))
    ]


def name_rules(
    names: Collection[str], spec: LayerSpec | None, origin: str, covers_children: bool = False
) -> list[LayerRule]:
    """Return a list with one rule for the exact module names, or an empty list without names."""
    return [LayerRule("(?!)", spec, origin, frozenset(names), covers_children)] if names else []


def head_rules() -> tuple[LayerRule, ...]:
    """Return the rules that keep output head and routers in float, for methods whose configs do not list them."""
    return (
        LayerRule(HEAD_PATTERN, None, "output head, never quantized by this method"),
        LayerRule(ROUTER_PATTERN, None, "router, never quantized by this method"),
    )
