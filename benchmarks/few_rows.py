"""few_rows: what the compilers of absent chips make of a few rows against a quantized weight, and of a decoding step.

Products: one to eight rows of bfloat16 against a weight of 4096 by 14336, in every format of a weight: a function that
``jaxquant.quantize`` quantizes, with the parameters that it converts; formats without a config string by the same op.
Decoding: one token of each of 1 and 8 texts, by the program that ``train.generate.Engine`` runs, converted, with its KV
cache: of the quickstart, and of two layers of Llama-3-8B. Time: ``price.estimate``; *HBM* is what reading the weights
takes at the full speed of the memory. Run as a file, with another checkout first in PYTHONPATH, it prices that one.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

import jaxquant
from jaxquant.aot.chips import Chip, chip
from jaxquant.aot.price import estimate
from jaxquant.aot.program import read_program
from jaxquant.aot.topology import devices
from jaxquant.config.loader import load_yaml
from jaxquant.core.qtensor import ConvertedKernel
from jaxquant.core.quantize import quantize
from jaxquant.core.recipe import MatmulSpec, Recipe, TensorSpec
from jaxquant.core.typed import build
from jaxquant.formats.packed_array import pack_array
from jaxquant.formats.packed_matmul import matmul
from jaxquant.ops.dot_general import dot_general
from train.config import TrainConfig
from train.conversion import converted_shapes
from train.frameworks import make_model
from train.generate import Engine
from train.step import model_config
from train.tokenizer import ByteTokenizer

Row = dict[str, Any]
Shapes = tuple[Any, ...]

K, N = 4096, 14336
"""Contraction and columns of the weight."""
ROWS = (1, 4, 8)
SLOTS = (1, 8)
"""Texts that are decoded together."""
TARGETS = ("h100", "h200", "b200", "v5e", "v6e", "v7x")

TILES = {"__default__": {"w_bits": 4, "tile_size": 128}}
HEADS = {".*/out": {"tile_size": -1}}
"""Of a decoder: its layer ``out`` contracts heads first, which are fewer."""
STRINGS = ("int8w", "int4w", "int4 tiles", "ggml_q4_0", "ggml_q8_0")
"""Config strings; ``int4 tiles`` is ``intmp`` with weights alone, in tiles of 128."""
SPECS = {
    "fp8 channels": TensorSpec("float8_e4m3fn"),
    "mxfp4 tiles": TensorSpec(
        "float4_e2m1fn", "per_tile", tile_size=32, scale_dtype="float8_e8m0fnu", scale_rounding="up"
    ),
    "nvfp4 tiles": TensorSpec(
        "float4_e2m1fn",
        "per_tile",
        tile_size=16,
        scale_dtype="float8_e4m3fn",
        scale_rounding="nearest",
        outer_scale=True,
    ),
}
"""Weights without a config string of their own."""
PACKED = ("mxfp4", "nvfp4")
"""Formats of ``formats.packed_matmul``."""

MODELS = {
    "quickstart": ("configs/quickstart.yml", {}),
    "llama3-8b, 2 layers": ("configs/models/llama3-8b.yml", {"num_layers": 2}),
}
"""Config file and overrides of what decodes."""
DECODED = ("", "int8w", "int4w", "int4 tiles")
LENGTH = 128
"""Places of the KV cache."""

ROOT = Path(__file__).parents[1]


class Compiler:
    """Compile programs for one absent chip.

    Args:
      target: its name.
    """

    def __init__(self, target: str) -> None:
        self.target, self.chip = target, chip(target)
        self._where = SingleDeviceSharding(devices(self.chip)[0])

    def price(self, program: Callable[..., Any], *shapes: Any, weights: Any, **options: Any) -> Row:
        """Return what a program costs on the chip, or why it does not compile.

        Args:
          program: a function of arrays.
          shapes: of its arguments.
          weights: those of them that are weights.
          options: of ``jax.jit``.
        """
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._where), shapes)
        size = sum(x.size * jax.dtypes.itemsize_bits(x.dtype) / 8 for x in jax.tree.leaves(weights))
        try:
            compiled = jax.jit(program, **options).lower(*shapes).compile()
        except jax.errors.JaxRuntimeError as error:
            return {"us": None, "note": " ".join(str(error).split())[:100]}
        found, memory = read_program(compiled.as_text() or ""), compiled.memory_analysis()
        return {
            "us": round(1e6 * estimate(self.chip, found)[0].step, 1),
            "thousand cycles": round(sum(found.cycles) / 1e3, 1) if self.chip.clock else None,
            "HBM us": round(1e6 * size / _bandwidth(self.chip), 1),
            "weights MB": round(size / 1e6, 1),
            "temporaries MB": round(memory.temp_size_in_bytes / 1e6, 1) if memory else None,
            "note": ", ".join(found.unknown),
        }


def _bandwidth(each: Chip) -> float:
    return each.bandwidth / each.devices


def config(string: str, folder: str, **more: Any) -> dict[str, Any]:
    """Return the fields of a quantization: of a config string, or of tiles and ``more`` in a file of ``intmp``."""
    if string != "int4 tiles":
        return {"quantization": string, "quant_backend": "native" if string else "auto"}
    path = Path(folder) / "tiles.json"
    path.write_text(json.dumps(TILES | more))
    return {"quantization": "intmp", "quant_cfg_path": str(path), "quant_backend": "native"}


def products(folder: str, k: int = K, n: int = N) -> Iterator[tuple[str, Callable[..., Any], Any]]:
    """Yield the name of each format, its function of (weight, x), and the weight's shapes.

    Args:
      folder: to write files to.
      k, n: contraction and columns of the weight.
    """
    kernel = jax.ShapeDtypeStruct((k, n), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((1, k), jnp.bfloat16)

    def plain(params: Any, x: jax.Array) -> jax.Array:
        return x @ params["kernel"]

    yield "bf16", plain, {"kernel": kernel}
    for string in STRINGS:
        quantized = jaxquant.quantize(plain, config(string, folder))
        converted = jax.eval_shape(lambda p, q=quantized: q.convert(p, {}, x), {"kernel": kernel})
        yield string, lambda params, x, q=quantized: q(params, {}, x), converted
    dims = (((1,), (0,)), ((), ()))
    for name, spec in SPECS.items():
        recipe = Recipe(name, fwd=MatmulSpec(None, spec))
        converted = jax.eval_shape(lambda w, s=spec: ConvertedKernel(quantize(w, s, (0,)), "bfloat16"), kernel)
        yield name, lambda weight, x, r=recipe: dot_general(x, weight, dims, recipe=r), converted
    for name in PACKED:
        packed = jax.eval_shape(lambda w, f=name: pack_array(w, f, 1), jax.ShapeDtypeStruct((n, k), jnp.bfloat16))
        yield f"{name} packed", lambda weight, x: matmul(x, weight), packed


def measure_products(compilers: list[Compiler], only: list[str]) -> list[Row]:
    """Price every format, number of rows and chip."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, program, weight in products(folder):
            for each, compiler in ((n, c) for n in ROWS for c in compilers if not only or name in only):
                x = jax.ShapeDtypeStruct((each, K), jnp.bfloat16)
                rows.append(
                    {"chip": compiler.target, "rows": each, "weight": name}
                    | compiler.price(program, weight, x, weights=weight)
                )
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def decoder(path: str, overrides: dict[str, Any], fields: dict[str, Any], slots: int) -> tuple[Engine, Any]:
    """Return an engine without arrays, and the shapes of its parameters.

    Args:
      path, overrides: of the model's config.
      fields: of its quantization.
      slots: of the engine.
    """
    given = load_yaml(str(ROOT / path)) | {"health_every": 0, "remat_policy": "none"} | overrides | fields
    layers: TrainConfig = build(TrainConfig, given)
    shape = model_config(layers, ByteTokenizer.vocab_size)
    example = jnp.zeros((1, LENGTH), jnp.int32)
    if fields["quantization"]:
        params = converted_shapes(layers, shape, example)
        layers = build(TrainConfig, given | {"checkpoint_is_quantized": True})
        model = make_model(layers, shape, example)
    else:
        model = make_model(layers, shape, example)
        params = jax.eval_shape(model.init, jax.random.key(0))[0]
    return Engine(model, params, {}, shape, max_length=LENGTH, slots=slots), params


def measure_decoding(compilers: list[Compiler], only: list[str]) -> list[Row]:
    """Price a step of decoding of every model, format, number of texts and chip."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (path, overrides) in MODELS.items():
            for string in [each for each in DECODED if not only or each in only]:
                for slots in SLOTS:
                    engine, params = decoder(path, overrides, config(string, folder, **HEADS), slots)
                    cache = jax.eval_shape(engine.empty)
                    each = jax.ShapeDtypeStruct((slots,), jnp.int32)
                    shapes = ((params, {}), cache, each, each, each, each)
                    for compiler in compilers:
                        rows.append(
                            {"chip": compiler.target, "model": name, "texts": slots, "weight": string or "float"}
                            | compiler.price(engine._decode_slots, *shapes, weights=params, donate_argnums=1)
                        )
                        print(rows[-1], file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    measure = {"products": measure_products, "decoding": measure_decoding}[what]
    chosen = [word for word in words if word in TARGETS]
    compilers = [Compiler(target) for target in chosen or TARGETS]
    print(json.dumps(measure(compilers, [word for word in words if word not in TARGETS])))
