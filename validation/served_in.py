#!/usr/bin/env python3
"""Compare tiny exports with ``jaxquant servers``, and its rules for TPU servers with the servers' own functions.

validation/served_in.py OUT TPU_INFERENCE SGLANG_JAX

OUT is a new folder for the exports. TPU_INFERENCE is the folder of the unpacked wheel, SGLANG_JAX the folder ``python``
of a checkout. Their functions run on a CPU; packages that are not installed, such as vLLM, are replaced by stubs. The
script writes ``benchmarks/results/served_in.md`` and exits with 1 if a rule and a server disagree.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.abc
import importlib.machinery
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant.core.dtypes import element
from jaxquant.core.qtensor import dequantize
from jaxquant.export import DecoderShape, NamedFolder, SafetensorsFile, Source, export, layout_of
from jaxquant.export.command import summary_rows
from jaxquant.export.families import families
from jaxquant.export.servers import SERVERS, read_layers, served_layers

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"vocab_size": 320, "emb_dim": 1024, "mlp_dim": 1024, "num_layers": 1, "num_query_heads": 4, "num_kv_heads": 2}
YARN = {"rope_type": "yarn", "rope_factor": 32.0, "original_max_position_embeddings": 64, "rope_truncate": False}
GPT_OSS = next(family.fixed for family in families() if family.architecture == "GptOssForCausalLM")
GPT_OSS = {**GPT_OSS, **YARN, "num_experts": 2, "num_experts_per_tok": 2, "sliding_window_size": 8}
FORMATS = ("hf", "ct_fp8_dynamic", "ct_fp8_static", "ct_int8", "ct_w4a16", "fp8_block", "modelopt_fp8")
FORMATS = (*FORMATS, "modelopt_nvfp4", "mxfp4", "gguf_q8_0", "gguf_q4_k_m")
LAYER, X = "model.layers.0.mlp.down_proj", jnp.asarray(np.random.default_rng(1).normal(size=(4, 1024)), jnp.bfloat16)


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of modules that no other finder has; they are empty mocks."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return mock.MagicMock(name=spec.name, __spec__=spec, __path__=[])

    def exec_module(self, module: Any) -> None: ...


def source_of(shape: DecoderShape) -> Source:
    layout, rng = layout_of(shape), np.random.default_rng(0)
    values = {name: rng.normal(size=size).astype(np.float32) / 32 for name, size in layout.tensors.items()}
    return Source(layout, values.__getitem__, None, dict.fromkeys(layout.linears, 4.0))


def describe(weight: jax.Array, scale: jax.Array) -> str:
    """Describe a weight [in, out], or experts [E, blocks, 1, out], as ``servers.yml`` does."""
    place = "tensor" if scale.size == 1 else "channel" if scale.ndim == 1 else f"1x{weight.shape[-2] // scale.shape[1]}"
    return f"{element(weight.dtype.name).short} per {place}, {scale.dtype} scales"


def input_dtype(matmul: Any, *args: Any) -> str:
    """Return the dtype of the input of a matmul; bfloat16 is "not quantized"."""
    dots = [each for each in jax.make_jaxpr(matmul)(*args).eqns if each.primitive.name == "dot_general"]
    dtype = dots[-1].invars[0].aval.dtype.name
    return "not quantized" if dtype == "bfloat16" else element(dtype).short


def computed_by_tpu_inference(out: Path) -> Iterator[tuple[str, str, str, Any, jax.Array]]:
    """Yield format, weight and input as computed, and the stored and the computed weight in float32."""
    quantization, fp8, linear, moe = (
        importlib.import_module(f"tpu_inference.layers.common.{name}")
        for name in ("quantization", "quantization.fp8", "linear", "process_weights.moe_weights")
    )
    envs = importlib.import_module("tpu_inference.envs")
    for name in ("ct_fp8_dynamic", "ct_fp8_static", "ct_int8", "fp8_block"):
        folder = NamedFolder(out / name)
        tensors: Any = {end.removesuffix("_inv"): jnp.asarray(each) for end, each in folder.tensors(LAYER).items()}
        weight, scale = tensors[".weight"].T, tensors[".weight_scale"]
        if name == "fp8_block":
            made = fp8.process_blockwise_fp8_linear_weights(
                weight, scale.T, bias=None, weight_block_size=(128, 128), output_sizes=(weight.shape[1],), n_shards=1,
                requant_block_size=envs.REQUANTIZE_BLOCK_SIZE, fuse_matmuls=True,
                requant_weight_dtype=jnp.dtype(envs.REQUANTIZE_WEIGHT_DTYPE),
            )  # fmt: skip
        elif name == "ct_fp8_static":  # the two calls of VllmCompressedTensorsW8A8Fp8.process_weights_after_loading
            decoded = quantization.dequantize_tensor(weight, scale[0])
            made = fp8.LinearWeights(*quantization.quantize_tensor(jnp.float8_e4m3fn, decoded, None), None, None)
        else:
            made = fp8.LinearWeights(weight, scale[:, 0], None, None)
            made = fp8.process_linear_weights(made, fused=True, output_sizes=[weight.shape[1]], reorder_size=1)
        inputs = input_dtype(linear.xla_quantized_matmul, X, made.weight, made.weight_scale)
        stored: Any = folder[f"{LAYER}.weight"]
        decoded = made.weight.astype(jnp.float32) * made.weight_scale
        yield name, describe(made.weight, made.weight_scale), inputs, dequantize(stored).T, decoded
    file, parts = SafetensorsFile(out / "mxfp4/model.safetensors"), []
    for part in ("gate_up_proj", "down_proj"):
        blocks, scales = (jnp.asarray(file[f"model.layers.0.mlp.experts.{part}_{end}"]) for end in ("blocks", "scales"))
        packed = blocks.reshape(*blocks.shape[:2], -1)
        parts.append(quantization.dequantize_tensor_from_mxfp4_packed(packed, scales, 2, jnp.float32))
    made = moe.FusedMoEWeights(parts[0], None, None, parts[1], None, None)
    size = quantization.MXFP4_REQUANTIZED_BLOCK_SIZE
    made = moe.quantize_moe_weights(made, jnp.float4_e2m1fn, size, w13_interleave=True)
    weight, scale = made.w2_weight.swapaxes(1, 2), made.w2_weight_scale.swapaxes(1, 2)
    decoded = weight.astype(jnp.float32) * jnp.repeat(scale, weight.shape[1] // scale.shape[1], axis=1)
    yield "mxfp4", describe(weight, scale), "", parts[1].swapaxes(1, 2), decoded


def computed(out: Path) -> Iterator[tuple[str, ...]]:
    """Yield format, server, weight and input as computed, changed weights, and the change relative to their size."""
    for name, weight, inputs, stored, decoded in computed_by_tpu_inference(out):
        change = np.asarray(decoded, np.float64) - np.asarray(stored)
        size = np.sqrt(np.mean(change**2)) / np.sqrt(np.mean(np.asarray(stored, np.float64) ** 2))
        yield name, "tpu-inference", weight, inputs, f"{100 * np.mean(change != 0):.1f} %", f"{size:.4f}"
    config = importlib.import_module("sgl_jax.srt.configs.model_config").ModelConfig
    for name in ("ct_fp8_dynamic", "fp8_block"):
        section = NamedFolder(out / name).config["quantization_config"]
        model = types.SimpleNamespace(quantization_config=None, _get_hf_quant_config=lambda section=section: section)
        rule = config._resolve_quantization_config(model).linear_rules[0]
        weight, inputs = element(rule["weight_dtype"]).short, rule["activation_dtype"] or "not quantized"
        yield name, "sglang-jax", weight, inputs, "", ""


def compare(out: Path, name: str, server: str, weight: str, inputs: str, *change: str) -> tuple[str, ...]:
    """Return a row: the formats that the rule states and that the server computed, and whether they agree."""
    layer = next(each for each in read_layers(out / name) if each.stored == name and "down_proj" in each.name)
    (served,) = served_layers([layer], server, "v6e")
    is_same = served.weight.startswith(weight.partition(",")[0]) and served.input.startswith(inputs)
    return name, server, served.weight, served.input, weight, inputs, *change, "yes" if is_same else "no"


def markdown(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ("---",) * len(header), *rows)) + "\n"


def main(out: Path, *packages: str) -> int:
    sys.meta_path.append(Stubs())
    for name, folder in zip(("tpu_inference", "sgl_jax"), packages, strict=True):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(Path(folder) / name)]
    sys.modules["sgl_jax.srt.hf_transformers_utils"] = mock.MagicMock()
    for name in FORMATS:
        fields: Any = {**SIZES, "head_dim": 256, "logits_via_embedding": False, "max_position_embeddings": 64}
        export(source_of(DecoderShape(**fields | (GPT_OSS if name == "mxfp4" else {}))), out / name, name)
    tables = {name: list(summary_rows(read_layers(out / name))) for name in FORMATS}
    results = [(*rows[0][:3], *(row[3] for row in rows)) for rows in zip(*tables.values(), strict=True)]
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for name, row in ((name, row) for name, rows in tables.items() for row in rows if row[4]):
        reasons.setdefault((name, row[0], row[4]), []).append(row[2])
    shown = [(name, server, ", ".join(chips), how) for (name, server, how), chips in reasons.items()]
    rows = [compare(out, *row) for row in computed(out)]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    header = ("format", "server", "weight, rule", "input, rule", "weight, server", "input, server")
    text = f"""# served_in

`python validation/served_in.py OUT TPU_INFERENCE SGLANG_JAX` at {commit.strip()}, {datetime.date.today()}: tiny models
with random weights, exported in eleven formats, and `jaxquant servers` on each. The rules and their sources are in
`jaxquant/export/servers.yml`. jax {jax.__version__}; no GPU or TPU was used.

{markdown(("server", "version", "chips", *FORMATS), results)}
## Differences and refusals

{markdown(("format", "server", "chips", "how"), shown)}
## The servers' own functions, on a CPU

Columns with "rule" are from `jaxquant servers`; columns with "server" are the output of tpu-inference
{SERVERS["tpu-inference"]["version"]} and sglang-jax {SERVERS["sglang-jax"]["version"]}. The last columns: weights that
changed, the change relative to the root mean square of the weights, and whether rule and server agree. The input of
ct_fp8_static is from the matmul with dynamic scales; the function with static scales is part of a vLLM class.

{markdown((*header, "changed", "change / rms", "agree"), rows)}"""
    (ROOT / "benchmarks/results/served_in.md").write_text(text)
    return int(any(row[-1] == "no" for row in rows))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
