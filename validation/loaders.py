"""Logits of our decoder, transformers and llama.cpp, for the scripts that compare exported checkpoints."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxquant.core.paths import map_by_path
from jaxquant.export import HfFolder, Source
from jaxquant.export.layouts import E4M3_MAX
from jaxquant.formats.minifloat import MINIFLOATS, decode_minifloat, encode_minifloat
from jaxquant.training.exporting import locate_tensors
from jaxquant.training.importing import imported_config, parameter_readers
from jaxquant.training.model import Decoder
from jaxquant.training.step import model_config

Logits = Callable[[np.ndarray], np.ndarray]
Inputs = Callable[[str, jax.Array], jax.Array]
LENGTH = 128
PACKAGES = ("jax", "torch", "transformers", "compressed-tensors", "llama-cpp-python")


def our_logits(source: Source, inputs: Inputs | None = None) -> Logits:
    """Return a function from tokens [n] to logits [n, V], computed by our decoder with decoded weights in float32.

    Args:
      source: model to run.
      inputs: function that replaces the input of a linear layer, of (name of the layer in the checkpoint, "" for
        experts; input [..., K]). None leaves inputs unchanged.
    """
    shape = source.layout.shape
    assert shape is not None
    config = imported_config(shape, Path("checkpoint"), None, {"dtype": "float32", "scan_layers": False})
    decoder = Decoder(model_config(config, shape.vocab_size))
    shapes = jax.eval_shape(decoder.init, jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))["params"]
    readers = parameter_readers(source, config, shapes)
    params = map_by_path(lambda path, x: jnp.asarray(next(readers[path](len(x)))[1]), shapes)
    located, linears = locate_tensors(config, shape).items(), source.layout.linears
    ragged_dot = jax.lax.ragged_dot
    modules = {each.path.removesuffix("/kernel"): name.removesuffix(".weight") for name, each in located}

    def intercept(call: Any, args: tuple[jax.Array, ...], kwargs: Any, context: Any) -> Any:
        module = modules.get("/".join(context.module.path))
        if inputs is None or module not in linears or context.method_name != "__call__":
            return call(*args, **kwargs)
        rows = args[0].reshape(*args[0].shape[:2], -1)  # heads concatenated, as in the checkpoint
        return call(inputs(module, rows).reshape(args[0].shape), **kwargs)

    def forward(tokens: jax.Array) -> Any:
        expert = lambda rows, *rest: ragged_dot(rows if inputs is None else inputs("", rows), *rest)  # noqa: E731
        with nn.intercept_methods(intercept), mock.patch.object(jax.lax, "ragged_dot", expert):
            return decoder.apply({"params": params}, tokens)

    # Rounded inputs run without jit: the compiler would turn a division by a constant into a multiplication.
    run = jax.jit(forward) if inputs is None else forward

    def logits(tokens: np.ndarray) -> np.ndarray:
        padded = np.zeros((1, -(-len(tokens) // LENGTH) * LENGTH), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(run(jnp.asarray(padded)))[0, : len(tokens)]

    return logits


def in_bfloat16(source: Source, modules: Sequence[str]) -> Source:
    """Round the weights of linear layers to bfloat16, as compressed-tensors decompresses some formats."""
    names = {f"{module}.weight" for module in modules}

    def read(name: str) -> np.ndarray:
        weight = source.read(name)
        return weight.astype(ml_dtypes.bfloat16).astype(np.float32) if name in names else weight

    return dataclasses.replace(source, read=read)


def rounded_inputs(folder: HfFolder) -> Inputs | None:
    """Return the function with which compressed-tensors rounds inputs, ``scale · round(x / scale)``, or None.

    The config of the folder selects the scale: the stored scale; ``amax / largest`` of each token; or the same of each
    16 neighbours, rounded to e4m3 relative to the stored scale of the tensor.

    Source: ``calculate_qparams`` and ``_quantize_dequantize`` of compressed-tensors.
    """
    args = folder.config["quantization_config"]["config_groups"]["group_0"]["input_activations"]
    if args is None:
        return None
    kind = None if args["type"] == "int" else MINIFLOATS[{8: "float8_e4m3fn", 4: "float4_e2m1fn"}[args["num_bits"]]]
    half = 2 ** (args["num_bits"] - 1) - 0.5 if kind is None else kind.max

    def inputs(module: str, x: jax.Array) -> jax.Array:
        if not module:  # experts, whose inputs transformers leaves in float
            return x
        stored = {
            end: np.asarray(part, np.float32).reshape(())
            for end, part in folder.tensors(module).items()
            if part.size == 1
        }
        tiles = x.reshape(*x.shape[:-1], -1, args.get("group_size") or x.shape[-1])
        scale = jnp.max(jnp.abs(tiles), axis=-1, keepdims=True) / np.float32(half)
        if not args["dynamic"]:
            scale = stored[".input_scale"]
        elif args["dynamic"] == "local":
            outer = stored[".input_global_scale"]
            scale = jnp.clip(outer * scale, -E4M3_MAX, E4M3_MAX).astype("float8_e4m3fn").astype(jnp.float32)
            scale = jnp.where(scale == 0, float(jnp.finfo("float8_e4m3fn").eps), scale) / outer
        codes = tiles / scale
        codes = (
            jnp.clip(jnp.round(codes), -half - 0.5, half - 0.5)
            if kind is None
            else decode_minifloat(encode_minifloat(codes, kind), kind)
        )
        return (codes * scale).reshape(x.shape)

    return inputs


def llama_cpp_inputs(kind: str) -> Inputs:
    """Return the function with which llama.cpp's CPU kernels round the inputs of F16 or Q8_0 weights.

    Source: ``type_traits_cpu`` and ``quantize_row_q8_0`` of ggml.
    """

    def inputs(module: str, x: jax.Array) -> jax.Array:
        if kind == "gguf_f16":
            return x.astype(jnp.float16).astype(jnp.float32)
        tiles = x.reshape(*x.shape[:-1], -1, 32)
        amax = jnp.max(jnp.abs(tiles), axis=-1, keepdims=True)
        codes = jnp.round(tiles * jnp.where(amax > 0, 127 / amax, 0))
        return (codes * (amax / 127).astype(jnp.float16).astype(jnp.float32)).reshape(x.shape)

    return inputs


def load_transformers(folder: Path, *, quantizes_inputs: bool = True) -> tuple[Logits, Callable[[str], np.ndarray]]:
    """Load a folder with transformers, which decompresses weights and quantizes inputs by the config.

    Args:
      folder: folder to load.
      quantizes_inputs: whether linear layers quantize their inputs, if the config has a format for inputs.

    Returns:
      A function from tokens to logits, and a function from the name of a linear layer to its decompressed weight.
    """
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    # compressed-tensors decompresses at the first call, some formats to bfloat16, which does not work with float32
    # inputs.
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.zeros((1, 2), dtype=torch.int64))
    model = model.to(torch.float32)
    if not quantizes_inputs:
        for module in model.modules():
            module.quantization_enabled = False  # read by compressed-tensors

    def logits(tokens: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor(tokens[None].astype(np.int64))).logits[0].float().numpy()

    return logits, lambda module: model.get_submodule(module).weight.detach().float().numpy()


def llama_cpp_logits(path: Path) -> Logits:
    """Return the logits function of llama.cpp, with a float32 cache."""
    import llama_cpp

    options: dict[str, Any] = {"n_ctx": 2 * LENGTH, "n_batch": 2 * LENGTH, "n_threads": 2}
    options |= {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    model = llama_cpp.Llama(str(path), logits_all=True, verbose=False, **options)

    def logits(tokens: np.ndarray) -> np.ndarray:
        model.reset()
        model.eval([int(token) for token in tokens])
        return np.array(model.scores[: len(tokens)])

    return logits


def relative(theirs: np.ndarray, ours: np.ndarray) -> float:
    return float(np.max(np.abs(theirs - ours)) / np.sqrt(np.mean(np.square(ours))))


def versions() -> str:
    """Return the date and the versions of the packages, for the head of a table."""
    found = {each.name.replace("_", "-"): each.version for each in importlib.metadata.distributions()}
    return ", ".join([datetime.date.today().isoformat(), *(f"{name} {found.get(name, 'absent')}" for name in PACKAGES)])


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table with the keys of the rows as columns."""
    lines = [f"| {' | '.join(rows[0])} |", "| " + " | ".join("---" for _ in rows[0]) + " |"]
    return lines + [f"| {' | '.join(str(value) for value in row.values())} |" for row in rows]
