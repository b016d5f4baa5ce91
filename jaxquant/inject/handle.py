"""configure_quantization: a handle for models that plumb quantization through their layers by hand, as MaxText's do."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from jaxquant.config.quant_config import QuantConfig
from jaxquant.config.rules import Resolver
from jaxquant.core.recipe import Recipe


class QuantMode(enum.Enum):
    """What a model is built for: training, writing quantized parameters, or running on them."""

    TRAIN = "train"
    CONVERT = "convert"
    SERVE = "serve"


def get_quant_mode(quant_mode_str: str = "train") -> QuantMode:
    """Read a mode.

    Args:
      quant_mode_str: "train", "convert" or "serve".

    Raises:
      ValueError: another string.
    """
    try:
        return QuantMode(quant_mode_str)
    except ValueError:
        known = ", ".join(repr(mode.value) for mode in QuantMode)
        raise ValueError(f"quant_mode_str {quant_mode_str!r} is not a mode; known ones are {known}") from None


@dataclasses.dataclass(frozen=True)
class Quantization:
    """A config made ready for one backend and mode.

    Attributes:
      backend: "aqt" or "native".
      quant_mode: what the model is built for.
      replicate_scale: the stored scales of a sharded kernel are replicated.
      resolver: decides the recipe of each layer by its path.
      base: recipe of the layers that no rule names; None where a file or rules alone decide.
    """

    backend: str
    quant_mode: QuantMode
    replicate_scale: bool
    resolver: Resolver
    base: Recipe | None = None

    def dot_general_cls(self, mesh_axes: tuple[str | None, ...] = ()) -> Callable[[], nn.Module]:
        """Make the ``dot_general_cls`` of a Linen layer; the module that it makes decides by the layer's path.

        Args:
          mesh_axes: logical axis names of the kernel, for the stored qvalue and scale in serve mode.
        """
        kind = AqtDotGeneral if self.backend == "aqt" else QuantDotGeneral
        return lambda: kind(self, tuple(mesh_axes), name=self._name("dot_general"))

    def einsum(self, mesh_axes: tuple[str | None, ...] = ()) -> nn.Module:
        """Make an einsum module, called as ``module(equation, activation, weight)``; to be called inside a layer."""
        kind = AqtEinsum if self.backend == "aqt" else QuantEinsum
        return kind(self, tuple(mesh_axes), name=self._name("einsum"))

    def _name(self, op: str) -> str | None:
        """Give the name that the backend's own op would take in a layer, for state of delayed scaling flax's."""
        factory = None if self.base is None else self.op_cls(op, self.base, ())
        return factory.keywords.get("name") if isinstance(factory, functools.partial) else None

    def op_cls(self, name: str, recipe: Recipe, mesh_axes: tuple[str | None, ...]) -> Callable[[], nn.Module]:
        """Make a factory of the backend's op ("dot_general" or "einsum") for one recipe."""
        # Imported late: a backend's library is needed only where a config asks for it.
        if self.backend == "aqt":
            from jaxquant.backends import aqt

            make = aqt.dot_general_cls if name == "dot_general" else aqt.einsum_cls
            return make(
                recipe,
                mesh_axes=mesh_axes,
                quant_mode=self.quant_mode.value,
                replicate_scale=self.replicate_scale,
            )
        from jaxquant.backends import native

        return (native.dot_general_cls if name == "dot_general" else native.einsum_cls)(recipe)


class _ByPath(nn.Module):
    """An op that asks the resolver for the recipe of the layer it lives in, or stays float."""

    quantization: Quantization
    mesh_axes: tuple[str | None, ...] = ()

    def _op(self, name: str, out_features: int) -> nn.Module | None:
        recipe = self.quantization.resolver("/".join(map(str, self.path[:-1])), out_features).recipe
        if recipe is None:
            return None
        op = self.quantization.op_cls(name, recipe, self.mesh_axes)()
        nn.share_scope(self, op)  # the op's variables lie where this module's would
        return op


class _DotGeneral(_ByPath):
    @nn.compact
    def __call__(self, lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, *args: Any, **kwargs: Any) -> jax.Array:
        (_, contracting), (_, batch) = dimension_numbers
        kept = [size for axis, size in enumerate(rhs.shape) if axis not in (*contracting, *batch)]
        op = self._op("dot_general", math.prod(kept)) or jax.lax.dot_general
        return op(lhs, rhs, dimension_numbers, *args, **kwargs)


class _Einsum(_ByPath):
    @nn.compact
    def __call__(self, equation: str, lhs: jax.Array, rhs: jax.Array, **options: Any) -> jax.Array:
        inputs, output = equation.replace(" ", "").split("->")
        left, right = inputs.split(",")
        out_features = math.prod(
            size for label, size in zip(right, rhs.shape, strict=False) if label in output and label not in left
        )
        op = self._op("einsum", out_features)
        return (op or jax.numpy.einsum)(equation, lhs, rhs, **options)


# Linen names a module after its class: these give AQT's own tree, `<layer>/AqtDotGeneral_0/qrhs/frozen`.
class AqtDotGeneral(_DotGeneral):
    """AQT's ``dot_general`` by path."""


class AqtEinsum(_Einsum):
    """AQT's einsum by path."""


class QuantDotGeneral(_DotGeneral):
    """The native ``dot_general`` by path."""


class QuantEinsum(_Einsum):
    """The native einsum by path."""


def configure_quantization(config: Any, quant_mode_str: str = "train") -> Quantization | None:
    """Make the handle of a config, for models that pass quantization to their layers by hand.

    Args:
      config: anything that ``QuantConfig.from_any`` takes.
      quant_mode_str: "train", "convert" or "serve".

    Returns:
      None where the config quantizes nothing.

    Raises:
      ValueError: an unknown mode, or a config whose backend replaces functions of a whole model (Qwix).
      NotImplementedError: convert or serve on the native backend.
    """
    mode = get_quant_mode(quant_mode_str)
    config = QuantConfig.from_any(config)
    resolver, backend = config.resolver(), config.resolved_backend
    if resolver is None or backend is None:
        return None
    if backend == "qwix":
        raise ValueError(
            f"quantization {config.quantization!r} runs on quant_backend 'qwix', which quantizes a whole model and has "
            "no op to pass to a layer; call jaxquant.maybe_quantize_model(model, config, *example_inputs)"
        )
    if backend == "native" and mode is not QuantMode.TRAIN:
        raise NotImplementedError(
            f"quant_mode_str {mode.value!r} is not implemented on quant_backend 'native', which has 'train' only; "
            "use quant_backend 'aqt'"
        )
    return Quantization(backend, mode, config.replicate_quant_scale, resolver, config.recipe())


def in_convert_mode(quant: Quantization | None) -> bool:
    """Whether the model writes quantized parameters."""
    return quant is not None and quant.quant_mode is QuantMode.CONVERT


def in_serve_mode(quant: Quantization | None) -> bool:
    """Whether the model runs on quantized parameters."""
    return quant is not None and quant.quant_mode is QuantMode.SERVE
