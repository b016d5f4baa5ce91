"""Comparison of a checkpoint's formats with the formats in which servers compute.

Servers change checkpoints when they load them: a server can requantize weights, round scales, or leave inputs
unquantized. ``servers.yml`` has one rule for each known combination of server, chips and stored format, with its
source. The comparison reads names, shapes and scales of a checkpoint, and no server runs.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxquant.config.loader import load_yaml
from jaxquant.config.quant_config import QuantConfig
from jaxquant.config.recipes import RECIPES
from jaxquant.core.dtypes import element
from jaxquant.core.recipe import Recipe, TensorSpec
from jaxquant.core.typed import build, nearest
from jaxquant.export.folder import FLOATS
from jaxquant.export.gguf_file import GgufFile
from jaxquant.export.hf import LayerSpec, OperandSpec, to_recipe
from jaxquant.export.hf.tensors import dtype_name
from jaxquant.export.named import NamedFolder
from jaxquant.export.schemes import ROUNDED_BLOCKS, ROWS
from jaxquant.export.source import fused_with

SAME, NOT_KNOWN, DIFFERS, REFUSED = RESULTS = ("same", "not known", "differs", "refused")
"""Results of a comparison, from best to worst."""
_AS_FLOAT = "not quantized"
_FUSED_EXPERTS = re.compile(r"(.*\.experts\.(?:gate_up_proj|down_proj))(?:_blocks)?")
_LOOKED_UP = re.compile(r"(.*\.)?(embed\w*|wte|wpe|token_embd|position_embd)")


@dataclasses.dataclass(frozen=True)
class Rule:
    """Formats in which a server computes layers of some stored formats.

    Attributes:
      server: name of the server.
      chips: classes of chips.
      stored: names of formats or patterns with ``*``: a format of ``export.SCHEMES``, ``fp8_block scale_fmt=ue8m0``,
        a float dtype, or ``gguf_`` and a type.
      source: file and version in which the server defines the behaviour.
      layers: ``linear`` for layers outside of experts, ``experts``, or ``all``.
      weight, input: formats in which the server computes; "" if it computes as stored.
      unless: property of a layer whose weight is computed as stored: ``equal fused scales`` or ``powers of two``.
      refused: reason why the server does not load the checkpoint.
      how: explanation of the difference.
    """

    server: str
    chips: list[str]
    stored: list[str]
    source: str
    layers: str = "linear"
    weight: str = ""
    input: str = ""
    unless: str = ""
    refused: str = ""
    how: str = ""

    def matches(self, server: str, kind: str, layer: Layer) -> bool:
        """Return whether the rule states how a server computes a layer on a class of chips."""
        if server != self.server or kind not in self.chips:
            return False
        is_stored = any(fnmatch.fnmatchcase(layer.stored, each) for each in self.stored)
        return is_stored and self.layers in ("all", "experts" if layer.is_expert else "linear")


class Layer(NamedTuple):
    """A linear layer of a checkpoint.

    Attributes:
      name: name in the checkpoint.
      stored: name of the stored format, or "" if no rule can name it.
      weight, input: stored formats in words.
      has_equal_fused_scales: whether the layers that servers fuse with this one have the same per-tensor scale.
      has_powers_of_two: whether all scales of the weight are powers of two.
    """

    name: str
    stored: str
    weight: str
    input: str = _AS_FLOAT
    has_equal_fused_scales: bool = True
    has_powers_of_two: bool = False

    @property
    def is_expert(self) -> bool:
        return bool(re.search(r"\.experts\.|_exps\.", self.name))


class ServedLayer(NamedTuple):
    """A layer as stored and as a server computes it; ``source`` is the source of the rule, "" if there is no rule."""

    layer: Layer
    result: str
    weight: str
    input: str
    how: str
    source: str


_TABLE = load_yaml(Path(__file__).with_name("servers.yml"))
SERVERS: Mapping[str, Any] = _TABLE["servers"]
"""Version and address of each server."""
CHIPS: Mapping[str, str] = {chip: kind for kind, chips in _TABLE["chips"].items() for chip in chips}
"""Class of each chip."""
RULES = tuple(build(Rule, row) for row in _TABLE["rules"])


def read_layers(path: str | Path) -> list[Layer]:
    """Return the linear layers of a Hugging Face folder or a GGUF file, in the order of the file.

    Embeddings are not included, even if a model uses its embedding as the output head.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or no linear layer is found.
      NotImplementedError: the quantization is not supported.
    """
    layers = list(_hf_layers(NamedFolder(path)) if Path(path).is_dir() else _gguf_layers(GgufFile(path)))
    if not layers:
        raise ValueError(f"{path} has no linear layer with a known name; pass a checkpoint of a decoder")
    return layers


def served_layers(layers: Iterable[Layer], server: str, chip: str) -> list[ServedLayer]:
    """Return how a server computes each layer on a chip.

    Args:
      layers: result of ``read_layers``.
      server: a key of ``SERVERS``.
      chip: a key of ``CHIPS``.

    Raises:
      ValueError: the server or the chip is unknown.
    """
    check_names(server, chip)
    return [_serve(layer, server, CHIPS[chip]) for layer in layers]


def check_names(server: str | None, chip: str | None) -> None:
    """Raise ValueError if the server or the chip is unknown; None is accepted."""
    for name, known, word in ((server, SERVERS, "server"), (chip, CHIPS, "chip")):
        if name is not None and name not in known:
            raise ValueError(f"{word} {name!r} is not known; {nearest(name, known)}")


def worst_result(served: Iterable[ServedLayer]) -> str:
    """Return the worst result of some layers: ``refused``, ``differs``, ``not known`` or ``same``."""
    return max((each.result for each in served), key=RESULTS.index, default=SAME)


def surviving_strings(server: str, chip: str) -> list[str]:
    """Return the config strings whose forward matmul a server computes unchanged, each with a format to export to."""
    found = []
    for name, stored in _exported_strings():
        place = "mlp.experts.0.up_proj" if stored == "mxfp4" else "mlp.up_proj"
        layer = Layer(place, stored, "", "", has_powers_of_two=True)
        if _serve(layer, server, CHIPS[chip]).result == SAME:
            found.append(f"{name} as {stored}")
    return found


def _serve(layer: Layer, server: str, kind: str) -> ServedLayer:
    rule = next((rule for rule in RULES if rule.matches(server, kind, layer)), None)
    if rule is None:
        return ServedLayer(layer, NOT_KNOWN, "", "", "", "")
    if rule.refused:
        return ServedLayer(layer, REFUSED, "", "", rule.refused, rule.source)
    is_kept = {"equal fused scales": layer.has_equal_fused_scales, "powers of two": layer.has_powers_of_two}
    weight = layer.weight if is_kept.get(rule.unless) else rule.weight or layer.weight
    inputs = rule.input or layer.input
    is_same = (weight, inputs) == (layer.weight, layer.input)
    how = "" if is_same and rule.weight else rule.how
    return ServedLayer(layer, SAME if is_same else DIFFERS, weight, inputs, how, rule.source)


def _hf_layers(folder: NamedFolder) -> Iterator[Layer]:
    names = {stored: name for name, stored in _stored_specs().items()}
    quantization = folder.quantization
    for tensor, (shape, kind) in folder.entries.items():
        dtype = dtype_name(kind, tensor)
        fused, (module, _, end) = _FUSED_EXPERTS.fullmatch(tensor), tensor.rpartition(".")
        if fused:
            module = fused[1]
        elif end not in ("weight", "weight_packed") or len(shape) < 2 or _LOOKED_UP.fullmatch(module):
            continue
        spec = None if dtype in FLOATS or quantization is None else quantization.spec(module)
        if spec is None or quantization is None:
            yield Layer(module, dtype, dtype)
            continue
        scalars = [found for each in fused_with(module) if (found := _scalars(folder, each))]
        yield Layer(
            module,
            names.get((quantization.method, spec), ""),
            _describe(spec.weight),
            _AS_FLOAT if spec.input is None else _describe(spec.input),
            all(each == scalars[0] for each in scalars),
            spec.weight.is_block and _has_powers_of_two(folder.tensors(module)),
        )


def _gguf_layers(file: GgufFile) -> Iterator[Layer]:
    for tensor, entry in file.tensors.items():
        module = tensor.removesuffix(".weight")
        if len(entry.shape) > 1 and not _LOOKED_UP.fullmatch(module):
            yield Layer(module, f"gguf_{entry.kind.lower()}", entry.kind)


def _scalars(folder: NamedFolder, module: str) -> dict[str, float]:
    """Return the tensors of one element of a layer, which are its per-tensor scales."""
    return {end: float(array.reshape(())) for end, array in folder.tensors(module).items() if array.size == 1}


def _has_powers_of_two(tensors: Mapping[str, np.ndarray]) -> bool:
    """Return whether the block scales of a layer are powers of two."""
    scale = next((tensors[end] for end in (".weight_scale_inv", ".weight_scale") if end in tensors), None)
    return scale is not None and scale.dtype.kind == "f" and bool((np.frexp(scale)[0] == 0.5).all())


def _describe(operand: OperandSpec) -> str:
    """Describe the format of an operand as in ``servers.yml``."""
    places = {"tensor": "tensor", "rowwise": "channel", "colwise": "token"}
    place = places.get(operand.granularity) or "x".join(map(str, operand.block_size or ()))
    is_rounded = operand.power_of_two_scale and operand.scale_dtype == "float32"
    scale = "power-of-two" if is_rounded else operand.scale_dtype.removeprefix("float8_").removesuffix("fnu")
    parts = [f"{element(operand.dtype).short} per {place}", f"{scale.removesuffix('fn')} scales"]
    parts += ["float32 scale of the tensor"] if operand.outer_scale else []
    parts += [] if operand.symmetric else ["zero points"]
    return ", ".join([*parts, *(["dynamic"] if operand.origin.is_dynamic else [])])


@functools.cache
def _stored_specs() -> Mapping[str, tuple[str, LayerSpec]]:
    """Return the method and the spec of the layers of each stored format."""
    read = {scheme.name: scheme.quantization() for scheme in (*ROWS, ROUNDED_BLOCKS)}
    return {name: (found.method, found.specs[0]) for name, found in read.items() if found is not None}


@functools.cache
def _exported_strings() -> list[tuple[str, str]]:
    """Return each config string, without aliases, with each stored format that computes its forward matmul."""
    rows = {row: name for name, row in reversed(RECIPES.items()) if row.recipe is not None}
    rounded = QuantConfig(quantization="fp8_block", scale_fmt="ue8m0").recipe()
    recipes: Any = {name: row.recipe for row, name in reversed(rows.items())} | {ROUNDED_BLOCKS.name: rounded}
    formats = {stored: _forward(to_recipe(spec, stored)) for stored, (_, spec) in _stored_specs().items()}
    found = []
    for name, recipe in recipes.items():
        wanted = _forward(recipe)
        codec = wanted[1] and wanted[1].codec
        stored = [f"gguf_{codec}"] if codec else [each for each, specs in formats.items() if specs == wanted]
        found += [(name, each) for each in stored]
    return found


def _forward(recipe: Recipe) -> list[TensorSpec | None]:
    """Return the operands of the forward matmul, without fields that define how a scale is rounded."""
    specs = [recipe.resolve("fwd", "lhs"), recipe.resolve("fwd", "rhs")]
    return [spec and dataclasses.replace(spec, reciprocal=False, keeps_grid=False) for spec in specs]
