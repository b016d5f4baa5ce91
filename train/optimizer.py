"""AdamW with warm-up, cosine decay and global-norm clipping. It sees parameters only, never quant state."""

from __future__ import annotations

from typing import Literal

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from jaxquant.optim import quantize_state, stochastic_round
from train.config import TrainConfig
from train.sharding import parameter_spec

DECAYED = frozenset({"kernel", "embedding", "wi_0", "wi_1", "wo"})
"""Parameters that weight decay acts on, by name: under a scan over layers a norm's scale has two axes too."""

AXES: dict[str, int | Literal["rows"] | None] = {"auto": None, "last": -1, "rows": "rows"}
"""Values of ``optimizer_state_axis`` as ``quantize_state`` has them."""


def learning_rate_schedule(config: TrainConfig) -> optax.Schedule:
    """Return step -> learning rate: linear warm-up from 0, then a cosine down to the final fraction."""
    warmup = round(config.steps * config.warmup_steps_fraction)
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(config.steps, warmup + 1),
        end_value=config.learning_rate * config.learning_rate_final_fraction,
    )


def make_optimizer(config: TrainConfig, mesh: Mesh) -> optax.GradientTransformation:
    """Build the optimizer. Its state has one shape with and without clipping, so that a run can go on with either."""

    def sharding(path: str, moment: jax.Array) -> NamedSharding:
        return NamedSharding(mesh, parameter_spec(*_names(path), moment.ndim))

    adamw = optax.adamw(
        learning_rate_schedule(config),
        b1=config.adam_b1,
        b2=config.adam_b2,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        mask=_decayed,
    )
    if config.optimizer_state != "float32":
        axis = AXES[config.optimizer_state_axis]
        adamw = quantize_state(adamw, config.optimizer_state, shards=_devices_along, axis=axis, shardings=sharding)
    rounding = [stochastic_round(config.seed)] if config.stochastic_rounding else []
    threshold = config.gradient_clipping_threshold
    return optax.chain(optax.clip_by_global_norm(threshold) if threshold else optax.identity(), adamw, *rounding)


def _decayed(params: optax.Params) -> optax.Params:
    return jax.tree_util.tree_map_with_path(lambda path, _: getattr(path[-1], "key", None) in DECAYED, params)


def _devices_along(path: str, axis: int) -> int:
    """Return for how many devices groups of moments are cut, on any mesh, so that a run goes on on another."""
    return 8 if parameter_spec(*_names(path), 3 - axis)[axis] else 1


def _names(path: str) -> tuple[str, str]:
    module, parameter = path.split("/")[-2:]
    return module, parameter
