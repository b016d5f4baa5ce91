"""Decisions: the recipe of each layer of a traced function and the path of its state, chosen once per parameter."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxquant.backends import Backend
from jaxquant.config.rules import Decision, Resolver
from jaxquant.core.blocks import block_shape
from jaxquant.core.paths import layer_name
from jaxquant.core.quant_state import BINS, LayerState
from jaxquant.core.recipe import Recipe, TensorSpec
from jaxquant.ops import sparsity
from jaxquant.state import watch
from jaxquant.trace import contract
from jaxquant.trace.analysis import Analysis
from jaxquant.trace.flow import Derived
from jaxquant.trace.plan import Contraction, Key, Plan


@dataclasses.dataclass(frozen=True)
class FaceHooks:
    """Wording and naming that differ between Linen, NNX and plain functions.

    Attributes:
      is_model: whether a model is quantized, not a function. In a model, a parameter ``kernel`` at the root is a layer
        with the path "", Python numbers are static, and a layer that first appears in a later trace gets its recipe in
        that trace. For a function, such a layer is an error, and numbers are traced as under ``jax.jit``.
      operation: function that returns the name of a contraction's state below the layer's path, or "".
      owner: function that returns the path of the module that holds the state, or None if that is the layer's path.
      missing: function of (recipe name, path, field) that returns the error message for missing state.
      misfit: function of (layer path, field, shape, required shape) that returns the error message for state of a wrong
        shape.
      has_scopes: whether the calls of layers already have name scopes; otherwise each gets a scope of its path.
      watch: function of (path, operands, state) that checks how the state of a contraction is used.
    """

    is_model: bool = False
    operation: Callable[[Contraction], str] = lambda _: ""
    owner: Callable[[Contraction], str] | None = None
    missing: Callable[[str, str, str], str] = lambda recipe, path, field: (
        f"recipe {recipe!r} of layer {path!r} needs quant state, but quant_state has no {field!r} for the layer; "
        "create quant_state with the quantized function's init(params, *args)"
    )
    misfit: Callable[[str, str, tuple[int, ...], tuple[int, ...]], str] = lambda path, field, has, wanted: (
        f"quant_state has {field!r} of shape {has} for layer {path!r}, but this call needs shape {wanted}; create "
        "quant_state with init for this model and config"
    )
    has_scopes: bool = False
    watch: watch.Watch = watch.FUNCTION


@dataclasses.dataclass(frozen=True)
class Decisions:
    """Decisions about all layers of a model, made on a trace of the whole model.

    Attributes:
      layers: decisions by the paths of the leaves of a weight.
      states: path of the state by its key, for recipes that keep state.
      unsupported: leaf paths of the layers that stay in float because the backend does not run their recipe.
      paths: decisions by layer path.
    """

    layers: Mapping[tuple[str, ...], Decision]
    states: Mapping[Key, str]
    unsupported: frozenset[tuple[str, ...]] = frozenset()
    paths: Mapping[str, Decision] = dataclasses.field(default_factory=dict)

    def apply(self, plan: Plan) -> None:
        """Set the recipe and the reason of every layer.

        Raises:
          ValueError: a layer did not appear in the trace on which recipes were chosen.
        """
        for site in _layers(plan):
            decision = self.layers.get(site.names)
            if decision is None:
                raise ValueError(
                    f"layer {site.path!r} (parameter {', '.join(site.names)}) did not run in the first call, which "
                    "selects the recipes of all layers; call init first, with arguments that run all layers, or call "
                    "jaxquant.quantize again"
                )
            site.recipe, site.reason = decision.recipe, decision.reason + decision.hint
            site.implementation = decision.implementation
            site.is_unsupported = site.names in self.unsupported

    def read_states(
        self,
        plan: Plan,
        layers: Mapping[str, LayerState],
        hooks: FaceHooks,
        served: Collection[Key] = (),
        fields_of: Callable[[Contraction], dict[str, contract.Shapes]] = contract.state_fields,
    ) -> dict[Key, LayerState]:
        """Return the state of every chosen contraction.

        Args:
          plan: plan of the program.
          layers: states of all layers of the model, by path.
          hooks: functions that build the error messages.
          served: keys of contractions with a converted kernel, which need no state.
          fields_of: function that returns the shapes of the required fields.

        Raises:
          ValueError: state is missing, or has another layout.
        """
        found: dict[Key, LayerState] = {}
        for site in plan.chosen:
            wanted = fields_of(site)
            if site.key in found or not wanted or site.key in served:
                found.setdefault(site.key, {})
                continue
            assert site.recipe is not None
            name = self.states.get(site.key)
            if name is None:
                raise ValueError(
                    f"layer {site.path!r} runs {_layout(site.key)} here, but its quant state is for a layer that runs "
                    f"{' and '.join(_layout(key) for key in self.states if key[0] == site.names)}; quantize this "
                    "function separately and create new quant state with init"
                )
            given = {tensor: layers.get(name, {}).get(tensor, {}) for tensor in wanted}
            for tensor, fields in wanted.items():
                for field, shape in fields.items():
                    if field not in given[tensor]:
                        raise ValueError(hooks.missing(site.recipe.name, site.path, f"{tensor}_{field}"))
                    has = tuple(given[tensor][field].shape)
                    _check_sharing(site, field, has, shape)
                    if not _has_shape(field, has, shape):
                        raise ValueError(hooks.misfit(site.path, f"{tensor}_{field}", has, shape))
            found[site.key] = {
                tensor: {field: given[tensor][field] for field in fields} for tensor, fields in wanted.items()
            }
        return found


def _check_sharing(site: Contraction, field: str, has: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Raise if exactly one of the state and the recipe shares scales among experts.

    Raises:
      ValueError: names the layer and the option.
    """
    assert site.recipe is not None
    scans, shares = tuple(length for _, length in site.stack), site.recipe.shares_experts
    rest = wanted[len(scans) + (0 if shares else len(site.batch)) :]
    other = (*scans, *(site.batch if shares else ()), *rest)
    if site.batch and has != wanted and _has_shape(field, has, other):
        what = "separate for each expert" if shares else "shared by all experts"
        raise ValueError(
            f"layer {site.path!r} has quant state {field!r} of shape {has}, {what}, but "
            f"quantization_share_expert_scales is {str(shares).lower()}, which needs shape {wanted}; use the config "
            "that created the quant state"
        )


def _has_shape(field: str, has: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether state has its initial shape. The bins of warm state have one more column."""
    is_warm = field == BINS and has == (*wanted[:-1], wanted[-1] + 1)
    return has == wanted or is_warm


def _layout(key: Key) -> str:
    _, stack, batch = key
    parts = [
        f"{what} {'x'.join(map(str, sizes))}"
        for what, sizes in (("in a scan of length", stack), ("with batch axes", batch))
        if sizes
    ]
    return " and ".join(parts) or "outside of scans"


def _layers(plan: Plan) -> list[Contraction]:
    return [each for each in plan.contractions() if each.is_layer]


def decide(
    analysis: Analysis,
    resolver: Resolver,
    backend: Backend,
    hooks: FaceHooks,
    known: Decisions | None = None,
    check: bool = True,
) -> Decisions:
    """Choose the recipe of every layer: rules and ``intmp`` entries, exclusions by name, float blocks, structure.

    Args:
      analysis: analysis of the traced function.
      resolver: resolver of the config.
      backend: backend that runs the recipes.
      hooks: functions that name the state.
      known: decisions on other traces of the model, which stay unchanged.
      check: whether a rule that matches no layer of this trace is an error.

    Raises:
      ValueError: a rule matches no layer, or float blocks are configured and there are no blocks or no other blocks.
      NotImplementedError: a rule matches a layer that cannot be quantized or that the backend does not support, or a
        sparse weight is read in two layouts or in parts.
    """
    known = known or Decisions({}, {})
    groups: dict[tuple[str, ...], list[Contraction]] = {}
    for site in _layers(analysis.plan):
        groups.setdefault(site.names, []).append(site)
    lost = [site for site in analysis.plan.contractions() if site.is_out_of_reach]
    if check:
        resolver.check_used([sites[0].path for sites in groups.values()] + [site.path for site in lost])
    new = {names: sites for names, sites in groups.items() if names not in known.layers}
    floats = resolver.float_blocks([*known.paths, *(sites[0].path for sites in groups.values())], check)
    layers = {names: _decide_one(analysis, sites, resolver, floats) for names, sites in new.items()}
    unsupported = set()
    for names, decision in layers.items():
        if decision.recipe is None or not (text := unsupported_reason(new[names], decision.recipe, backend)):
            continue
        if decision.rule is not None:
            raise NotImplementedError(f"rule {decision.rule!r} for layer {new[names][0].path!r}: {text}")
        layers[names] = Decision(None, text)
        unsupported.add(names)
    if check:
        _check_rules_reach(lost, {decision.rule for decision in layers.values()}, resolver)
    by_path = {groups[names][0].path: decision for names, decision in layers.items()}
    bound = Decisions(
        {**known.layers, **layers}, known.states, known.unsupported | unsupported, {**known.paths, **by_path}
    )
    bound.apply(analysis.plan)
    for site in analysis.plan.chosen:
        _check_sizes(site)
    _check_sparsity(analysis)
    stateful = [site for site in analysis.plan.chosen if contract.state_fields(site)]
    return dataclasses.replace(bound, states={**known.states, **_state_paths(stateful, known.states, hooks)})


def _check_sizes(site: Contraction) -> None:
    """Raise if tiles or groups of sparse weights do not divide the contraction axis of a layer.

    Raises:
      ValueError: names the layer, the axis and its size.
    """
    recipe, (axes, batch) = site.recipe, site.weight_axes
    if recipe is None or site.side is None or site.operation == "conv_general_dilated":
        return
    shape = site.shapes[site.side]
    try:
        for spec in (recipe.fwd.lhs, recipe.fwd.rhs):
            if isinstance(spec, TensorSpec):
                block_shape(shape, spec, axes, batch=batch)
        if recipe.sparsity is not None:
            sparsity.check_groups(recipe.sparsity, shape, axes)
    except ValueError as error:
        raise ValueError(f"{layer_name(site.path)}: {error}") from None


def _check_sparsity(analysis: Analysis) -> None:
    """Raise if a weight with N:M sparsity is read in two layouts or in parts, because it has one mask.

    Raises:
      NotImplementedError: names the layer.
    """
    layouts: dict[Key, Any] = {}
    sparse = [site for site in analysis.plan.chosen if site.recipe is not None and site.recipe.sparsity is not None]
    count = collections.Counter(site.key for site in sparse)
    for site in sparse:
        layout, why = (site.route, site.weight_axes), ""
        if isinstance(site.route, Derived) and (count[site.key] > 1 or analysis.is_part(site)):
            why = f"is the result of {site.route.why} and is used in parts or more than once"
        elif site.route is not None and layouts.setdefault(site.key, layout) != layout:
            why = "is used in two layouts"
        if why:
            raise NotImplementedError(
                f"weight_sparsity at {site.path!r} needs one mask, but the weight {why}; use a rule with recipe null"
            )


def unsupported_reason(sites: Sequence[Contraction], recipe: Recipe, backend: Backend) -> str:
    """Return the reason for which the backend cannot run a recipe in one of a layer's operations, or ""."""
    uses = dict.fromkeys((site.operation, site.dtype, bool(site.split)) for site in sites)
    reasons = (backend.unsupported(operation, recipe, dtype, is_split) for operation, dtype, is_split in uses)
    return next(filter(None, reasons), "")


def _check_rules_reach(lost: Sequence[Contraction], deciding: set[str | None], resolver: Resolver) -> None:
    """Raise if a rule matches only contractions that stay in float anyway."""
    for site in lost:
        decision = resolver(site.path, site.out_features)
        if decision.rule is not None and decision.rule not in deciding and decision.recipe is not None:
            raise NotImplementedError(
                f"rule {decision.rule!r} selects {decision.recipe.name!r} for layer {site.path!r}, but the layer stays "
                f"in float ({site.reason}); set the recipe of the rule to null"
            )


def _decide_one(
    analysis: Analysis, sites: Sequence[Contraction], resolver: Resolver, floats: Mapping[str, str]
) -> Decision:
    decision = resolver(sites[0].path, sites[0].out_features)
    if decision.recipe is None or decision.rule is not None:
        return decision
    excluded = floats.get(sites[0].path) or structural_exclusion(analysis, sites, resolver.switches)
    if excluded:
        return Decision(None, excluded)
    return dataclasses.replace(decision, hint=head_hint(analysis, sites, resolver.switches))


def head_hint(analysis: Analysis, sites: Sequence[Contraction], switches: Sequence[str]) -> str:
    """Return the rule for a quantized layer that is probably the output head, as a suffix of its reason, or "".

    Args:
      analysis, sites, switches: see ``structural_exclusion``.
    """
    if "quantize_logits_proj" in switches or not analysis.is_probably_head(sites):
        return ""
    rule = f"{{path: '{re.escape(sites[0].path)}', recipe: null}}"
    return f"; probably the head: add the rule {rule} to keep it in float"


def structural_exclusion(analysis: Analysis, sites: Sequence[Contraction], switches: Sequence[str] = ()) -> str:
    """Return the reason to leave a layer in float that follows from the uses of its result and weight, or "".

    Args:
      analysis: analysis of the function.
      sites: all contractions of the layer.
      switches: fields of ``SWITCHES`` that are on, which quantize heads and routers.
    """
    if any(leaf.index in analysis.looked_up for site in sites for leaf in site.leaves):
        return "tied embedding (also used as a lookup table), left in float by default"
    if any(leaf.index in analysis.mixed for site in sites for leaf in site.leaves):
        return "the parameter is combined with data before another contraction, left in float by default"
    is_ranked = any(site.is_ranked for site in sites)
    is_last = not any(site.is_followed for site in sites)
    if is_last and (is_ranked or any(site.is_normalized for site in sites)):
        what, switch = "output head (no layer follows, its result is normalized or ranked)", "quantize_logits_proj"
    elif is_ranked:
        what, switch = "router (its result is ranked)", "quantize_router_proj"
    else:
        return ""
    return "" if switch in switches else f"{what}, left in float by default"


def _state_paths(sites: Sequence[Contraction], taken: Mapping[Key, str], hooks: FaceHooks) -> dict[Key, str]:
    """Choose the path of each contraction's state: the layer path, with leaves and layout if several share a path."""
    operation, owner = hooks.operation, hooks.owner
    by_place: dict[tuple[str, str], dict[Key, Contraction]] = {}
    for site in sites:
        if site.key not in taken:
            place = (site.path, "") if owner is None else (owner(site), operation(site))
            by_place.setdefault(place, {}).setdefault(site.key, site)
    result: dict[Key, str] = {}
    for (path, _), keys in by_place.items():
        all_names = [names for names, _, _ in keys]
        for key, site in keys.items():
            parts = []
            if len(set(all_names)) > 1:
                parts.append("+".join(name.removeprefix(f"{path}/").replace("/", "_") for name in key[0]))
            if all_names.count(key[0]) > 1:
                parts.append("x".join(map(str, (*key[1], *key[2]))) or "whole")
            parts = [*parts, operation(site)] if owner is None else ["_".join([operation(site), *parts])]
            result[key] = _unused_path("/".join(filter(None, [path, *parts])), {*taken.values(), *result.values()})
    return result


def _unused_path(path: str, taken: set[str]) -> str:
    """Return the path, with a number appended if the state of another layer already uses it."""
    numbered = (path if not number else f"{path}_{number}" for number in itertools.count())
    return next(each for each in numbered if each not in taken)
