"""What every backend does: the protocol that native, AQT and Qwix implement."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax

from jaxquant.backends.honours import Honours, check_honoured
from jaxquant.config.backends import BACKENDS, BackendName, BackendRow
from jaxquant.core.qtensor import ConvertedKernel, QTensor
from jaxquant.core.recipe import Recipe

Array = jax.Array
Op = Literal["dot_general", "einsum"]
RANDOM_STREAM = "quant"
"""The random stream for stochastic rounding in a Linen model."""


class Backend:
    """One backend; ``jaxquant.backends.load`` imports it by name.

    A backend with ``row.has_layer_ops`` implements ``linen_op``, the others ``quantize_linen`` and ``quantize_nnx``.
    All implement ``dot_general`` and ``einsum`` on converted kernels, and ``convert_kernel``.

    Attributes:
      name: key of ``BACKENDS``.
      row: what is known of it without its library.
      honours: fields of a recipe that it honours, with a rule for each; None for every field.
      op_names: names of its Linen modules for recipes without state; Linen names variables after them.
      drops: attributes of a layer that it would ignore, so that a layer which has one is refused.
      knows_weights_by_shape: whether it takes an input of the shape of a layer's parameter for a weight.
    """

    honours: Honours | None = None
    op_names: ClassVar[Mapping[Op, str]] = {}
    drops: tuple[str, ...] = ()
    knows_weights_by_shape = False

    def __init__(self, name: BackendName) -> None:
        self.name = name
        self.row: BackendRow = BACKENDS[name]

    def check(self, recipe: Recipe) -> None:
        """Refuse a recipe that the backend does not honour in full.

        Args:
          recipe: all numbers.

        Raises:
          NotImplementedError: names the recipe, the operand, the field and what would do.
        """
        if self.honours is not None:
            check_honoured(self.row.title, self.honours, recipe)

    # -- training ----------------------------------------------------------------------------------------------------

    def linen_op(
        self,
        op: Op,
        recipe: Recipe,
        *,
        quant_mode: str = "train",
        mesh_axes: tuple[str | None, ...] = (),
        replicate_scale: bool = False,
        implementation: str | None = None,
    ) -> Callable[[], Any]:
        """Make a factory of Linen modules: a layer's ``dot_general_cls``, or its counterpart for an einsum.

        Args:
          op: which op.
          recipe: all numbers.
          quant_mode: "train", "convert" (write the converted kernel to the collection "aqt") or "serve" (read it).
          mesh_axes: logical axis names of the kernel; what is stored in serve mode is named after them.
          replicate_scale: leave every axis of stored scales unnamed, so that they are replicated.
          implementation: what computes the matmuls; None picks.

        Raises:
          NotImplementedError: as ``check``.
        """
        raise self._absent("op to pass to a layer")

    def nnx_op(
        self,
        recipe: Recipe,
        path: str,
        kernel: Any,
        stacked: int,
        *,
        axes: tuple[int, ...] = (),
        equation: str = "",
        implementation: str | None = None,
    ) -> Any:
        """Make the op of an NNX layer, which holds the layer's quant state.

        Args:
          recipe: all numbers.
          path: of the layer.
          kernel: the layer's kernel variable.
          stacked: leading axes of it that nnx.vmap added.
          axes: contraction axes of the kernel, for a ``dot_general``.
          equation: of the layer, for an einsum.
          implementation: what computes the matmuls; None picks.
        """
        raise self._absent("op for an NNX layer")

    def quantize_linen(
        self, model: Any, recipes: Mapping[str, Recipe], methods: Sequence[str], layers: Sequence[str]
    ) -> Any:
        """Return a Linen model whose layers run quantized, where no op can be passed to them.

        Args:
          model: the model; it stays as it is.
          recipes: of the layers to quantize, by path.
          methods: methods of the model that run quantized.
          layers: paths of all its linear layers.
        """
        raise self._absent("way to quantize a whole Linen model")

    def quantize_nnx(self, model: Any, recipes: Mapping[str, Recipe], methods: Sequence[str]) -> Any:
        """Return an NNX model whose layers run quantized; as ``quantize_linen``."""
        raise self._absent("way to quantize a whole NNX model")

    # -- converted kernels -------------------------------------------------------------------------------------------

    def convert_kernel(
        self,
        recipe: Recipe,
        kernel: Array,
        axes: Sequence[int],
        state: Mapping[str, Mapping[str, Array]],
        batch: Sequence[int] = (),
    ) -> tuple[QTensor, Array | None]:
        """Quantize a layer's kernel as its op does in training.

        Args:
          recipe: all numbers.
          kernel: in the dtype in which the op reads it.
          axes: its contraction axes.
          state: the layer's quant state by tensor and field; {} for a recipe without.
          batch: its batch axes, which no block of scales crosses.

        Returns:
          The kernel and the static scale of the activation, shape (1,), None where that is scaled dynamically.
        """
        raise self._absent("conversion of a kernel")

    def dot_general(self, lhs: Array, rhs: ConvertedKernel, dimension_numbers: Any, *args: Any, **kwargs: Any) -> Array:
        """Compute ``jax.lax.dot_general`` of an activation and a converted kernel.

        Args:
          lhs, rhs, dimension_numbers: as for ``jax.lax.dot_general``.
          args, kwargs: its other arguments, and ``recipe`` and ``implementation``.
        """
        raise self._absent("dot_general on converted kernels")

    def einsum(self, equation: str, lhs: Array, rhs: ConvertedKernel, *args: Any, **kwargs: Any) -> Array:
        """Compute an einsum of an activation and a converted kernel; as ``dot_general``."""
        raise self._absent("einsum on converted kernels")

    def converted_linen_op(
        self, op: Op, recipe: Recipe, *, implementation: str | None = None
    ) -> Callable[[], Callable[..., Array]]:
        """Make a factory of ops on converted kernels, for a Linen layer; as ``linen_op``."""
        run = functools.partial(getattr(self, op), recipe=recipe, **chosen(implementation))
        return lambda: run

    def _absent(self, what: str) -> NotImplementedError:
        return NotImplementedError(f"quant_backend {self.name!r} has no {what}; use quant_backend 'native'")


def chosen(implementation: str | None) -> dict[str, Any]:
    """Return the keyword of an op for an implementation that was asked for, none where the op picks."""
    return {} if implementation is None else {"implementation": implementation}
