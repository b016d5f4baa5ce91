"""Decisions: which recipe each layer of a traced function gets and where its state stands, bound to parameters once."""

from __future__ import annotations

import collections
import dataclasses
import itertools
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
      is_model: whether modules with layers are quantized, not a function with matmuls. A parameter ``kernel`` at the
        root is a layer of the path "" then, Python's numbers are static, and a layer that no trace has shown so far is
        decided when one does; of a function that is an error, and numbers are traced as under ``jax.jit``.
      operation: name below the layer's path under which the state of a contraction stands; "" for none.
      owner: path of what holds the state of a contraction, where that is not the layer's.
      missing: the sentence about state that is missing, of (recipe's name, path, field).
      misfit: the sentence about state of another shape, of (path of the layer, field, shape, shape that is needed).
      has_scopes: whether the layers' calls are in name scopes already; else each gets that of its path.
      watch: reads the state of a contraction, of (path, operands, state).
    """

    is_model: bool = False
    operation: Callable[[Contraction], str] = lambda _: ""
    owner: Callable[[Contraction], str] | None = None
    missing: Callable[[str, str, str], str] = lambda recipe, path, field: (
        f"recipe {recipe!r} at {path!r} keeps state, and quant_state has no {field!r} there; make it with the "
        "quantized function's init(params, *args)"
    )
    misfit: Callable[[str, str, tuple[int, ...], tuple[int, ...]], str] = lambda path, field, has, wanted: (
        f"quant_state {path!r} has {field!r} of shape {has}, and this call needs {wanted}; make it with init on the "
        "same model and config"
    )
    has_scopes: bool = False
    watch: watch.Watch = watch.FUNCTION


@dataclasses.dataclass(frozen=True)
class Decisions:
    """What was decided on the trace of a whole model.

    Attributes:
      layers: decision by the paths of the leaves of a weight.
      states: path of the state by what it belongs to, for recipes that keep state.
      unsupported: the layers that stay float because their operation does not run their recipe.
      paths: decision by path of the layer.
    """

    layers: Mapping[tuple[str, ...], Decision]
    states: Mapping[Key, str]
    unsupported: frozenset[tuple[str, ...]] = frozenset()
    paths: Mapping[str, Decision] = dataclasses.field(default_factory=dict)

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
            site.implementation = decision.implementation
            site.is_out_of_reach = site.is_unsupported = site.names in self.unsupported

    def read_states(
        self,
        plan: Plan,
        layers: Mapping[str, LayerState],
        dialect: FaceHooks,
        served: Collection[Key] = (),
        fields_of: Callable[[Contraction], dict[str, contract.Shapes]] = contract.state_fields,
    ) -> dict[Key, LayerState]:
        """Find the state of every chosen contraction among that of the layers.

        Args:
          plan: of the program.
          layers: the state of the whole model's.
          dialect: says what is missing, and what does not fit.
          served: what has a converted kernel, and needs no state.
          fields_of: returns the shapes of the fields that are needed.

        Raises:
          ValueError: state that is missing, or of another layout.
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
                    f"layer {site.path!r} is used here {_layout(site.key)}, and its quant state was made for "
                    f"{' and '.join(_layout(key) for key in self.states if key[0] == site.names)}; quantize this "
                    "function by itself, with a state of its own"
                )
            given = {tensor: layers.get(name, {}).get(tensor, {}) for tensor in wanted}
            for tensor, fields in wanted.items():
                for field, shape in fields.items():
                    if field not in given[tensor]:
                        raise ValueError(dialect.missing(site.recipe.name, site.path, f"{tensor}_{field}"))
                    has = tuple(given[tensor][field].shape)
                    _check_sharing(site, field, has, shape)
                    if not _has_shape(field, has, shape):
                        raise ValueError(dialect.misfit(site.path, f"{tensor}_{field}", has, shape))
            found[site.key] = {
                tensor: {field: given[tensor][field] for field in fields} for tensor, fields in wanted.items()
            }
        return found


def _check_sharing(site: Contraction, field: str, has: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Refuse state that is one for all experts where each has its own, or the reverse.

    Raises:
      ValueError: names the layer and the option.
    """
    assert site.recipe is not None
    scans, shares = tuple(length for _, length in site.stack), site.recipe.shares_experts
    rest = wanted[len(scans) + (0 if shares else len(site.batch)) :]
    other = (*scans, *(site.batch if shares else ()), *rest)
    if site.batch and has != wanted and _has_shape(field, has, other):
        what = "for each expert" if shares else "for all experts"
        raise ValueError(
            f"layer {site.path!r} has quant state {field!r} of shape {has}, one {what}, and "
            f"quantization_share_expert_scales is {str(shares).lower()}, which needs {wanted}; use the config that the "
            "state was made with"
        )


def _has_shape(field: str, has: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether state has the shape that it is made in; the bins of warm state have a column more."""
    is_warm = field == BINS and has == (*wanted[:-1], wanted[-1] + 1)
    return has == wanted or is_warm


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


def decide(
    analysis: Analysis,
    resolver: Resolver,
    backend: Backend,
    dialect: FaceHooks,
    known: Decisions | None = None,
    check: bool = True,
) -> Decisions:
    """Decide over every layer: rules and ``intmp`` entries, default exclusions by name, float blocks, structure.

    Args:
      analysis: of the traced function.
      resolver: of the config.
      backend: that runs its recipes.
      dialect: says where state stands.
      known: decisions on other traces of the model, which stay as they are.
      check: whether a rule that matches no layer of this trace is an error.

    Raises:
      ValueError: a rule that matches no layer; float blocks where there are none, or none but them.
      NotImplementedError: a rule for what is out of reach or for what the backend does not run, or a sparse weight
        that is read in two layouts, or in parts.
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
        path = groups[names][0].path
        if decision.recipe is None:
            continue
        if text := unsupported_reason(groups[names], decision.recipe, backend):
            if decision.rule is not None:
                raise NotImplementedError(f"rule {decision.rule!r} at {path!r}: {text}")
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
    return dataclasses.replace(bound, states={**known.states, **_state_paths(stateful, known.states, dialect)})


def _check_sizes(site: Contraction) -> None:
    """Refuse tiles and groups of sparse weights that do not divide the contraction of a layer.

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
    """Refuse N:M sparsity of a weight that is read in two layouts, or in parts: it has one mask.

    Raises:
      NotImplementedError: names the layer.
    """
    layouts: dict[Key, Any] = {}
    sparse = [site for site in analysis.plan.chosen if site.recipe is not None and site.recipe.sparsity is not None]
    count = collections.Counter(site.key for site in sparse)
    for site in sparse:
        layout, why = (site.route, site.weight_axes), ""
        if isinstance(site.route, Derived) and (count[site.key] > 1 or analysis.is_part(site)):
            why = f"is not one parameter ({site.route.why}), is read in parts or more than once,"
        elif site.route is not None and layouts.setdefault(site.key, layout) != layout:
            why = "is read in two layouts"
        if why:
            raise NotImplementedError(
                f"weight_sparsity at {site.path!r}, whose weight {why} and has one mask; leave it dense by a rule"
            )


def unsupported_reason(sites: Sequence[Contraction], recipe: Recipe, backend: Backend) -> str:
    """Return the reason that an operation among a layer's contractions does not run a recipe, "" where all do."""
    asked = dict.fromkeys((site.operation, site.dtype, bool(site.split)) for site in sites)
    reasons = (backend.unsupported(operation, recipe, dtype, is_split) for operation, dtype, is_split in asked)
    return next(filter(None, reasons), "")


def _check_rules_reach(lost: Sequence[Contraction], deciding: set[str | None], resolver: Resolver) -> None:
    """Refuse a rule that quantizes nothing but what stays in float anyway."""
    for site in lost:
        decision = resolver(site.path, site.out_features)
        if decision.rule is not None and decision.rule not in deciding and decision.recipe is not None:
            raise NotImplementedError(
                f"rule {decision.rule!r} asks for {decision.recipe.name!r} at {site.path!r}, which stays in float: "
                f"{site.reason}"
            )


def _decide_one(
    analysis: Analysis, sites: Sequence[Contraction], resolver: Resolver, floats: Mapping[str, str]
) -> Decision:
    decision = resolver(sites[0].path, sites[0].out_features)
    if decision.recipe is None or decision.rule is not None:
        return decision
    excluded = floats.get(sites[0].path) or structural_exclusion(analysis, sites, resolver.switches)
    return Decision(None, excluded) if excluded else decision


def structural_exclusion(analysis: Analysis, sites: Sequence[Contraction], switches: Sequence[str] = ()) -> str:
    """Return the reason that a layer is left in float for what the function does with its result, "" where it is not.

    Args:
      analysis: of the function.
      sites: all contractions of the layer.
      switches: fields of ``SWITCHES`` that are on, which quantize heads and routers.
    """
    if any(leaf.index in analysis.looked_up for site in sites for leaf in site.leaves):
        return "tied embedding (its rows are looked up elsewhere), left in float by default"
    if any(leaf.index in analysis.mixed for site in sites for leaf in site.leaves):
        return "its parameter is contracted elsewhere after data was mixed into it, left in float by default"
    is_ranked = any(site.is_ranked for site in sites)
    is_last = not any(site.is_followed for site in sites)
    if is_last and (is_ranked or any(site.is_normalized for site in sites)):
        what, switch = "output head (no layer follows, its result is normalized or ranked)", "quantize_logits_proj"
    elif is_ranked:
        what, switch = "router (its result is ranked)", "quantize_router_proj"
    else:
        return ""
    return "" if switch in switches else f"{what}, left in float by default"


def _state_paths(sites: Sequence[Contraction], taken: Mapping[Key, str], dialect: FaceHooks) -> dict[Key, str]:
    """Choose the name of each contraction's state: its layer's, with leaves and layout where several share a path."""
    operation, owner = dialect.operation, dialect.owner
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
            result[key] = _untaken("/".join(filter(None, [path, *parts])), {*taken.values(), *result.values()})
    return result


def _untaken(path: str, taken: set[str]) -> str:
    """Return a path, or one with a number behind it where another layer's state stands there already."""
    numbered = (path if not number else f"{path}_{number}" for number in itertools.count())
    return next(each for each in numbered if each not in taken)
