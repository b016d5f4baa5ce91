"""How well a model serves: held-out loss and next-token agreement of what was trained and of what was made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.trees import tree_bytes
from train.config import TrainConfig
from train.conversion import quantization_of
from train.data import make_iterators
from train.serving import Served, open_served
from train.step import token_losses

Row = dict[str, Any]


class Contender(NamedTuple):
    """A model under evaluation: a name and what ``open_served`` opened."""

    name: str
    served: Served


def contenders(run: str | Path, converted: Sequence[str | Path]) -> list[Contender]:
    """Open a run's checkpoint in float and as it was trained, and checkpoints that were converted from runs.

    Args:
      run: folder of the run.
      converted: folders of the checkpoints.

    Raises:
      FileNotFoundError, ValueError, TypeError: from ``open_served``; ``run`` is no run.
    """
    trained = open_served(run)
    if trained.config.checkpoint_is_quantized:
        raise ValueError(f"{run} is a converted checkpoint; give the run that it was made of first, and it after that")
    found = [Contender("float", open_served(run, quantization_of(QuantConfig()) | {"remat_policy": "none"}))]
    if trained.config.strings:
        found.append(Contender("trained", trained))
    return found + [Contender(f"served: {folder}", open_served(folder)) for folder in converted]


def evaluate(models: Sequence[Contender], *, batches: int | None = None) -> list[Row]:
    """Measure models on the held-out text of the first one's configuration.

    Args:
      models: the first is the one that the others are compared with.
      batches: how many batches; None is the configuration's ``eval_batches``.

    Returns:
      A row a model: held-out loss in nats a token, its relative excess over the first's, the share of positions at
      which its likeliest next token is the first's, the largest difference of a logit from the first's and from the
      model before it, and the bytes of its parameters.

    Raises:
      ValueError: models of different vocabularies.
    """
    config: TrainConfig = models[0].served.config
    sizes = {each.name: each.served.shape.vocab_size for each in models}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the models have different vocabularies: {', '.join(f'{n} {s}' for n, s in sizes.items())}")
    config = dataclasses.replace(config, eval_batches=batches or config.eval_batches)
    totals = [np.zeros(5) for _ in models]  # loss, tokens, positions in agreement, largest differences
    runs = [_program(each.served) for each in models]
    for batch in make_iterators(config, config.batch_size).held_out():
        first = before = None
        for total, run, each in zip(totals, runs, models, strict=True):
            loss, count, logits = run(each.served.params, each.served.quant_state, dict(batch))
            first = logits if first is None else first
            before = logits if before is None else before
            real = jnp.asarray(batch["segment_ids"] > 0)
            same = (logits.argmax(-1) == first.argmax(-1)) & real
            total[:3] += [float(loss), float(count), float(same.sum())]
            for place, other in ((3, first), (4, before)):
                difference = jnp.abs(jnp.where(real[..., None], logits - other, 0)).max()
                total[place] = np.maximum(total[place], float(difference))  # NaN stays NaN
            before = logits
    base = totals[0][0] / totals[0][1]
    return [
        {
            "model": each.name,
            "quantization": each.served.config.quantization or "none",
            "backend": each.served.config.resolved_backend or "–",
            "held-out loss": round(total[0] / total[1], 4),
            "gap": f"{100 * (total[0] / total[1] / base - 1):+.2f}%",
            "agreement": f"{100 * total[2] / total[1]:.2f}%",
            "max |Δ logit| to first": float(f"{total[3]:.3g}"),
            "to the one before": float(f"{total[4]:.3g}"),
            "MB": round(tree_bytes(each.served.params) / 1e6, 3),
        }
        for each, total in zip(models, totals, strict=True)
    ]


def _program(served: Served) -> Any:
    @jax.jit
    def run(params: Any, quant_state: Any, batch: Any) -> Any:
        inputs = (batch["inputs"], batch["segment_ids"], batch["positions"])
        logits = served.model.apply(params, quant_state, *inputs, rngs={"quant": jax.random.key(0)})
        return *token_losses(logits, batch), logits

    return run
