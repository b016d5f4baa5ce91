"""Mutated configs of quantized checkpoints: each is read in every way, or refused with a sentence."""

from __future__ import annotations

import contextlib
import random
from typing import Any

from jaxquant.compat.max import parse_quant_config
from jaxquant.compat.mlc_presets import read_mlc_quantization
from jaxquant.export.hf import read_quantization, to_recipe
from tests.attacks.tally import Tally
from tests.export import hf_published as hf
from tests.mutate import mutate_json

MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        f"model.layers.0.{name}": {"quant_algo": "FP8", "group_size": None} for name in hf._PROJECTIONS
    },
    "exclude_modules": ["lm_head"],
    "kv_cache_scheme": "FP8",
}
TWO = hf.compressed(
    hf.scheme("block", block_structure=[128, 128]), hf.scheme("group", True, group_size=128), ["re:.*a.*"]
)
TWO["config_groups"]["group_1"] = {"targets": ["a.b"], "weights": hf.scheme("tensor_group", bits=4, group_size=16)}
UE8M0 = hf.DEEPSEEK | {"scale_fmt": "ue8m0", "moe_quant_algo": "NVFP4", "ignore": ["*.attn.*", "head"]}
SEEDS: list[dict[str, Any]] = [
    hf.CT_DYNAMIC, hf.KIMI_K3, hf.FBGEMM, hf.KIMI_NVFP4, hf.GPT_OSS, hf.MXFP8, hf.QUARK, MIXED, TWO, UE8M0,
    {"quant_method": "gptq", "bits": 4},
]  # fmt: skip
_TENSORS: dict[str, Any] = {
    "layers.0.mlp.down_proj.weight_scale": ((8, 1), "float32"),
    "layers.0.mlp.gate_proj.weight_scale": {"shape": [8, 1], "dtype": "F32"},
    "layers.0.mlp.up_proj.weight_scale": {"shape": [8, 1], "dtype": "F32"},
    "layers.0.mlp.down_proj.bias": ((8,), "bfloat16"),
    "embed_tokens.weight": ((8, 8), "bfloat16"),
    "x.weight_scale_2": ((), "float32"),
}
_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 4, 16, 32, 2**70, 0.5, float("nan"), float("inf"), "", "Linear", "tensor", "block",
    "group", "static", "dynamic", "local", "FP8", "mxfp4-pack-quantized", "pack-quantized", "re:(", "re:a{99999999999}",
    "re:[", "re:(?i)x", "*", "[", "(?P<a>", "\\", "x\0\n", "é.ß", "128x128", "²x1", [], {}, [None], [128, 128], [64],
    ["a", 3], {"a": 1}, {3: 4}, [[]], (), b"x", {1, 2},
]  # fmt: skip
_KEYS = [
    "strategy", "num_bits", "type", "dynamic", "group_size", "block_structure", "weights", "targets", "quant_algo",
    "quantized_layers", "quant_method", "weight_block_size", "actorder", "format", "scale_dtype", "zero",
]  # fmt: skip


def mutated(rng: random.Random, value: Any) -> Any:
    """Return a mapping with up to four changes inside, some of which put another config there."""
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        new = mutate_json(rng, value, _VALUES if rng.random() < 0.8 else SEEDS, _KEYS)
        value = new if isinstance(new, dict) else value
    return value


def attack_quantizations(count: int, seed: int) -> Tally:
    """Read ``count`` configs, each for a model, as MAX and as MLC do."""
    tally = Tally()
    for number in range(count):
        rng = random.Random(seed * 10**9 + number)
        quantization = mutated(rng, rng.choice(SEEDS))
        config: dict[str, Any] = {"num_hidden_layers": 2, "quantization_config": quantization}
        if rng.random() < 0.2:
            config = {"text_config": config}
        if rng.random() < 0.1:
            config = mutated(rng, config)
        tensors: Any = mutated(rng, _TENSORS) if rng.random() < 0.1 else _TENSORS
        about = {"producer": {"name": "modelopt"}, "quantization": quantization}
        sidecar = mutated(rng, about) if rng.random() < 0.1 else None
        dtype = rng.choice(["float8_e4m3fn", "uint8", "bfloat16", "int8"])
        for call in (
            lambda config=config, tensors=tensors, sidecar=sidecar: _recipes(
                read_quantization(config, tensors, sidecar)
            ),
            lambda config=config, tensors=tensors, dtype=dtype: parse_quant_config(config, tensors, dtype),
            lambda config=config: read_mlc_quantization("fp8_e4m3fn_bf16_block_scale", config),
        ):
            tally.attempt(f"{number} of seed {seed}: {config!r:.500}", call)
    return tally


def _recipes(quantization) -> Any:
    if quantization is None:
        return None
    for module in ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.qkv_proj", "lm_head", "a.experts.0.w1"):
        spec = quantization.spec(module)
        if spec is not None:
            with contextlib.suppress(NotImplementedError):
                to_recipe(spec, "fuzz")
    return quantization
