"""Input of an exporter: named float tensors that are read one at a time, their layout, and the model's tokenizer."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant.config.decoder import DecoderShape
from jaxquant.core.blocks import BlocksError
from jaxquant.core.qtensor import QTensor, dequantize, is_tensor
from jaxquant.export.hf import OperandSpec
from jaxquant.export.hf.quantization import FUSED
from jaxquant.export.layouts import is_finite, is_true, to_host

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


@dataclasses.dataclass(frozen=True)
class GgufLayout:
    """Contents of a GGUF file without the tokenizer and the values of tensors.

    Attributes:
      metadata: values by key; a ``U32`` is written as uint32, another integer as int32.
      tensors: names of the tensors, each with the names in ``Layout.tensors`` of the parts that are stored together.
      extra: tensors in float32 that are not in ``Layout.tensors``, by name.
      heads: number of heads of each tensor whose rows are permuted, by name in ``Layout.tensors``.
      offsets: number that is added to a tensor in the file, by name in ``Layout.tensors``.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, list[str]]
    extra: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    heads: Mapping[str, int] = dataclasses.field(default_factory=dict)
    offsets: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Tensors of a checkpoint, without their values.

    Attributes:
      tensors: shapes of all tensors by name, in the order in which they are written; matrices are [out, in].
      linears: shapes of the linear layers that a format quantizes, by name without ``.weight``.
      config: ``config.json`` without dtype, special tokens and quantization.
      shape: the decoder that has these tensors, or None for another model.
      has_fused_experts: whether files store the experts of a layer together, as gpt-oss does (``fused``).
      gguf: contents of a GGUF file, or None if they follow from ``shape``.
    """

    tensors: Mapping[str, tuple[int, ...]]
    linears: Mapping[str, tuple[int, ...]]
    config: Mapping[str, Any]
    shape: DecoderShape | None = None
    has_fused_experts: bool = False
    gguf: GgufLayout | None = None

    @functools.cached_property
    def float_linears(self) -> list[str]:
        """Names of the head and of other matrices that stay in float, such as routers; not of the embedding."""
        others = {*self.linears, EMBEDDING, HEAD}
        found = (name.removesuffix(".weight") for name, shape in self.tensors.items() if len(shape) == 2)
        return [HEAD, *(name for name in found if name not in others)]


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Contents of a tokenizer for writing files.

    Attributes:
      tokens: texts of the tokens in order, spelled as in byte-level BPE; there are fewer tokens than rows of a padded
        embedding.
      merges: pairs in order, joined by a space.
      kinds: types of the tokens in GGUF files.
      special: numbers of the special tokens ``bos``, ``eos`` and ``pad``. Only ``eos`` can have several numbers; the
        first one is the tokenizer's own.
      adds_bos: whether the tokenizer adds ``bos`` before a text.
      tokenizer_json: contents of ``tokenizer.json``, the file of the tokenizers package.
      pre: name of the pre-tokenizer in GGUF files, or "" if GGUF has no name for it.
      scores: scores of the tokens of a SentencePiece tokenizer, in GGUF files; empty for byte-level BPE.
      origin: file or metadata that the tokenizer was read from.
      files: contents of other files of the tokenizer by name, which are copied to Hugging Face folders and runs.
    """

    tokens: tuple[str, ...]
    merges: tuple[str, ...]
    kinds: tuple[int, ...]
    special: Mapping[str, tuple[int, ...]]
    adds_bos: bool
    tokenizer_json: Mapping[str, Any]
    pre: str
    scores: tuple[float, ...]
    origin: str
    files: Mapping[str, str]

    @property
    def ids(self) -> dict[str, Any]:
        """Token numbers in ``config.json`` and ``generation_config.json``; several end tokens are a list."""
        return {f"{kind}_token_id": [*ids] if ids[1:] else (ids or (None,))[0] for kind, ids in self.special.items()}


class ScaledElements(NamedTuple):
    """A quantized weight [out, in].

    Attributes:
      elements: elements [out, in].
      scale: scale of each block.
      outer: outer scale of the tensor as a scalar; 1 for a format without outer scales.
      is_exact: whether the weight has a single scale in each block; a tracer for a traced weight with several scales,
        which can be equal.
    """

    elements: np.ndarray
    scale: np.ndarray
    outer: np.ndarray
    is_exact: Any = True

    @classmethod
    def from_qtensor(cls, tensor: QTensor, operand: OperandSpec) -> ScaledElements | None:
        """Return a tensor [out, in] with a scale for each block of a format, or None if the dtypes differ."""
        if tensor.codec is not None or tensor.zero_point is not None:
            return None
        whole = tensor.shape if operand.is_tensor else (1, tensor.shape[1])
        numbers = (tensor.qvalue.dtype.name, tensor.scale.dtype.name, tensor.outer_scale is not None)
        if numbers != (operand.dtype, operand.scale_dtype, operand.outer_scale):
            return None
        scale, blocks = to_host(tensor.scale), zip(tensor.blocks, operand.block_size or whole, strict=True)
        is_exact: Any = True
        for axis, (own, wanted) in enumerate(blocks):
            places = np.arange(tensor.shape[axis]) // own
            firsts = places[::wanted]
            equal = np.repeat(firsts, wanted)[: len(places)]
            if (places != equal).any():
                is_exact &= (scale.take(places, axis) == scale.take(equal, axis)).all()
            if not np.array_equal(firsts, np.arange(scale.shape[axis])):  # explicit sharding does not support a gather
                scale = scale.take(firsts, axis)
        outer = np.ones((), np.float32) if tensor.outer_scale is None else to_host(tensor.outer_scale).reshape(())
        return cls(to_host(tensor.qvalue), scale.reshape(()) if operand.is_tensor else scale, outer, is_exact)


@dataclasses.dataclass(frozen=True)
class Source:
    """A model to export.

    Attributes:
      layout: tensors of the model and its ``config.json``.
      read: function that returns a tensor of ``layout`` by name, as a float32 array.
      vocabulary: tokenizer of the model, or None to write no tokenizer files.
      input_amax: largest magnitude of the input of each linear layer by name, for formats with static scales.
      quantized: function that returns the weight [out, in] of a linear layer by name, as a ``QTensor`` with the stored
        values or the values of the training forward pass. The function returns None for float weights, and if the
        blocks cannot be arranged as [out, in].
    """

    layout: Layout
    read: Callable[[str], np.ndarray]
    vocabulary: Vocabulary | None = None
    input_amax: Mapping[str, float] = dataclasses.field(default_factory=dict)
    quantized: Callable[[str], QTensor | None] = lambda name: None

    @property
    def shape(self) -> DecoderShape:
        """Shape of the decoder, for a source that was read as a decoder of a known family."""
        assert self.layout.shape is not None
        return self.layout.shape

    def weight(self, module: str) -> np.ndarray:
        """Return the weight [out, in] of a linear layer."""
        return self.read(f"{module}.weight")

    def finite(self, name: str) -> np.ndarray:
        """Return a tensor in float32, after checking its shape and, unless it is traced, its values.

        Raises:
          ValueError: the shape is not the model's, or a value is not finite.
        """
        array, shape = to_host(self.read(name)).astype(np.float32, copy=False), self.layout.tensors[name]
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, but must have shape {shape}")
        if not is_finite(array):
            raise ValueError(f"{name} has values that are not finite; export another checkpoint")
        return array

    def scaled_elements(self, module: str, operand: OperandSpec) -> ScaledElements | None:
        """Return the stored elements and scales of a linear layer's weight [out, in], in the blocks of a format.

        If the weight has larger blocks than the format, their scales are repeated. Returns None if the dtypes or
        scales differ from the format's, or if servers fuse the layer with others and their per-tensor scales differ;
        for traced weights, ``is_exact`` is then false.
        """
        elements: dict[str, ScaledElements] = {}
        for name in self._fused_with(module) if operand.is_tensor else (module,):
            tensor = self.quantized(name)
            scaled = None if tensor is None else ScaledElements.from_qtensor(tensor, operand)
            if scaled is None:
                return None
            elements[name] = scaled
        own = elements.pop(module)
        equal = [each.is_exact & (each.scale == own.scale).all() for each in elements.values()]
        is_exact = functools.reduce(operator.and_, equal, own.is_exact)
        return own._replace(is_exact=is_exact) if is_true(is_exact, if_traced=True) else None

    def fused_amax(self, module: str) -> jax.Array:
        """Return the largest magnitude of a weight and of the weights that servers fuse with it."""
        return largest([abs(self.weight(name)).max() for name in self._fused_with(module)])

    def fused_input_amax(self, module: str) -> jax.Array:
        """Return the largest magnitude of the input of a linear layer and of the layers that servers fuse with it.

        Raises:
          ValueError: the input was not measured.
        """
        try:
            amaxes = [self.input_amax[name] for name in self._fused_with(module)]
        except KeyError as error:
            raise ValueError(
                f"the input of {error.args[0]} has no amax, but this format stores its scale; calibrate the "
                "model, or use a format with dynamic scales"
            ) from None
        if not all(is_true((value > 0) & (value < math.inf), if_traced=True) for value in amaxes):
            raise ValueError(f"the input of {module} has the invalid amax {max(amaxes)}; calibrate the model")
        return largest(amaxes)

    def _fused_with(self, module: str) -> list[str]:
        return [name for name in fused_with(module) if name in self.layout.linears]


def largest(values: list[Any]) -> jax.Array:
    """Return the largest of several numbers in float32."""
    return functools.reduce(jnp.maximum, [jnp.asarray(value, np.float32) for value in values])


def quantized_matrix(tensor: QTensor, shape: tuple[int, ...]) -> QTensor | None:
    """Return a quantized kernel [in…, out…] as a matrix [out, in] or [out, bytes].

    Args:
      tensor: kernel.
      shape: [out, in].

    Returns:
      The matrix, or None if its blocks cannot be transposed.
    """
    if tensor.codec is None:
        try:
            return tensor.reshape(shape[::-1]).transpose((1, 0))
        except BlocksError:
            return None
    contraction = [axis for axis, size in enumerate(tensor.blocks) if size > 1]
    if contraction != list(range(contraction[-1] + 1)):
        return None
    data = to_host(tensor.qvalue).reshape(-1, shape[0]).T
    return QTensor(data, block=(1, shape[1]), codec=tensor.codec)  # pyright: ignore[reportArgumentType]


def layer_slice(leaf: Any, index: tuple[int, ...]) -> Any:
    """Return the part of a parameter at an index of its leading axes, along which layers or experts are stacked."""
    if not index:
        return leaf
    # A part of size 1 along an axis is shared by all of its indices.
    cut = lambda part: part[tuple(at if size > 1 else 0 for at, size in zip(index, part.shape, strict=False))]  # noqa: E731
    made = jax.tree.map(cut, leaf)
    return dataclasses.replace(made, block=leaf.block and leaf.blocks[len(index) :]) if is_tensor(leaf) else made


def to_float(leaf: Any) -> np.ndarray:
    """Return a parameter, which can be a ``QTensor``, in float32."""
    return to_host(dequantize(leaf) if isinstance(leaf, QTensor) else leaf).astype(np.float32, copy=False)


def fused_with(module: str) -> tuple[str, ...]:
    """Return a linear layer and the layers that servers fuse with it; all of them must share per-tensor scales."""
    stem, _, last = module.rpartition(".")
    return next((tuple(f"{stem}.{each}" for each in group) for group in FUSED.values() if last in group), (module,))
