"""The interface of a backend, which native, AQT and Qwix implement."""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from jaxquant.backends.honours import NATIVE_INSTEAD, Honours, check_honoured
from jaxquant.config.backends import BACKENDS, BackendName, BackendRow, check_implementation
from jaxquant.core.dtypes import element
from jaxquant.core.qtensor import ConvertedKernel, QTensor
from jaxquant.core.recipe import Recipe
from jaxquant.ops.arguments import QuantState
from jaxquant.ops.dimensions import ANYHOW, How, Product

Array = jax.Array
Op = Literal["dot_general", "einsum"]
RANDOM_STREAM = "quant"
"""The random stream for stochastic rounding in a Linen model."""


@dataclasses.dataclass(frozen=True)
class OpOptions:
    """How the Linen module of an op is built.

    Attributes:
      quant_mode: "train", "convert" (write the converted kernel to the collection "aqt") or "serve" (read it).
      mesh_axes: logical axis names of the kernel; what is stored in serve mode is named after them.
      replicate_scale: leave every axis of stored scales unnamed, so that they are replicated.
      implementation: what computes the matmuls; None picks.
    """

    quant_mode: str = "train"
    mesh_axes: tuple[str | None, ...] = ()
    replicate_scale: bool = False
    implementation: str | None = None


TRAINING = OpOptions()


@dataclasses.dataclass(frozen=True)
class Given:
    """What a contraction of a traced function is given beside its operands.

    Attributes:
      recipe: all numbers.
      state: the amax state of a recipe with delayed scaling, of each group where there are groups.
      key: for stochastic rounding; None makes noise from the bits of what is multiplied or rounded.
      how: what computes it, and where the result lies.
      prepared: from ``Backend.share``, of this activation; None where the contraction has it alone.
    """

    recipe: Recipe
    state: QuantState | None = None
    key: Array | None = None
    how: How = ANYHOW
    prepared: Any = None


@functools.cache
def renamed(kind: type, name: str) -> Any:
    """Return a Linen class under another name, after which Linen names modules and their variables.

    It is one object for each name: jit finds what it traced only where modules are of the same class.
    """
    return types.new_class(
        name, (kind,), {}, lambda body: body.update(__module__=kind.__module__, __doc__=kind.__doc__)
    )


class Backend:
    """One backend; ``jaxquant.backends.load`` imports it by name.

    A backend with ``row.has_layer_ops`` implements ``linen_op``, for models that plumb quantization by hand.
    All implement ``contract``, which is what a traced function runs, ``quantize_weight``, which converts, and
    ``unsupported``, which says what they do not run.

    Attributes:
      name: key of ``BACKENDS``.
      row: what is known of it without its library.
      honours: fields of a recipe that it honours, with a rule for each; None for every field.
      op_names: names of its Linen modules for recipes without state; Linen names variables after them.
    """

    honours: Honours | None = None
    op_names: ClassVar[Mapping[Op, str]] = {}

    def __init__(self, name: BackendName) -> None:
        self.name: BackendName = name
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

    def forward_config(self, recipe: Recipe) -> Any:
        """Describe the forward operands as AQT's configs do, in ``fwd.dg_quantizer.lhs.numerics`` and ``….rhs.…``.

        MaxText's experts read there what their grouped matmul casts to: ``get_dtype()``, None for float.
        """
        sides = {side: _Numerics(recipe.resolve("fwd", side)) for side in ("lhs", "rhs")}
        quantizers = types.SimpleNamespace(
            **{side: types.SimpleNamespace(numerics=numerics) for side, numerics in sides.items()}
        )
        return types.SimpleNamespace(fwd=types.SimpleNamespace(dg_quantizer=quantizers))

    # -- training ----------------------------------------------------------------------------------------------------

    def linen_op(self, op: Op, recipe: Recipe, options: OpOptions = TRAINING) -> Callable[[], Any]:
        """Make a factory of Linen modules: a layer's ``dot_general_cls``, or its counterpart for an einsum.

        Args:
          op: which op.
          recipe: all numbers.
          options: how it is built.

        Raises:
          NotImplementedError: as ``check``.
        """
        raise self._absent("op to pass to a layer")

    def op_name(self, op: Op, recipe: Recipe | None) -> str:
        """Return the name of an op's Linen module for a recipe, after which Linen names its variables."""
        return self.op_names[op]

    def unsupported(self, operation: str, recipe: Recipe) -> str:
        """Explain why a contraction of a traced function does not run a recipe; "" where it does.

        Args:
          operation: primitive of the contraction, such as "dot_general".
          recipe: all numbers.
        """
        return "" if operation == "dot_general" else f"{self.row.title} has no {operation}; {NATIVE_INSTEAD}"

    def runner(self, operation: str, recipe: Recipe) -> Backend:
        """Return the backend that computes a contraction: this one, unless it was completed and lacks the op.

        Args:
          operation, recipe: as ``unsupported`` takes them.
        """
        return self

    def contract(
        self, lhs: Array, rhs: Array | ConvertedKernel, product: Product, given: Given, group_sizes: Array | None = None
    ) -> Array:
        """Contract an activation with a weight as the backend trains, and as it serves where the weight is converted.

        Args:
          lhs, rhs: activation and weight.
          product: what is computed of them.
          given: the recipe, and what comes with it.
          group_sizes: rows of each group of a ragged matmul, as for ``jax.lax.ragged_dot``; None for other operations.

        Raises:
          NotImplementedError: an option that the backend would drop.
        """
        raise self._absent("op for a function")

    def can_share(self, recipe: Recipe) -> bool:
        """Check whether contractions of one recipe can share an activation that is quantized once."""
        return False

    def share(
        self,
        x: Array,
        states: Sequence[QuantState],
        *,
        recipe: Recipe,
        axes: tuple[int, ...],
        implementation: str | None = None,
    ) -> Any:
        """Quantize an activation once for several contractions.

        Args:
          x: the activation.
          states: amax state of each contraction.
          recipe: of all of them, one that ``can_share``.
          axes: contraction axes of the activation.
          implementation: what computes the cast, None to pick.
        """
        raise self._absent("shared activation")

    # -- converted kernels -------------------------------------------------------------------------------------------

    def quantize_weight(
        self,
        operation: str,
        recipe: Recipe,
        weight: Array,
        axes: Sequence[int],
        state: Mapping[str, Mapping[str, Array]],
        batch: Sequence[int] = (),
    ) -> tuple[QTensor, Array | None]:
        """Quantize the weight of a contraction as its op does in training.

        Args:
          operation: primitive of the contraction.
          recipe: all numbers.
          weight: in the dtype in which the op reads it; of a ragged matmul, of shape (groups, contracting, free).
          axes: its contraction axes.
          state: the layer's quant state by tensor and field; {} for a recipe without.
          batch: its batch axes, which no block of scales crosses.

        Returns:
          The weight and the static scale of the activation, None where that is scaled dynamically: of shape (1,), with
          a leading axis of groups for a ragged matmul.
        """
        raise self._absent("conversion of a kernel")

    def _absent(self, what: str) -> NotImplementedError:
        return NotImplementedError(f"quant_backend {self.name!r} has no {what}; use quant_backend 'native'")


class LibraryBackend(Backend):
    """A backend whose numbers are another library's: what the library would drop is refused, sides have one dtype.

    Attributes:
      training: its ``dot_general`` (and ``ragged_dot``) of float operands of one dtype.
      serving: its ``dot_general`` (and ``ragged_dot``) of converted kernels, and what makes these.
    """

    training: ClassVar[Any]
    serving: ClassVar[Any]
    _native: Backend | None = None

    def completed_by(self, native: Backend) -> LibraryBackend:
        """Return this backend with another that computes what the library has no op for."""
        completed = copy.copy(self)
        completed._native = native
        return completed

    def runner(self, operation: str, recipe: Recipe) -> Backend:
        """Return what computes a contraction; see ``Backend.runner``."""
        return self if self._native is None or not self.lacks(operation, recipe) else self._native

    def unsupported(self, operation: str, recipe: Recipe) -> str:
        """Explain why an operation does not run a recipe; see ``Backend.unsupported``."""
        why = self.lacks(operation, recipe)
        return why if not why or self._native is None else self._native.unsupported(operation, recipe)

    def lacks(self, operation: str, recipe: Recipe) -> str:
        """Explain why the library itself does not run an operation by a recipe, "" where it does."""
        return super().unsupported(operation, recipe)

    def contract(
        self, lhs: Array, rhs: Array | ConvertedKernel, product: Product, given: Given, group_sizes: Array | None = None
    ) -> Array:
        """Compute the library's contraction; see ``Backend.contract``."""
        check_implementation(self.name, given.how.implementation)
        dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
        self._refuse_dropped(dtype, product, given.how)
        lhs, more = lhs.astype(dtype), {}
        if isinstance(rhs, ConvertedKernel):
            ops, rhs = self.serving, dataclasses.replace(rhs, dtype=dtype.name)
        else:
            ops, rhs, more = self.training, rhs.astype(dtype), {"key": given.key}
        if group_sizes is not None:
            return ops.ragged_dot(lhs, rhs, group_sizes, recipe=given.recipe)
        return ops.dot_general(lhs, rhs, product.numbers, recipe=given.recipe, **more)

    def quantize_weight(
        self,
        operation: str,
        recipe: Recipe,
        weight: Array,
        axes: Sequence[int],
        state: Mapping[str, Mapping[str, Array]],
        batch: Sequence[int] = (),
    ) -> tuple[QTensor, Array | None]:
        """Quantize the weight of a contraction; see ``Backend.quantize_weight``."""
        if operation == "ragged_dot_general":
            return self.serving.convert_groups(recipe, weight), None
        return self.serving.convert_kernel(recipe, weight, axes, state)

    def _refuse_dropped(self, dtype: Any, product: Product, how: How) -> None:
        """Refuse the options of a traced contraction that the library drops, those that change nothing apart."""
        asked = product.precision if isinstance(product.precision, tuple) else (product.precision,)
        is_other = product.dtype is not None and jnp.dtype(product.dtype) != dtype
        given = {
            "precision": next((each for each in asked if each not in (None, jax.lax.Precision.DEFAULT)), None),
            "preferred_element_type": jnp.dtype(product.dtype).name if is_other else None,
            "out_sharding": how.out_sharding,
        }
        for name, value in given.items():
            if value is not None:
                raise NotImplementedError(
                    f"{name} {value} of a contraction is dropped by {self.row.title}; {NATIVE_INSTEAD}"
                )


@dataclasses.dataclass(frozen=True, slots=True)
class _Numerics:
    """What an operand is cast to, under the names of AQT's numerics."""

    spec: Any

    @property
    def dtype(self) -> Any:
        return None if self.spec is None else jnp.dtype(self.spec.dtype)

    @property
    def bits(self) -> int | None:
        return None if self.spec is None else element(self.spec.dtype).bits

    def get_dtype(self) -> Any:
        return self.dtype
