"""The quantization of a checkpoint as data: ordered rules, each with a frozen spec."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterable

from jaxquant.config.patterns import full_matcher
from jaxquant.export.hf.section import Section
from jaxquant.export.hf.spec import LayerSpec

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers that a model may fuse, and those of the checkpoint that they are made of."""

HEAD_PATTERN = r"(?:.*\.)?(?:lm_head|embed_out|head|output)"
ROUTER_PATTERN = r"(?:.*\.)?(?:gate|router)"


@dataclasses.dataclass(frozen=True, slots=True)
class LayerRule:
    """One rule of a checkpoint.

    Attributes:
      pattern: regex, matched in full against a module's dotted name; of a rule with names, matches none other.
      spec: how these layers are quantized; None leaves them in float.
      origin: the config key that it comes from.
      names: modules by their exact names, in place of a pattern.
      covers_children: whether a name stands for the modules below it, too.
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
        """The same as a regex on a "/"-joined path, as ``config.rules`` matches it."""
        if self.names:
            names = "|".join(re.escape(name.replace(".", "/")) for name in sorted(self.names))
            return f"(?:{names})(?:/.*)?" if self.covers_children else names
        return self.pattern.replace(r"\.", "/").replace("[^.]", "[^/]")


@dataclasses.dataclass(frozen=True)
class CheckpointQuantization:
    """How a checkpoint is quantized.

    Attributes:
      method: quantization method by name, such as ``compressed-tensors``.
      rules: in order; the first that matches a module decides.
      kv_cache: dtype of the KV cache by name, or None.
    """

    method: str
    rules: tuple[LayerRule, ...]
    kv_cache: str | None = None

    def decide(self, module: str) -> LayerRule | None:
        """Return the rule that decides a linear layer, or None where none does, which leaves it in float.

        A fused layer that no rule names is decided by those that it is made of.

        Args:
          module: dotted name as the checkpoint spells it, without ``.weight``.

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
                f"{module} fuses {', '.join(shards)}, which the checkpoint quantizes differently; "
                "keep these layers apart"
            )
        return decisions[0]

    def spec(self, module: str) -> LayerSpec | None:
        """Return how a linear layer is quantized, or None for float; see ``decide``."""
        rule = self.decide(module)
        return rule.spec if rule is not None else None

    @functools.cached_property
    def specs(self) -> tuple[LayerSpec, ...]:
        """The different specs, in the order of the rules."""
        return tuple(dict.fromkeys(rule.spec for rule in self.rules if rule.spec is not None))

    def _first(self, module: str) -> LayerRule | None:
        return next((rule for rule in self.rules if rule.matches(module)), None)


def listed(
    config: Section, keys: Iterable[str], dialect: Callable[[str, str], str], spec: LayerSpec | None = None
) -> list[LayerRule]:
    """Return a rule for each entry of lists of modules.

    Args:
      config: section with the lists.
      keys: of the lists; one may be missing.
      dialect: what turns an entry and its place into a regex.
      spec: how these modules are quantized; None leaves them in float.
    """
    return [
        LayerRule(dialect(name, f"{config.where(key)}[{index}]"), spec, config.where(key))
        for key in keys
        for index, name in enumerate(config.texts(key))
    ]


def named(
    names: Collection[str], spec: LayerSpec | None, origin: str, covers_children: bool = False
) -> list[LayerRule]:
    """Return the rule of modules by their exact names, none where there are no names."""
    return [LayerRule("(?!)", spec, origin, frozenset(names), covers_children)] if names else []


def head_and_routers() -> tuple[LayerRule, ...]:
    """Return the rules of methods that never quantize the output head and routers, without saying so in the config."""
    return (
        LayerRule(HEAD_PATTERN, None, "output head, never quantized by this method"),
        LayerRule(ROUTER_PATTERN, None, "router, never quantized by this method"),
    )
