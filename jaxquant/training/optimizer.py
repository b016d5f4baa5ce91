"""AdamW or Muon with warm-up, cosine decay and gradient clipping; parameters are updated, quant state is not."""

from __future__ import annotations

from typing import Any, Literal

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from optax import contrib

from jaxquant.optim import quantize_state, stochastic_round
from jaxquant.training.config import TrainConfig
from jaxquant.training.sharding import parameter_spec

DECAYED = frozenset({"kernel", "embedding", "wi_0", "wi_1", "wo"})
"""Names of parameters with weight decay. ``ndim`` is not a sufficient test, because scanned norms have two axes."""

AXES: dict[str, int | Literal["rows"] | None] = {"auto": None, "last": -1, "rows": "rows"}
"""Value of ``axis`` of ``quantize_state`` for each ``optimizer_state_axis``."""

_OF_HEADS = contrib.MuonDimensionNumbers(reduction_axis=-3, output_axis=(-2, -1))
_OF_MATRICES = contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
MUON_DIMENSIONS = {
    **dict.fromkeys(("query", "key", "value", "wq_b", "wkv_b"), _OF_HEADS),
    "out": contrib.MuonDimensionNumbers(reduction_axis=(-3, -2), output_axis=-1),
    **dict.fromkeys(("wi_0", "wi_1", "wo", "wq_a", "wkv_a"), _OF_MATRICES),
}
"""Matrices that Muon updates, with their axes, by name of the layer or experts parameter; Adam updates the rest."""


def learning_rate_schedule(config: TrainConfig) -> optax.Schedule:
    """Return a schedule step -> learning rate: linear warm-up from 0, then a cosine down to the final fraction."""
    warmup = round(config.steps * config.warmup_steps_fraction)
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(config.steps, warmup + 1),
        end_value=config.learning_rate * config.learning_rate_final_fraction,
    )


def make_optimizer(config: TrainConfig, mesh: Mesh) -> optax.GradientTransformation:
    """Build the optimizer. Its state has the same structure without clipping, so a resumed run can change clipping."""

    def sharding(path: str, moment: jax.Array) -> NamedSharding:
        return NamedSharding(mesh, parameter_spec(*_names(path), moment.ndim))

    rate, decay, eps = learning_rate_schedule(config), config.weight_decay, config.adam_eps
    if config.optimizer == "muon":
        tx: optax.GradientTransformation = contrib.muon(
            rate,
            eps=eps,
            weight_decay=decay,
            adam_b1=config.adam_b1,
            adam_b2=config.adam_b2,
            muon_weight_dimension_numbers=_muon_dimensions,
            consistent_rms=0.2,  # RMS of AdamW's updates, so that AdamW's learning rates apply (arXiv 2502.16982)
        )
    else:
        tx = optax.adamw(rate, config.adam_b1, config.adam_b2, eps, weight_decay=decay, mask=_decay_mask)
    if config.optimizer_state != "float32":
        axis = AXES[config.optimizer_state_axis]
        tx = quantize_state(tx, config.optimizer_state, shards=_shards_along, axis=axis, shardings=sharding)
    rounding = [stochastic_round(config.seed)] if config.stochastic_rounding else []
    threshold = config.gradient_clipping_threshold
    return optax.chain(optax.clip_by_global_norm(threshold) if threshold else optax.identity(), tx, *rounding)


def _decay_mask(params: optax.Params) -> optax.Params:
    return jax.tree_util.tree_map_with_path(lambda path, _: getattr(path[-1], "key", None) in DECAYED, params)


def _muon_dimensions(params: optax.Params) -> optax.Params:
    def axes_of(path: tuple[Any, ...], _: Any) -> contrib.MuonDimensionNumbers | None:
        names = [getattr(key, "key", None) for key in path[-2:]]
        if names[-1] not in DECAYED:
            return None
        return next((axes for name, axes in MUON_DIMENSIONS.items() if name in names), None)

    return jax.tree_util.tree_map_with_path(axes_of, params)


def _shards_along(path: str, axis: int) -> int:
    """Return the number of shards for which moments are grouped. The number does not depend on the mesh."""
    return 8 if parameter_spec(*_names(path), 3 - axis)[axis] else 1


def _names(path: str) -> tuple[str, str]:
    module, parameter = path.split("/")[-2:]
    return module, parameter
