"""Input of an exporter: named float tensors that are read one at a time, their layout, and the model's tokenizer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxquant.core.qtensor import QTensor
from jaxquant.export.decoder import DecoderShape
from jaxquant.export.hf import OperandSpec
from jaxquant.export.hf.quantization import FUSED
from jaxquant.export.layouts import is_finite

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Tensors of a checkpoint, without their values.

    Attributes:
      tensors: shapes of all tensors by name, in the order in which they are written; matrices are [out, in].
      linears: shapes of the linear layers that a format quantizes, by name without ``.weight``.
      config: ``config.json`` without dtype, special tokens and quantization.
      shape: the decoder that has these tensors, or None for another model.
      has_fused_experts: whether files store the experts of a layer together, as gpt-oss does (``fused``).
    """

    tensors: Mapping[str, tuple[int, ...]]
    linears: Mapping[str, tuple[int, ...]]
    config: Mapping[str, Any]
    shape: DecoderShape | None = None
    has_fused_experts: bool = False

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
    """A quantized weight [out, in]: elements, scale of each block, and outer scale [] (1 if there is none)."""

    elements: np.ndarray
    scale: np.ndarray
    outer: np.ndarray

    @classmethod
    def from_qtensor(cls, tensor: QTensor, operand: OperandSpec) -> ScaledElements | None:
        """Return a tensor [out, in] with a scale for each block of a format, or None if its dtypes or blocks differ."""
        if tensor.codec is not None or tensor.zero_point is not None:
            return None
        whole = tensor.shape if operand.is_tensor else (1, tensor.shape[1])
        numbers = (tensor.qvalue.dtype.name, tensor.scale.dtype.name, tensor.outer_scale is not None)
        if numbers != (operand.dtype, operand.scale_dtype, operand.outer_scale):
            return None
        places = []
        for size, own, wanted in zip(tensor.shape, tensor.blocks, operand.block_size or whole, strict=True):
            if own < size and own % wanted:
                return None
            places.append(np.arange(0, size, wanted) // own)
        outer = np.ones((), np.float32) if tensor.outer_scale is None else np.asarray(tensor.outer_scale).reshape(())
        scale = np.asarray(tensor.scale)[np.ix_(*places)]
        return cls(np.asarray(tensor.qvalue), scale.reshape(()) if operand.is_tensor else scale, outer)


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

    def weight(self, module: str) -> np.ndarray:
        """Return the weight [out, in] of a linear layer."""
        return self.read(f"{module}.weight")

    def finite(self, name: str) -> np.ndarray:
        """Return a tensor in float32, after checking its shape and values.

        Raises:
          ValueError: the shape is not the model's, or a value is not finite.
        """
        array, shape = np.asarray(self.read(name), np.float32), self.layout.tensors[name]
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, but must have shape {shape}")
        if not is_finite(array):
            raise ValueError(f"{name} has values that are not finite; export another checkpoint")
        return array

    def scaled_elements(self, module: str, operand: OperandSpec) -> ScaledElements | None:
        """Return the stored elements and scales of a linear layer's weight [out, in], in the blocks of a format.

        If the weight has larger blocks than the format, their scales are repeated. Returns None if the dtypes or
        blocks differ from the format's, or if servers fuse the layer with others and their per-tensor scales differ.
        """
        elements: dict[str, ScaledElements] = {}
        for name in fused_with(module) if operand.is_tensor else (module,):
            tensor = self.quantized(name)
            scaled = None if tensor is None else ScaledElements.from_qtensor(tensor, operand)
            if scaled is None:
                return None
            elements[name] = scaled
        return elements[module] if len({scaled.scale.tobytes() for scaled in elements.values()}) == 1 else None

    def fused_amax(self, module: str) -> float:
        """Return the largest magnitude of a weight and of the weights that servers fuse with it."""
        return max(float(np.max(np.abs(self.weight(name)))) for name in fused_with(module))

    def fused_input_amax(self, module: str) -> float:
        """Return the largest magnitude of the input of a linear layer and of the layers that servers fuse with it.

        Raises:
          ValueError: the input was not measured.
        """
        try:
            amaxes = [self.input_amax[name] for name in fused_with(module)]
        except KeyError as error:
            raise ValueError(
                f"the input of {error.args[0]} has no amax, but this format stores its scale; calibrate the "
                "model, or use a format with dynamic scales"
            ) from None
        if not all(np.isfinite(value) and value > 0 for value in amaxes):
            raise ValueError(f"the input of {module} has the invalid amax {max(amaxes)}; calibrate the model")
        return max(amaxes)


def fused_with(module: str) -> tuple[str, ...]:
    """Return a linear layer and the layers that servers fuse with it; all of them must share per-tensor scales."""
    stem, _, last = module.rpartition(".")
    return next((tuple(f"{stem}.{each}" for each in group) for group in FUSED.values() if last in group), (module,))
