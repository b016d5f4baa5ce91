"""Qwix as a backend: its rules in training, and its arrays with converted kernels. Only this file imports Qwix.

Qwix differs from other backends under every recipe:

- Qwix divides by the scale, so ``TensorSpec.reciprocal`` True differs in the last bit of a qvalue. Scales have the
dtype
  of the tensor (bfloat16 in a bfloat16 model).
- Qwix maps the amax of an integer weight to qmax + 0.5 and does not round scales, so ``TensorSpec.keeps_grid`` has no
effect. - ``MatmulSpec.shards`` splits the **last** contraction axis of the weight gradient (the sequence, for a batch
of
  sequences); the other backends split the first. Blocks of fewer than 128 elements are dequantized before the matmul.
- Both backward matmuls round with the same noise.
- Qwix ignores ``precision`` and ``preferred_element_type``; a contraction that sets one of these is rejected.
- In Qwix's ragged matmul, all groups share one scale for each column of the weights, so small weights of an expert can
  become zero. The backend does not use this matmul: ragged matmuls run on the native backend or stay in float.
- Qwix treats an operand with the shape of a parameter as a weight. In ``_train``, the kernel therefore has more axes
  than any activation, and a separate jit, so that the call selects the weight, as in the other backends.

``jaxquant.config.backends`` lists the tested versions of Qwix. Everything that this file imports is public in them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxquant.backends._versions import require
from jaxquant.backends.base import LibraryBackend, Setup, Weight
from jaxquant.backends.honours import NATIVE_INSTEAD, refuse
from jaxquant.backends.qwix_config import FOUR_BITS, HONOURS, to_qwix
from jaxquant.config.backends import BACKENDS
from jaxquant.core.qtensor import QTensor
from jaxquant.core.recipe import Operand, Recipe, TensorSpec
from jaxquant.core.rounding import RandomKey, noise, operands_key
from jaxquant.core.sharding import device_kind_of, platform_of

require(BACKENDS["qwix"])

import qwix  # noqa: E402

Array = jax.Array


def _rule(pattern: str, fields: Mapping[str, Any]) -> qwix.QtRule:
    return qwix.QtRule(module_path=pattern, op_names=("dot_general", "einsum"), **fields)


class _Provider(qwix.QtProvider):
    """Provider whose noise for stochastic rounding depends on a key, or on a layer's operands if there is no key.

    Qwix would use an RNG stream of the module, which a traced matmul does not have.
    """

    def __init__(self, rule: qwix.QtRule, key: RandomKey | None) -> None:
        super().__init__([rule])
        self._noise_key = key

    def _create_dot_general_qt_config(self, rule: qwix.QtRule, op_id: str, lhs: Any, rhs: Any) -> Any:
        if rule.bwd_stochastic_rounding is None:
            return super()._create_dot_general_qt_config(rule, op_id, lhs, rhs)
        plain = dataclasses.replace(rule, bwd_stochastic_rounding=None)
        config = super()._create_dot_general_qt_config(plain, op_id, lhs, rhs)
        noise = _Noise(operands_key(lhs, rhs) if self._noise_key is None else self._noise_key)
        chosen = rule.additional_qt_config or {}
        fields = ("dlhs_stochastic_rounding_noise_fn", "drhs_stochastic_rounding_noise_fn")
        return dataclasses.replace(config, **{name: chosen.get(name, noise) for name in fields})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Noise:
    """Function that returns uniform noise in [-0.5, 0.5); a pytree, because Qwix passes it through a custom VJP."""

    key: Any

    def __call__(self, shape: tuple[int, ...]) -> Any:
        return noise(self.key, shape) - 0.5


class _Contraction(nn.Module):
    """One matmul with the parameter ``kernel``, for Qwix to quantize.

    Attributes:
      shape: shape of the kernel, which may be stored with more axes.
      numbers: dimension numbers of the matmul.
    """

    shape: tuple[int, ...]
    numbers: Any

    def __call__(self, lhs: jax.Array) -> jax.Array:
        kernel = self.get_variable("params", "kernel")
        assert kernel is not None
        return jax.lax.dot_general(lhs, kernel.reshape(self.shape), self.numbers)


def _train(recipe: Recipe, lhs: Array, rhs: Array, numbers: Any, key: RandomKey | None) -> Array:
    """Contract an activation with a float weight, as in Qwix's training.

    Qwix has no public function for this, so Qwix's rules quantize a module of one matmul. Qwix recognizes a weight by
    its data flow from a parameter or by a parameter's shape. Here the parameter has more axes than any operand, and the
    matmul has a separate jit, in which Qwix can follow the data flow.
    """
    kernel = rhs.reshape((1,) * (1 + max(0, lhs.ndim - rhs.ndim)) + rhs.shape)
    contraction = _Contraction(rhs.shape, numbers, parent=None)
    quantized = qwix.quantize_model(contraction, _Provider(_rule("", to_qwix(recipe)), key))

    @jax.jit
    def run(lhs: Array, kernel: Array) -> Array:
        return quantized.apply({"params": {"kernel": kernel}}, lhs)  # pyright: ignore[reportReturnType]

    return run(lhs, kernel)


# -- converted kernels -------------------------------------------------------------------------------------------------


def _quantize(x: Array, spec: Operand, axes: Sequence[int]) -> Any:
    assert isinstance(spec, TensorSpec)
    others = [] if spec.granularity == "per_tensor" else [axis for axis in range(x.ndim) if axis not in axes]
    return qwix.quantize(x, getattr(jnp, spec.dtype), channelwise_axes=others, calibration_method=str(spec.calibration))


def _convert(recipe: Recipe, weight: Array, axes: Sequence[int]) -> QTensor:
    tensor = _quantize(weight, recipe.fwd.rhs, axes)
    return QTensor(tensor.qvalue, tensor.scale.astype(jnp.float32), tensor.zero_point)


def _qarray(weight: QTensor) -> Any:
    return qwix.QArray(weight.qvalue, weight.scale.astype(weight.float_dtype()), weight.zero_point, weight.qvalue.dtype)


@functools.partial(jax.jit, static_argnames=("recipe", "numbers"))
def _serve(recipe: Recipe, lhs: Array, weight: QTensor, numbers: Any) -> Array:
    activation = lhs if recipe.fwd.lhs is None else _quantize(lhs, recipe.fwd.lhs, numbers[0][0])
    return qwix.dot_general(activation, _qarray(weight), numbers)


class QwixBackend(LibraryBackend):
    """Qwix's rules on a module of one matmul, and its op on converted kernels."""

    honours = HONOURS
    dtype_faults = {"float16": "rounds most weights to zero in float16, because scales below 0.008 become 1"}  # noqa: RUF012
    translate, contract_float = staticmethod(to_qwix), staticmethod(_train)
    contract_converted, convert_weight = staticmethod(_serve), staticmethod(_convert)

    def make_rules(self, entries: Sequence[tuple[str, Recipe | None]]) -> list[Any]:
        """Return Qwix's rules for regexes and recipes, for ``qwix.quantize_model``; a recipe of None means float.

        Raises:
          NotImplementedError: Qwix does not support a recipe.
        """
        return [_rule(pattern, {} if recipe is None else to_qwix(recipe)) for pattern, recipe in entries]

    def make_provider(self, rules: Sequence[Any]) -> Any:
        """Return Qwix's provider for its rules."""
        return qwix.QtProvider(list(rules))

    def contract(self, lhs: Array, rhs: Weight, setup: Setup, group_sizes: Array | None = None) -> Array:
        """Run Qwix's contraction, or raise if a GPU compiler would fail; see ``Backend.contract``."""
        dtypes = {spec.dtype for spec in setup.recipe.specs.values() if isinstance(spec, TensorSpec)}
        if platform_of(lhs) == "cpu" and dtypes & FOUR_BITS:
            return self._contract_wide(lhs, rhs, setup)
        if platform_of(lhs) == "gpu" and "float4_e2m1fn" in dtypes:
            what = f"matmuls of float4_e2m1fn on {device_kind_of(lhs)}"
            raise refuse("Qwix", setup.recipe, "", what, f"{NATIVE_INSTEAD}, which multiplies float4_e2m1fn as e4m3")
        return super().contract(lhs, rhs, setup, group_sizes)

    def _contract_wide(self, lhs: Array, rhs: Array | QTensor, setup: Setup) -> Array:
        """Contract with at least two free axes of the activation: XLA for CPUs fails on 4 bits without a reshape."""
        (contract, others), (batch, rhs_batch) = setup.numbers
        new = max(0, 2 - (lhs.ndim - len(contract) - len(batch)))
        contract, batch = ([axis % lhs.ndim + new for axis in axes] for axes in (contract, batch))
        setup = dataclasses.replace(setup, numbers=((contract, others), (batch, rhs_batch)))
        out = super().contract(lhs.reshape((1,) * new + lhs.shape), rhs, setup)
        return out.squeeze(range(len(batch), len(batch) + new))


BACKEND = QwixBackend("qwix")
