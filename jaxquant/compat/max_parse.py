"""MAX's ``parse_quant_config``: converts a Hugging Face config and a state dict to a QuantConfig, with MAX's errors."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxquant.compat.max_config import QuantConfig
from jaxquant.config.loader import read_json
from jaxquant.export.hf.quantization import CheckpointQuantization
from jaxquant.export.hf.read import KEYS, METHODS, REFUSED, SECOND_SCALE, SIDECAR, find_section, read_quantization
from jaxquant.export.hf.section import Section
from jaxquant.export.hf.spec import (
    InputScaleSpec,
    LayerSpec,
    QuantFormat,
    ScaleGranularity,
    ScaleOrigin,
    WeightScaleSpec,
)
from jaxquant.export.hf.tensors import TensorInfo, dtype_name, read_tensors

MAX_LAYERS = 10_000
_FP8, _FP4 = ("float8_e4m3fn",), ("uint8", "float4_e2m1fn")
_ATTENTION = tuple(f"self_attn.{part}_proj" for part in "qkvo")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_FIELDS = ("num_hidden_layers", "text_config", "_name_or_path", *KEYS)
_ONE_SCHEME = "a QuantConfig has a single scheme; use jaxquant.export.hf.read_quantization, which reads all schemes"
_SCALES = ("weight_scale", "input_scale", SECOND_SCALE)


def parse_quant_config(
    huggingface_config: Any,
    state_dict: Mapping[str, Any],
    dtype: Any,
    state_dict_name_prefix: str = "",
    ignored_modules_prefix: str = "model.",
) -> QuantConfig | None:
    """Read the quantization of a checkpoint like MAX 26.3.

    MAX reads some configs incorrectly without an error: ``re:`` ignores, ``exclude_modules``, modelopt FP8, group and
    block strategies, weight-only. This function reads such configs as the libraries that write them do.

    Args:
      huggingface_config: dict, object with ``to_dict()``, or object with the config's fields as attributes.
      state_dict: mapping from tensor names to arrays, ``(shape, dtype)`` pairs, or entries of a safetensors header.
      dtype: dtype of the model's weights: float8_e4m3fn, uint8, float4_e2m1fn or int8; any dtype for MXFP4.
      state_dict_name_prefix: prefix of the decoder's names in ``state_dict``, such as ``language_model.``.
      ignored_modules_prefix: prefix of the decoder's names in exclusion lists.

    Returns:
      The config, or None if the checkpoint's quantization does not apply to ``dtype``.

    Raises:
      ValueError: the config is not supported; the message has MAX's wording and the key.
    """
    config = huggingface_config if isinstance(huggingface_config, Mapping) else _as_dict(huggingface_config)
    tensors, name = read_tensors(state_dict), dtype_name(dtype, "dtype")
    sidecar = _read_sidecar(config)
    found = find_section(config, sidecar, tensors)
    if found is None:
        if name in _FP8:
            raise ValueError("expected a `quantization_config` field in Hugging Face config when the dtype is float8")
        return None
    section, method = found
    if method and method not in METHODS and method != "gptq":
        reason = f"; {REFUSED[method]}" if method in REFUSED else ""
        raise ValueError(
            f"Unrecognized quantization config: the `quant_method` field ({method!r}) is provided but not "
            f"recognized{reason}"
        )
    if method == "gptq" or not (name in (*_FP8, *_FP4, "int8") or _is_mxfp4(section, method)):
        if method == "gptq" and name in _FP8:
            raise ValueError(
                "FP8 dtype specified, but an unsupported or incompatible 'quantization_config' was found. Quant "
                f"method: '{method}'. Supported methods are {', '.join(METHODS)}"
            )
        return None
    _check_max_limits(section, method, tensors)
    quantization = read_quantization(config, tensors, sidecar)
    if quantization is None:
        return None
    builder = _ConfigBuilder(quantization, tensors, state_dict_name_prefix, ignored_modules_prefix)
    return builder.build(_read_layers(config), name)


parse_float8_config = parse_quant_config


def _as_dict(config: Any) -> Mapping[str, Any]:
    if hasattr(config, "to_dict"):
        return config.to_dict()
    fields = {name: getattr(config, name) for name in _FIELDS if hasattr(config, name)}
    if not fields:
        raise TypeError(
            "huggingface_config must be a dict, have to_dict() or have num_hidden_layers and quantization_config as "
            f"attributes, got {type(config).__name__}"
        )
    for name, value in fields.items():
        if hasattr(value, "to_dict") or (name == "text_config" and not isinstance(value, (Mapping, type(None)))):
            fields[name] = _as_dict(value)
    return fields


def _read_sidecar(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    place = config.get("_name_or_path")
    path = pathlib.Path(place) / SIDECAR if isinstance(place, str) and place else None
    return None if path is None or not path.exists() else read_json(path)


def _is_mxfp4(section: Section, method: str) -> bool:
    if method == "quark":
        weight = section.section("global_quant_config").section("weight")
        return weight.data.get("dtype") == "fp4" and weight.data.get("scale_format") == "e8m0"
    return method == "mxfp4" or (method == "compressed-tensors" and "mxfp4" in section.text("format", ""))


def _check_max_limits(section: Section, method: str, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise for configs that jaxquant can read but MAX's kernels do not support."""
    if method == "fp8" and section.has("weight_block_size"):
        if section.text("activation_scheme", "") != "dynamic" and section.has("activation_scheme"):
            raise ValueError(f"{section.where('activation_scheme')} must be dynamic")
        if section.pair("weight_block_size") != (128, 128):
            raise ValueError(
                f"{section.where('weight_block_size')} must be [128, 128], got {section.data['weight_block_size']}"
            )
    if method == "fbgemm_fp8":
        scales = [info for name, info in tensors.items() if "weight_scale" in name]
        if not scales:
            raise ValueError("could not find weight scale dtype for FBGEMM FP8: state_dict has no weight_scale")
        if len({info.dtype for info in scales}) > 1 or any(info.shape[1:] != (1,) for info in scales):
            raise ValueError(
                "only row-wise weight quantization with uniform weight scale dtype is supported for FBGEMM FP8"
            )
    if method == "fp8" and not any("weight_scale" in name for name in tensors):
        raise ValueError("could not find weight scale dtype for FP8: state_dict has no weight_scale")


def _read_layers(config: Mapping[str, Any]) -> int:
    for section in (Section(config, ""), Section(config, "").section("text_config")):
        if section.has("num_hidden_layers"):
            return section.integer("num_hidden_layers", most=MAX_LAYERS)
    raise ValueError("num_hidden_layers must be specified in huggingface_config")


@dataclasses.dataclass(frozen=True)
class _ConfigBuilder:
    quantization: CheckpointQuantization
    tensors: Mapping[str, TensorInfo]
    prefix: str
    ignored_prefix: str

    def build(self, layers: int, dtype: str) -> QuantConfig:
        spec = self._select_spec(dtype)
        format, weight = self._select_format(spec), self._weight_scale(spec)
        inputs = self._input_scale(spec, format)
        mlp = self._quantized_layers(layers, _MLP, "MLPs", spec)
        attention = self._quantized_layers(layers, _ATTENTION, "attention QKV and output projections", spec)
        for index in mlp:  # raises if experts have another scheme
            self._is_quantized(spec, f"layers.{index}.mlp.experts.0.up_proj")
        if self.quantization.method == "mxfp4":
            mlp = frozenset(i for i in range(layers) if self._is_quantized(spec, f"layers.{i}.mlp.experts"))
        widened = inputs is not None and inputs.origin.is_dynamic and weight.is_tensor
        return QuantConfig(
            inputs,
            weight,
            mlp,
            attention,
            format,
            embedding_output_dtype=self._embedding_dtype(format),
            bias_dtype=self._bias_dtype(),
            can_use_fused_mlp=format is not QuantFormat.MXFP4 and self._can_use_fused_mlp(widened),
            shared_experts_weight_dtype=self._shared_experts_dtype(),
        )

    def _select_spec(self, dtype: str) -> LayerSpec:
        specs = self.quantization.specs
        if not specs:
            raise ValueError(f"the {self.quantization.method} config quantizes no layer; load the model in float")
        if len(specs) > 1:  # a QuantConfig has one scheme: select by dtype
            specs = [spec for spec in specs if (spec.weight.dtype == "float4_e2m1fn") == (dtype in _FP4)]
        if len(specs) != 1:
            count = len(self.quantization.specs)
            raise ValueError(f"the {self.quantization.method} config has {count} schemes; {_ONE_SCHEME}")
        return specs[0]

    def _select_format(self, spec: LayerSpec) -> QuantFormat:
        weight, method = spec.weight, self.quantization.method
        if weight.dtype == "float4_e2m1fn":
            return QuantFormat.NVFP4 if weight.outer_scale else QuantFormat.MXFP4
        if weight.dtype.startswith("float6"):
            return QuantFormat.MXFP6
        if weight.scale_dtype == "float8_e8m0fnu":
            return QuantFormat.MXFP8
        if weight.dtype == "int8" and spec.input is not None and spec.input.dtype == "int8":
            return QuantFormat.INT8_W8A8
        if not weight.dtype.startswith("float8"):
            raise ValueError(
                f"a QuantConfig does not support {weight.dtype} weights; use jaxquant.export.hf.read_quantization, "
                "which reads all schemes"
            )
        of_methods = {"compressed-tensors": QuantFormat.COMPRESSED_TENSORS_FP8, "modelopt": QuantFormat.MODELOPT_FP8}
        return of_methods.get(method, QuantFormat.BLOCKSCALED_FP8 if weight.is_block else QuantFormat.FBGEMM_FP8)

    def _weight_scale(self, spec: LayerSpec) -> WeightScaleSpec:
        weight = spec.weight
        dtype = weight.scale_dtype
        if dtype == "float32":
            found = self._scale_dtype("weight_scale")
            if found is None and self.quantization.method == "compressed-tensors":
                raise ValueError(
                    f"could not find the weight scale dtype: there is no tensor "
                    f"{self.prefix}layers.0.mlp.down_proj.weight_scale"
                )
            dtype = found or dtype
        return WeightScaleSpec(weight.granularity, dtype, weight.block_size)

    def _input_scale(self, spec: LayerSpec, format: QuantFormat) -> InputScaleSpec | None:
        operand = spec.input
        if operand is None and format is QuantFormat.MXFP4:
            # MAX's kernels quantize the inputs of MXFP4 experts even if the checkpoint specifies float inputs.
            return InputScaleSpec(ScaleGranularity.BLOCK, ScaleOrigin.DYNAMIC, "float32", block_size=(1, 32))
        if operand is None:
            return None
        dtype = self._scale_dtype("input_scale")
        per_token = operand.granularity is ScaleGranularity.COLWISE and operand.origin is ScaleOrigin.DYNAMIC
        if format in (QuantFormat.NVFP4, QuantFormat.MXFP4):
            dtype = "float32"
        elif operand.scale_dtype != "float32":
            dtype = operand.scale_dtype
        elif per_token and format in (QuantFormat.COMPRESSED_TENSORS_FP8, QuantFormat.FBGEMM_FP8):
            dtype = dtype or operand.dtype  # MAX has this placeholder
        return InputScaleSpec(
            operand.granularity,
            operand.origin,
            dtype or self._scale_dtype("weight_scale") or "float32",
            operand.scale_bound,
            operand.block_size,
        )

    def _scale_dtype(self, kind: str) -> str | None:
        first = self.tensors.get(f"{self.prefix}layers.0.mlp.down_proj.{kind}")
        if first is not None:
            return first.dtype
        found = [
            i.dtype for n, i in self.tensors.items() if kind in n.rpartition(".")[2] and not n.endswith(SECOND_SCALE)
        ]
        return found[-1] if found else None

    def _is_quantized(self, spec: LayerSpec, name: str) -> bool:
        """Return whether a layer is quantized by a scheme.

        Raises:
          ValueError: the layer is quantized by another scheme; a QuantConfig can only have one.
        """
        own = self.quantization.spec(self.ignored_prefix + name)
        if own not in (None, spec):
            raise ValueError(f"{name} has {own.weight.dtype} weights, other layers {spec.weight.dtype}; {_ONE_SCHEME}")
        return own is not None

    def _quantized_layers(self, layers: int, parts: tuple[str, ...], word: str, spec: LayerSpec) -> frozenset[int]:
        chosen: set[int] = set()
        for index in range(layers):
            floats = [part for part in parts if not self._is_quantized(spec, f"layers.{index}.{part}")]
            if floats and len(floats) < len(parts):
                raise ValueError(
                    f"float8 quantization currently assumes uniform quantization for {word}; "
                    f"layer {index} does not quantize {', '.join(floats)}"
                )
            if not floats:
                chosen.add(index)
        return frozenset(chosen)

    def _embedding_dtype(self, format: QuantFormat) -> str:
        for name in ("embed_tokens", "lm_head"):
            info = self.tensors.get(f"{self.prefix}{name}.weight")
            if info is not None:
                return info.dtype
        if format in (QuantFormat.BLOCKSCALED_FP8, QuantFormat.NVFP4, QuantFormat.MXFP4):
            return "bfloat16"
        named = [rule for rule in self.quantization.rules if rule.spec is None and "never" not in rule.origin]
        heads = {f"{prefix}lm_head" for prefix in ("", self.prefix, self.ignored_prefix)}
        if any(rule.matches(head) for rule in named for head in heads):
            raise ValueError("cannot determine original type from checkpoint: state_dict has no lm_head.weight")
        return "float8_e4m3fn"

    def _bias_dtype(self) -> str | None:
        found = sorted({info.dtype for name, info in self.tensors.items() if name.endswith(".bias")})
        if len(found) > 1:
            raise ValueError(f"Inconsistent bias dtypes found: {', '.join(found)}")
        return found[0] if found else None

    def _shared_experts_dtype(self) -> str | None:
        patterns = [rule.path for rule in self.quantization.rules if rule.spec is None]
        excluded = any("shared_expert" in pattern.replace("shared_expert_gate", "") for pattern in patterns)
        return "bfloat16" if excluded else None

    def _can_use_fused_mlp(self, widened: bool) -> bool:
        """Return whether the scales of gate and up can be concatenated along rows, after scalar scales are widened.

        Scalar scales that are not widened must be equal.
        """
        for name, gate in self.tensors.items():
            stem, _, kind = name.rpartition(".")
            if kind not in _SCALES or not stem.endswith("gate_proj"):
                continue
            up = self.tensors.get(f"{stem.removesuffix('gate_proj')}up_proj.{kind}")
            if up is None or len(gate.shape) != len(up.shape) or gate.shape[1:] != up.shape[1:]:
                return False
            is_scalar = gate.shape in ((), (1,))
            if is_scalar and not widened and (gate.value is None or gate.value != up.value):
                return False
        return True
