"""What an update costs on this machine: AdamW with 8-bit moments and bfloat16 weights against optax's in float32."""

from __future__ import annotations

import functools
import statistics
from typing import Any

import jax
import optax

from benchmarks.schemes import Row, tell
from benchmarks.timing import measure_in_turns, median_ratio, seconds
from jaxquant.core.trees import tree_bytes
from jaxquant.optim import quantize_state, stochastic_round

SHAPES = {
    "embedding": (32_000, 768),
    "attention": (12, 768, 3072),
    "wi": (12, 768, 3072),
    "wo": (12, 3072, 768),
    "scales": (25, 768),
}
"""Parameters of a decoder, layers stacked: 109.5 million."""
FLOAT32 = "optax, float32"


class _Update:
    """A compiled update, which takes weights and state for its own, and its times by round."""

    def __init__(self, tx: optax.GradientTransformation, dtype: str, shapes: dict[str, tuple[int, ...]]):
        keys = iter(jax.random.split(jax.random.key(0), 2 * len(shapes)))
        draw = lambda scale: {name: scale * jax.random.normal(next(keys), shape) for name, shape in shapes.items()}  # noqa: E731
        weights, self._gradients = optax.tree.cast(draw(0.02), dtype), draw(1e-3)
        self._carried = weights, jax.jit(tx.init)(weights)
        self.bytes = tree_bytes(self._carried) / sum(x.size for x in jax.tree.leaves(weights))

        @functools.partial(jax.jit, donate_argnums=0)
        def update(carried: Any, gradients: Any) -> Any:
            updates, state = tx.update(gradients, carried[1], carried[0])
            return optax.apply_updates(carried[0], updates), state

        self._update, self.times = update, []
        self.measure()  # compiles
        self.times.clear()

    def measure(self) -> None:
        def run() -> Any:
            self._carried = self._update(self._carried, self._gradients)
            return self._carried

        self.times.append(seconds(run))


def measure_optimizer(rounds: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> list[Row]:
    """Time AdamW updates of the parameters of a decoder (109.5 million), gradients in float32, in turns.

    ``ratio``: median over rounds of the time over that of optax's AdamW with float32 weights in that round.
    ``bytes``: of weights and moments, a parameter.

    Args:
      rounds: updates of each.
      shapes: of the parameters.
    """
    adamw = functools.partial(optax.adamw, 1e-3, 0.9, 0.95, weight_decay=0.1)
    made = {FLOAT32: (adamw(), "float32")}
    for scheme in ("fp8_coat", "int8_dynamic"):
        coded = quantize_state(adamw(), scheme)
        made[scheme] = coded, "float32"
        made[f"{scheme}, bfloat16 weights, rounded at random"] = optax.chain(coded, stochastic_round(0)), "bfloat16"
    updates = {}
    for name, (tx, dtype) in made.items():
        updates[name] = _Update(tx, dtype, shapes)
        tell(f"compiled {name}")
    measure_in_turns(list(updates.values()), rounds)
    return [
        {
            "update": name,
            "bytes": f"{update.bytes:.2f}",
            "ms": round(1000 * statistics.median(update.times), 1),
            "ratio": round(median_ratio(update.times, updates[FLOAT32].times), 2),
        }
        for name, update in updates.items()
    ]
