"""What a config makes of every layer of a model: decided on the trace of a call, by rules and names without one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

from flax import nnx

from jaxquant.backends import load
from jaxquant.config.backends import BackendName
from jaxquant.config.quant_config import QuantConfig
from jaxquant.config.rules import Decision, Resolver
from jaxquant.core.recipe import Recipe
from jaxquant.inject import linen, nnx_layers
from jaxquant.inject import nnx as nnx_face
from jaxquant.inject.faces import quantized_with
from jaxquant.inject.layers import Layer, LayerReport, linen_layers, matmul_dtypes, refuse_nothing
from jaxquant.trace.plan import Contraction
from jaxquant.trace.reach import NOT_FLOAT


@dataclasses.dataclass(frozen=True)
class Decided:
    """The layers of a model, and what was decided on each.

    Attributes:
      config: what was asked.
      backend: that runs it, None where nothing is quantized.
      layers: flax's linear layers.
      sites: contractions with a parameter that a trace showed, by path of their layer; {} without a trace.
      known: decisions that were made on an earlier trace, by path.
      mixed: paths of layers whose parameter meets data before it is contracted.
    """

    config: QuantConfig
    backend: BackendName | None
    layers: list[Layer]
    sites: Mapping[str, Contraction]
    known: Mapping[str, Decision]
    mixed: Collection[str] = ()

    def __call__(self, path: str, out_features: int) -> Decision:
        """Return the decision on a layer."""
        if self._resolver is None:
            return Decision(None, "quantization is off")
        decision, site = self._resolver(path, out_features), self.sites.get(path)
        # A layer of flax's that is out of reach is asked for all the same: what is there instead is coverage's to say.
        is_asked = site is not None and site.is_out_of_reach and path in self._own and path not in self.mixed
        if site is not None and (not is_asked or site.reason == NOT_FLOAT):  # no recipe is of complex numbers
            return dataclasses.replace(decision, recipe=site.recipe, reason=site.reason)
        known = self.known.get(path)
        return decision if known is None or known.recipe is not None or decision.rule is not None else known

    @property
    def recipes(self) -> dict[str, Recipe]:
        """The recipe of each of flax's layers that is quantized, by path; of none that a trace showed out of reach."""
        lost = {path for path, site in self.sites.items() if site.is_out_of_reach}
        layers = (layer for layer in self.layers if layer.path not in lost)
        decisions = {layer.path: self(layer.path, layer.out_features) for layer in layers}
        return {path: decision.recipe for path, decision in decisions.items() if decision.recipe is not None}

    @property
    def other_kernels(self) -> list[str]:
        """The paths of layers with a quantized weight that are not flax's."""
        found = {**self.known, **self.sites}
        recipes = {path: each.recipe for path, each in found.items() if path not in self._own}
        return [path for path, recipe in recipes.items() if recipe is not None and recipe.fwd.rhs is not None]

    def check(self) -> None:
        """Refuse rules that match no layer, and a config that quantizes nothing.

        Raises:
          ValueError: there are some, or it does.
        """
        if self._resolver is None:
            return
        paths = dict.fromkeys([*(layer.path for layer in self.layers), *self.sites, *self.known])
        self._resolver.check_used(paths)
        reasons = {path: self(path, self._sizes.get(path, 0)).reason for path in paths}
        refuse_nothing(self.config, reasons, bool(self.recipes or self.other_kernels))

    def reports(self) -> list[LayerReport]:
        """Report every layer, flax's first."""
        shapes = {layer.path: layer.kernel_shape for layer in self.layers}
        for path, site in self.sites.items():
            shapes.setdefault(path, () if site.side is None else site.shapes[site.side])
        reports = []
        for path, shape in shapes.items():
            decision = self(path, self._sizes.get(path, 0))
            recipe = decision.recipe
            name, backend = (None, None) if recipe is None else (recipe.name, self._runner(path, recipe))
            reports.append(LayerReport(path, name, backend, shape, matmul_dtypes(recipe), decision.reason))
        return reports

    def _runner(self, path: str, recipe: Recipe) -> BackendName | None:
        """Return the name of the backend that computes a layer."""
        if self.backend is None or path not in self.sites:
            return self.backend
        backend = load(self.backend, is_completed=self.config.leaves_backend_open)
        return backend.runner(self.sites[path].operation, recipe).name

    @functools.cached_property
    def _own(self) -> set[str]:
        return {layer.path for layer in self.layers}

    @functools.cached_property
    def _resolver(self) -> Resolver | None:
        return self.config.resolver()

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        sizes = {path: site.out_features for path, site in self.sites.items()}
        return sizes | {layer.path: layer.out_features for layer in self.layers}


def decide_layers(model: Any, config: QuantConfig, *example_inputs: Any, **example_kwargs: Any) -> Decided:
    """Decide on every layer of a model without computing anything of it.

    Args:
      model: a Linen module that is not bound, or an NNX module, quantized or not.
      config: what is asked.
      example_inputs, example_kwargs: arguments of its ``__call__``; arrays may be ``jax.ShapeDtypeStruct``. An NNX
        model may go without, and then what was decided when it was quantized counts beside rules and names.
    """
    face: Any = None
    known: Mapping[str, Decision] = {}
    if isinstance(model, nnx.Module):
        before = quantized_with(model)
        if before is not None:
            known = {} if before.engine.decisions is None else before.engine.decisions.paths
            model = nnx_face.plain_model(model)
        layers = nnx_layers.nnx_layers(model, *example_inputs, **example_kwargs)
        if example_inputs or example_kwargs:
            face = nnx_face.Face.of(config, model)
    else:
        layers = linen_layers(model, *example_inputs, **example_kwargs)
        face = linen.Face(config)
    sites: dict[str, Contraction] = {}
    mixed: set[str] = set()
    if face is not None and config.resolver() is not None:
        analysis = face.trace_example(model, *example_inputs, **example_kwargs).analysis
        face.engine.preview(analysis)
        mixed = {analysis.path([index]) for index in analysis.mixed}
        for site in analysis.plan.contractions():
            is_table = any(leaf.index in analysis.looked_up for leaf in site.leaves)
            if not site.names or (is_table and site.recipe is None):
                continue  # an embedding that is multiplied is no layer unless a rule makes it one
            if site.path not in sites or sites[site.path].recipe is None:
                sites[site.path] = site
    return Decided(config, config.resolved_backend, layers, sites, {} if sites else known, mixed)
