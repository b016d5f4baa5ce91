"""Qwix: quantize a model with the rules of ``qwix_config``. The only place that imports Qwix.

What Qwix does in its own way, under every recipe:

- It divides by the scale, so ``TensorSpec.reciprocal`` True differs in the last bit of a qvalue. Scales have the dtype
  of the tensor (bfloat16 in a bfloat16 model).
- ``MatmulSpec.shards`` cuts the **last** contraction axis of the weight gradient (of a batch of sequences: the
  sequence), where the other backends cut the first, and blocks of fewer than 128 elements are dequantized before the
  matmul.
- Both backward matmuls round with the same noise.
- ``precision`` and ``preferred_element_type`` of the replaced operations are dropped; a contraction that has one is
  refused.
- The weights of a ragged matmul have one scale for each column, which all groups share, and its gradients' scales take
  rows behind the last group in.
- An operand of the same shape as a parameter counts as a weight. ``dot_general`` here gives the kernel more axes than
  any activation has, and a jit of its own, so that roles come from the call as with the other backends.

Tested with the series in ``jaxquant.config.backends``; everything imported is public there.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxquant.backends import _weights
from jaxquant.backends._versions import require
from jaxquant.backends.qwix_config import to_qwix
from jaxquant.config.backends import BACKENDS
from jaxquant.core.recipe import Recipe
from jaxquant.core.rounding import operands_key

require(BACKENDS["qwix"].package, BACKENDS["qwix"].series, BACKENDS["qwix"].title)

import qwix  # noqa: E402


def _rules(recipes: Mapping[str, Recipe]) -> list[qwix.QtRule]:
    """Make one rule a recipe, matching exactly the paths that have it."""
    groups: dict[Recipe, list[str]] = {}
    for path, recipe in recipes.items():
        groups.setdefault(recipe, []).append(path)
    return [
        qwix.QtRule(
            module_path="|".join(re.escape(path) for path in paths),
            op_names=("dot_general", "einsum", "ragged_dot"),
            **to_qwix(recipe),
        )
        for recipe, paths in groups.items()
    ]


def make_rules(entries: Iterable[tuple[str, Recipe | None]]) -> list[qwix.QtRule]:
    """Make one rule of each regex, with the grouped matmuls of experts among its operations."""
    ops = ("dot_general", "einsum", "ragged_dot")
    return [
        qwix.QtRule(module_path=pattern, op_names=ops, **({} if recipe is None else to_qwix(recipe)))
        for pattern, recipe in entries
    ]


def make_provider(rules: Sequence[qwix.QtRule]) -> qwix.QtProvider:
    """Make the provider that ``qwix.quantize_model`` takes."""
    return qwix.QtProvider(list(rules))


class _FromOperands(qwix.QtProvider):
    """Round stochastically with noise from a layer's own operands.

    Qwix would draw it from a random stream of the module, which a traced matmul has not.
    """

    def _key(self, lhs: Any, rhs: Any) -> Any:
        return operands_key(lhs, rhs)

    def _create_dot_general_qt_config(self, rule: qwix.QtRule, op_id: str, lhs: Any, rhs: Any) -> Any:
        if rule.bwd_stochastic_rounding is None:
            return super()._create_dot_general_qt_config(rule, op_id, lhs, rhs)
        plain = dataclasses.replace(rule, bwd_stochastic_rounding=None)
        config = super()._create_dot_general_qt_config(plain, op_id, lhs, rhs)
        noise = _Noise(self._key(lhs, rhs))
        chosen = rule.additional_qt_config or {}
        fields = ("dlhs_stochastic_rounding_noise_fn", "drhs_stochastic_rounding_noise_fn")
        return dataclasses.replace(config, **{name: chosen.get(name, noise) for name in fields})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Noise:
    """Uniform noise in [-0.5, 0.5) of a shape; a pytree, as Qwix hands it through its custom derivative."""

    key: Any

    def __call__(self, shape: tuple[int, ...]) -> Any:
        return jax.random.uniform(self.key, shape, jnp.float32, -0.5, 0.5)


class _WithKey(_FromOperands):
    """Round stochastically with noise from a key."""

    def __init__(self, rules: Sequence[qwix.QtRule], key: Any) -> None:
        super().__init__(rules)
        self._given = key

    def _key(self, lhs: Any, rhs: Any) -> Any:
        return self._given


class _Contraction(nn.Module):
    """One matmul by the parameter ``kernel``, for Qwix to quantize.

    Attributes:
      dimension_numbers: of the matmul.
      shape: of the kernel, which is stored with more axes.
    """

    dimension_numbers: Any
    shape: tuple[int, ...]

    def __call__(self, lhs: jax.Array) -> jax.Array:
        kernel = self.get_variable("params", "kernel")
        assert kernel is not None
        return jax.lax.dot_general(lhs, kernel.reshape(self.shape), self.dimension_numbers)


def dot_general(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, *, recipe: Recipe, key: jax.Array | None = None
) -> jax.Array:
    """Contract an activation with a float weight as Qwix trains.

    Qwix has no public function for that, so a module of one matmul is quantized by its rules. Qwix knows a weight by
    its way from a parameter or by a parameter's shape; the parameter has more axes here than any operand, and the
    matmul a jit of its own, in which that way can be followed.

    Args:
      lhs, rhs, dimension_numbers: as for ``jax.lax.dot_general``.
      recipe: all numbers.
      key: for stochastic rounding; None makes noise from the bits of both operands, as in an NNX model.

    Raises:
      NotImplementedError: see ``to_qwix``.
    """
    rules = _rules({"": recipe})
    provider = _FromOperands(rules) if key is None else _WithKey(rules, key)
    model = _Contraction(_weights.hashable(dimension_numbers), rhs.shape, parent=None)
    quantized = qwix.quantize_model(model, provider)

    @jax.jit
    def run(lhs: jax.Array, kernel: jax.Array) -> jax.Array:
        return quantized.apply({"params": {"kernel": kernel}}, lhs)  # pyright: ignore[reportReturnType]

    return run(lhs, rhs.reshape((1,) * (1 + max(0, lhs.ndim - rhs.ndim)) + rhs.shape))


class _Groups(nn.Module):
    """One ragged matmul by the parameter ``kernel``, for Qwix to quantize."""

    def __call__(self, lhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
        kernel = self.get_variable("params", "kernel")
        assert kernel is not None
        return jax.lax.ragged_dot(lhs, kernel, group_sizes)


def ragged_dot(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, recipe: Recipe) -> jax.Array:
    """Contract groups of rows with float weights as Qwix trains; see ``dot_general``.

    Args:
      lhs, rhs, group_sizes: as for ``jax.lax.ragged_dot``.
      recipe: all numbers, without a ``qwix_config.ragged_lack``.
    """
    quantized = qwix.quantize_model(_Groups(parent=None), make_provider(_rules({"": recipe})))

    @jax.jit
    def run(lhs: jax.Array, kernel: jax.Array, sizes: jax.Array) -> jax.Array:
        return quantized.apply({"params": {"kernel": kernel}}, lhs, sizes)  # pyright: ignore[reportReturnType]

    return run(lhs, rhs, group_sizes)
