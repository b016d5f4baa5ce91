"""Config strings that keep the weights of a foreign checkpoint."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxquant.config.recipes import RECIPES
from jaxquant.core.recipe import MatmulSpec, TensorSpec
from jaxquant.export import HfFolder, Source
from jaxquant.export.families import tensors_of
from jaxquant.export.gguf_file import GgufFile
from jaxquant.export.hf import LayerSpec, to_recipe
from jaxquant.export.source import HEAD
from jaxquant.training.config import TrainConfig
from jaxquant.training.exporting import locate_tensors


def native_fields(
    checkpoint: Path, source: Source, folder: HfFolder | None, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the config fields that keep the weights of a checkpoint and quantize inputs as the checkpoint does.

    The most frequent config string of the layers is ``quantization``, and rules select the others. A layer stays in
    float if it is float in the checkpoint, or if no config string has its GGML type.

    Raises:
      ValueError: no config string keeps the weights of a layer, or ``changes`` enables ``scan_layers`` but a type
        differs between blocks of the decoder.
    """
    shape, linears = source.shape, source.layout.linears
    own: dict[str, str | None] = {}  # config string by module
    strings: dict[str, str] = {}
    if folder is None:
        stored = GgufFile(checkpoint).tensors
        strings = {name: f"ggml_{stored[tensor.gguf].kind.lower()}" for name, tensor in tensors_of(shape).items()}
        for module in (*linears, HEAD):
            if (string := strings.get(f"{module}.weight")) is not None and (module != HEAD or string in RECIPES):
                own[module] = string if string in RECIPES else None
    else:
        by_spec = {spec: spec and _native_string(checkpoint, spec) for spec in {folder.spec(name) for name in linears}}
        own = {module: by_spec[folder.spec(module)] for module in linears}
    if not any(own.values()):
        is_float = folder is not None or set(strings.values()) <= {"ggml_f32", "ggml_f16", "ggml_bf16"}
        problem = "is a float checkpoint" if is_float else "stores its layers in types that no config string has"
        raise ValueError(f"{checkpoint} {problem}; pass the quantization to serve it with, such as quantization=int8")

    def strings_by_path(is_scanned: bool) -> dict[str, set[str | None]]:
        found: dict[str, set[str | None]] = {}
        for name, place in locate_tensors(TrainConfig(scan_layers=is_scanned), shape).items():
            if (module := name.removesuffix(".weight")) in own:
                found.setdefault(place.path.removesuffix("/kernel"), set()).add(own[module])
        return found

    mixed = [path for path, strings in strings_by_path(True).items() if len(strings) > 1]
    is_scanned = changes.get("scan_layers", not mixed)
    if mixed and is_scanned:
        problem = f"{checkpoint} stores the layers {mixed[0]} in several types, but scanned layers have one"
        raise ValueError(f"{problem}; leave out scan_layers")
    base, rules = collections.Counter(filter(None, own.values())).most_common(1)[0][0], {}
    for path, (string,) in strings_by_path(is_scanned).items():
        if string != base or path == "logits_dense":  # the head stays in float without a rule
            rules.setdefault(string, []).append(path)
    found = [{"path": "|".join(paths), "recipe": string} for string, paths in rules.items()]
    return {"quantization": base, "rules": [*changes.get("rules", ()), *found], "scan_layers": is_scanned}


def _native_string(checkpoint: Path, spec: LayerSpec) -> str:
    """Return the config string that keeps the weights of a layer and quantizes its input as the checkpoint does.

    Raises:
      ValueError: there is no such config string; the message names the config strings that keep the weights.
    """
    recipes, kept = {name: row.recipe for name, row in RECIPES.items() if row.recipe is not None}, []
    with contextlib.suppress(NotImplementedError):  # no matching recipe
        weight = _comparable_specs(to_recipe(dataclasses.replace(spec, input=None), "").fwd)[1]
        kept = [name for name, recipe in recipes.items() if _comparable_specs(recipe.fwd)[1] == weight]
        wanted = _comparable_specs(to_recipe(spec, "").fwd)
        if found := next((name for name in kept if _comparable_specs(recipes[name].fwd) == wanted), None):
            return found
    keeping = f"{', '.join(kept)} would keep its weights; " if kept else ""
    fix = f"pass the quantization to serve it with, such as quantization={kept[0] if kept else 'int8'}"
    raise ValueError(f"{checkpoint} has a quantization that no config string computes; {keeping}{fix}")


def _comparable_specs(forward: MatmulSpec) -> tuple[Any, ...]:
    """Return the parts of a forward matmul that a checkpoint also describes.

    Recipes with delayed scales compare equal to recipes with static scales.
    """

    def plain(operand: Any, is_input: bool) -> Any:
        if not isinstance(operand, TensorSpec):
            return None
        bare = dataclasses.replace(operand, scaling="dynamic", reciprocal=False, keeps_grid=False)
        return bare, is_input and operand.scaling != "dynamic"

    return plain(forward.lhs, True), plain(forward.rhs, False)
