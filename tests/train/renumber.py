"""The same decoder with its hidden units numbered differently: what the order of summation alone does.

``emb_dim``, ``mlp_dim``, the key-value heads and, with them, the query heads that share each carry no meaning in their
order; nor do the sequences of a batch. Numbered anew, the model computes the same function and its quantization takes
the same scales (a tensor's or a channel's amax does not depend on order), with every sum over these axes added in
another order: norms, matmuls, the sums over tokens in the weights' gradients, the loss. Rounding boundaries that a last
bit pushes an operand over are among the consequences. It runs in the very program of the model that it came from.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from train.config import TrainConfig

# (module, parameter) -> what lies along its last axes.
AXES: dict[tuple[str, str], tuple[str, ...]] = {
    ("query", "kernel"): ("emb", "query_heads", "head_dim"),
    ("key", "kernel"): ("emb", "kv_heads", "head_dim"),
    ("value", "kernel"): ("emb", "kv_heads", "head_dim"),
    ("out", "kernel"): ("query_heads", "head_dim", "emb"),
    ("wi_0", "kernel"): ("emb", "mlp"),
    ("wi_1", "kernel"): ("emb", "mlp"),
    ("wo", "kernel"): ("mlp", "emb"),
    ("token_embedder", "embedding"): ("vocabulary", "emb"),
}


@dataclasses.dataclass(frozen=True)
class Numbering:
    """An order of the units of each kind; ``sequences`` orders a batch."""

    units: dict[str, np.ndarray]
    sequences: np.ndarray

    @classmethod
    def random(cls, config: TrainConfig, seed: int, blocks: int) -> Numbering:
        """Draw an order; sequences stay together in each of ``blocks`` parts, which have scales of their own."""
        draw = np.random.default_rng(seed)
        kv_heads = draw.permutation(config.num_kv_heads)
        group = config.num_query_heads // config.num_kv_heads
        units = {
            "emb": draw.permutation(config.emb_dim),
            "mlp": draw.permutation(config.mlp_dim),
            "kv_heads": kv_heads,
            "query_heads": np.concatenate([head * group + draw.permutation(group) for head in kv_heads]),
        }
        size = config.batch_size // blocks
        sequences = np.concatenate([block * size + draw.permutation(size) for block in draw.permutation(blocks)])
        return cls(units, sequences)

    def batch(self, batch: Any) -> Any:
        return {name: x[self.sequences] for name, x in batch.items()}

    def state(self, state: Any) -> Any:
        """Renumber parameters and their moments; quant state has no units."""
        return self._each(state, lambda order: order)

    def undo(self, state: Any) -> Any:
        return self._each(state, np.argsort)

    def _each(self, state: Any, order: Any) -> Any:
        def move(path: tuple[Any, ...], leaf: np.ndarray) -> np.ndarray:
            names = ["", "", *(str(getattr(key, "key", key)) for key in path)]
            axes = ("emb",) if names[-2].endswith("norm") and leaf.ndim else AXES.get((names[-2], names[-1]), ())
            for axis, kind in enumerate(axes, leaf.ndim - len(axes)):
                if kind in self.units:
                    leaf = leaf.take(order(self.units[kind]), axis)
            return leaf

        return jax.tree_util.tree_map_with_path(move, state)
