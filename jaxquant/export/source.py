"""The input of an exporter: named float tensors that are read one at a time, the model's shape, its tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxquant.core.qtensor import QTensor
from jaxquant.export.hf import OperandSpec
from jaxquant.export.layouts import is_finite
from jaxquant.export.llama import LlamaShape, fused_with


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A tokenizer on its way into files.

    Attributes:
      tokens: texts by number, as byte-level BPE spells them; shorter than the embedding where that is padded.
      merges: pairs in their order, joined by a space.
      kinds: types of the tokens in GGUF files.
      bos, eos, pad: numbers of the tokens that begin and end a text and fill a row, or None.
      tokenizer_json: a ``tokenizer.json`` of the tokenizers package.
      pre: name of the pre-tokenizer in GGUF files, empty if they have none.
      scores: scores of the tokens for a tokenizer of SentencePiece, in GGUF files; empty for byte-level BPE.
      origin: file or metadata that it was read from.
    """

    tokens: tuple[str, ...]
    merges: tuple[str, ...]
    kinds: tuple[int, ...]
    bos: int | None
    eos: int | None
    pad: int | None
    tokenizer_json: Mapping[str, Any]
    pre: str
    scores: tuple[float, ...]
    origin: str

    @property
    def ids(self) -> dict[str, int | None]:
        """The numbers that ``config.json`` and ``generation_config.json`` have."""
        return {"bos_token_id": self.bos, "eos_token_id": self.eos, "pad_token_id": self.pad}


class ScaledElements(NamedTuple):
    """A quantized weight [out, in]: its elements, the scale of each block, and the scale above these [], 1 for none."""

    elements: np.ndarray
    scale: np.ndarray
    outer: np.ndarray

    @classmethod
    def of(cls, tensor: QTensor, operand: OperandSpec) -> ScaledElements | None:
        """Return a tensor [out, in] with a scale for each block of a format; None where it has other numbers."""
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
      shape: of the model.
      read: name of a tensor, as ``LlamaShape.tensors`` has it -> float32 array.
      vocabulary: its tokenizer; None writes no tokenizer files.
      input_amax: largest magnitude of the input of each linear layer by name, for formats with static scales.
      quantized: name of a linear layer -> ``QTensor`` of its weight as [out, in], as it is stored or as the training
        forward multiplied it; None for float ones, and for blocks that are none of [out, in].
    """

    shape: LlamaShape
    read: Callable[[str], np.ndarray]
    vocabulary: Vocabulary | None = None
    input_amax: Mapping[str, float] = dataclasses.field(default_factory=dict)
    quantized: Callable[[str], QTensor | None] = lambda name: None

    def weight(self, module: str) -> np.ndarray:
        """Return the weight [out, in] of a linear layer."""
        return self.read(f"{module}.weight")

    def finite(self, name: str) -> np.ndarray:
        """Return a tensor in float32, for an exporter.

        Raises:
          ValueError: a shape that is not the model's, or values that are not finite.
        """
        array, shape = np.asarray(self.read(name), np.float32), self.shape.tensors()[name]
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, and the model's is {shape}")
        if not is_finite(array):
            raise ValueError(f"{name} has values that are not finite; export another checkpoint")
        return array

    def scaled_elements(self, module: str, operand: OperandSpec) -> ScaledElements | None:
        """Return the weight [out, in] of a linear layer with its own elements and scales, in the blocks of a format.

        The scale of a larger block is the scale of each of the format's blocks in it. Returns None if the layer has
        other numbers, or one scale that the layers fused with it in servers do not share.
        """
        found: dict[str, ScaledElements] = {}
        for name in fused_with(module) if operand.is_tensor else (module,):
            tensor = self.quantized(name)
            own = None if tensor is None else ScaledElements.of(tensor, operand)
            if own is None:
                return None
            found[name] = own
        return found[module] if len({own.scale.tobytes() for own in found.values()}) == 1 else None

    def fused_amax(self, module: str) -> float:
        """Return the largest magnitude of a weight and of those that servers fuse with it."""
        return max(float(np.max(np.abs(self.weight(name)))) for name in fused_with(module))

    def fused_input_amax(self, module: str) -> float:
        """Return the largest magnitude of the input of a linear layer and of those that servers fuse with it.

        Raises:
          ValueError: nobody measured it.
        """
        try:
            found = [self.input_amax[name] for name in fused_with(module)]
        except KeyError as error:
            raise ValueError(
                f"the input of {error.args[0]} has no amax, and this format stores its scale; calibrate the model, or "
                "use a format with dynamic scales"
            ) from None
        if not all(np.isfinite(value) and value > 0 for value in found):
            raise ValueError(f"the input of {module} has the amax {max(found)}, which is no scale; calibrate the model")
        return max(found)
