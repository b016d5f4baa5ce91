"""Decisions: which recipe each layer of a traced function gets and where its state stands, bound to parameters once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxquant.config.rules import Decision, Resolver
from jaxquant.trace import native, paths
from jaxquant.trace.analysis import Analysis
from jaxquant.trace.plan import Contraction, Key, Plan


@dataclasses.dataclass(frozen=True)
class Decisions:
    """What was decided on the trace of a whole model.

    Attributes:
      layers: decision by the paths of the leaves of a weight.
      states: path of the state by what it belongs to, for recipes that keep state.
      unsupported: the layers that stay float because their operation does not run their recipe.
    """

    layers: Mapping[tuple[str, ...], Decision]
    states: Mapping[Key, str]
    unsupported: frozenset[tuple[str, ...]] = frozenset()

    def apply(self, plan: Plan) -> None:
        """Set the recipe and the reason of every layer.

        Raises:
          ValueError: a layer that was not in the trace on which was decided.
        """
        for site in _layers(plan):
            decision = self.layers.get(site.names)
            if decision is None:
                raise ValueError(
                    f"layer {site.path!r} (made of {', '.join(site.names)}) was not in the trace on which "
                    "jaxquant.quantize decided: call init with arguments that run the whole model before anything "
                    "else, or quantize the function of these parameters anew"
                )
            site.recipe, site.reason = decision.recipe, decision.reason
            site.is_out_of_reach = site.names in self.unsupported

    def read_states(self, plan: Plan, quant_state: Mapping[str, Any]) -> dict[Key, dict[str, Any]]:
        """Find the state of every chosen contraction in a tree of quant state.

        Raises:
          ValueError: state that is missing, or of another layout.
        """
        found: dict[Key, dict[str, Any]] = {}
        for site in plan.chosen:
            fields = native.state_fields(site)
            if site.key in found or not fields:
                found.setdefault(site.key, {})
                continue
            assert site.recipe is not None
            name = self.states.get(site.key)
            given = {} if name is None else paths.get(quant_state, name)
            missing = sorted(set(fields) - set(given))
            if name is None:
                raise ValueError(
                    f"layer {site.path!r} is used here {_layout(site.key)}, and its quant state was made for "
                    f"{' and '.join(_layout(key) for key in self.states if key[0] == site.names)}; quantize this "
                    "function by itself, with a state of its own"
                )
            if missing:
                raise ValueError(
                    f"recipe {site.recipe.name!r} at {name!r} keeps state, and quant_state has no {missing[0]!r} "
                    "there; make it with the quantized function's init(params, *args)"
                )
            for field, shape in fields.items():
                if tuple(given[field].shape) != shape:
                    raise ValueError(
                        f"quant_state {name!r} has {field!r} of shape {tuple(given[field].shape)}, and this call "
                        f"needs {shape}; make it with init on the same model and config"
                    )
            found[site.key] = {field: given[field] for field in fields}
        return found


def _layout(key: Key) -> str:
    _, stack, batch = key
    parts = [
        f"{what} {'x'.join(map(str, sizes))}"
        for what, sizes in (("in scans of", stack), ("in batches of", batch))
        if sizes
    ]
    return " and ".join(parts) or "as a whole"


def _layers(plan: Plan) -> list[Contraction]:
    return [each for each in plan.contractions() if each.is_layer]


def decide(analysis: Analysis, resolver: Resolver) -> Decisions:
    """Decide over every layer: rules and ``intmp`` entries, then structure, then the default exclusions by name.

    Raises:
      ValueError: a rule that matches no layer.
      NotImplementedError: a recipe with sparsity, or a rule for what is out of reach or does not run its recipe.
    """
    groups: dict[tuple[str, ...], list[Contraction]] = {}
    for site in _layers(analysis.plan):
        groups.setdefault(site.names, []).append(site)
    lost = [site for site in analysis.plan.contractions() if site.is_out_of_reach]
    resolver.check_used([sites[0].path for sites in groups.values()] + [site.path for site in lost])
    layers = {names: _decide_one(analysis, sites, resolver) for names, sites in groups.items()}
    unsupported = set()
    for names, decision in layers.items():
        path = groups[names][0].path
        if decision.recipe is None:
            continue
        if decision.recipe.sparsity is not None:
            raise NotImplementedError(
                f"weight_sparsity at {path!r} is not implemented in jaxquant.quantize; "
                "use jaxquant.maybe_quantize_model"
            )
        reasons = {site.operation: native.unsupported(site.operation, decision.recipe) for site in groups[names]}
        for operation, why in reasons.items():
            if not why:
                continue
            text = f"recipe {decision.recipe.name!r} has {why}, which {operation} does not run"
            if decision.rule is not None:
                raise NotImplementedError(f"rule {decision.rule!r} at {path!r}: {text}")
            layers[names] = Decision(None, text)
            unsupported.add(names)
    _check_rules_reach(lost, {decision.rule for decision in layers.values()}, resolver)
    bound = Decisions(layers, {}, frozenset(unsupported))
    bound.apply(analysis.plan)
    stateful = [site for site in analysis.plan.chosen if native.state_fields(site)]
    return Decisions(layers, _state_paths(stateful), frozenset(unsupported))


def _check_rules_reach(lost: Sequence[Contraction], deciding: set[str | None], resolver: Resolver) -> None:
    """Refuse a rule that quantizes nothing but what stays in float anyway."""
    for site in lost:
        decision = resolver(site.path, site.out_features)
        if decision.rule is not None and decision.rule not in deciding and decision.recipe is not None:
            raise NotImplementedError(
                f"rule {decision.rule!r} asks for {decision.recipe.name!r} at {site.path!r}, which stays in float: "
                f"{site.reason}"
            )


def _decide_one(analysis: Analysis, sites: Sequence[Contraction], resolver: Resolver) -> Decision:
    decision = resolver(sites[0].path, sites[0].out_features)
    if decision.recipe is None or decision.rule is not None:
        return decision
    if any(leaf.index in analysis.looked_up for site in sites for leaf in site.leaves):
        return Decision(None, "tied embedding (its rows are looked up elsewhere), left in float by default")
    is_ranked = any(site.is_ranked for site in sites)
    is_last = not any(site.is_followed for site in sites)
    if is_last and (is_ranked or any(site.is_normalized for site in sites)):
        return Decision(
            None, "output head (no layer follows, its result is normalized or ranked), left in float by default"
        )
    if is_ranked:
        return Decision(None, "router (its result is ranked), left in float by default")
    return decision


def _state_paths(sites: Sequence[Contraction]) -> dict[Key, str]:
    """Choose the name of each contraction's state: its layer's, with leaves and layout where several share a path."""
    by_path: dict[str, list[Key]] = {}
    for site in sites:
        keys = by_path.setdefault(site.path, [])
        if site.key not in keys:
            keys.append(site.key)
    result: dict[Key, str] = {}
    for path, keys in by_path.items():
        for key in keys:
            parts = [path]
            if len({names for names, _, _ in keys}) > 1:
                parts.append("+".join(name.removeprefix(f"{path}/").replace("/", "_") for name in key[0]))
            if len([names for names, _, _ in keys if names == key[0]]) > 1:
                parts.append("x".join(map(str, (*key[1], *key[2]))) or "whole")
            result[key] = "/".join(parts)
    return result
