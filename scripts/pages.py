"""mkdocs hook that writes the API pages and the tables of options from the code.

A line ``<!-- api: PAGE -->`` becomes the entries of a page of ``PAGES``, each followed by its example in
``examples/api.md``. A line ``<!-- options: CLASS -->`` becomes a table of the fields of a class of ``OPTIONS``.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples/api.md"
_NAMES = """
jaxquant jaxquant
state jaxquant.state
optim jaxquant.optim
ops jaxquant.ops
exact jaxquant.exact
serving jaxquant.serving
serving jaxquant.serving.kv_cache empty append read nbytes quantization_of
export jaxquant.export export check_export FORMATS SCHEMES STATIC_INPUTS Source Layout Vocabulary DecoderShape layout_of
export jaxquant.export named_source named_tensors HfFolder NamedFolder open_gguf Row
export jaxquant.export.hf read_quantization to_recipe CheckpointQuantization LayerRule LayerSpec OperandSpec
formats jaxquant.formats CODECS Codec codec BlockParameters block_parameters PackedArray pack_array matmul
formats jaxquant.formats fake_quantize encode_tensor
recipes jaxquant.config.rules Rule
recipes jaxquant.core.recipe Recipe MatmulSpec TensorSpec DelayedSpec SparsitySpec Rotation
recipes jaxquant.core.tensor_spec Micro
recipes jaxquant.core.calibration Calibration
recipes jaxquant.core.qtensor QTensor make_qtensor dequantize
trace jaxquant.trace
audit jaxquant.audit.rows Coverage Row
audit jaxquant.audit.cost saved_for_backward
audit jaxquant.audit
aot jaxquant.aot
maxtext jaxquant.compat.maxtext
mlc jaxquant.compat.mlc
max jaxquant.compat.max parse_quant_config QuantConfig QuantizationEncoding QuantFormat WeightScaleSpec InputScaleSpec
max jaxquant.compat.max ScaleGranularity ScaleOrigin fp4_packed_k interleave_scales deinterleave_scales
"""
NAMES = [tuple(line.split()) for line in _NAMES.strip().splitlines()]
"""Page, module, and public names of the module; without names, the names in its ``__all__`` are used."""
PAGES = list(dict.fromkeys(page for page, *_ in NAMES))
MEMBERS = {"jaxquant.QuantConfig": "[from_any]", "jaxquant.core.qtensor.QTensor": "[parts, blocks, astype]"}
"""Public members of classes that also have internal members, by class. Other classes of ``recipes`` show none."""
OPTIONS = {"QuantConfig": "config.quant_config", "TrainConfig": "training.config", "Rule": "config.rules"}


def public_names() -> dict[str, list[str]]:
    """Return the full names on each page; an object with two public names is listed under the first."""
    pages, seen = {page: list[str]() for page in PAGES}, set[int]()
    for page, name, *listed in NAMES:
        module = importlib.import_module(name)
        for each in listed or module.__all__:
            value = getattr(module, each)
            if not isinstance(value, types.ModuleType) and id(value) not in seen and not each.startswith("__"):
                seen.add(id(value))
                pages[page].append(f"{name}.{each}")
    return pages


def examples() -> dict[str, str]:
    """Return the text under each heading of ``examples/api.md``: the imports of a page, or the example of a name."""
    sections = re.split(r"^## ", EXAMPLES.read_text(), flags=re.M)[1:]
    return {name.strip(): text.strip() for name, _, text in (section.partition("\n") for section in sections)}


def api(page: str) -> str:
    """Return the entries of a page as mkdocstrings directives."""
    shown = examples()
    parts = [f"The examples on this page start with:\n\n{shown[page]}"] if page in shown else []
    for name in public_names()[page]:
        members = MEMBERS.get(name, "false" if page == "recipes" else "")
        parts.append(f"::: {name}" + (f"\n    options: {{members: {members}}}" if members else ""))
        parts.append(f"**Example**\n\n{shown[name]}" if name in shown else "")
    return "\n\n".join(parts)


def attribute_texts(cls: type) -> Iterator[tuple[str, str]]:
    """Yield the fields that the docstrings of a class and its bases list under ``Attributes``, with their text."""
    for each in reversed(cls.__mro__):
        section = (inspect.cleandoc(each.__doc__ or "") + "\n").partition("\nAttributes:\n")[2].partition("\n\n")[0]
        for names, text in re.findall(r"^  (\w[\w, ]*): (.*(?:\n    .*)*)", section, re.M):
            for name in names.split(","):
                yield name.strip(), " ".join(text.replace("``", "`").split())


def yaml_type(hint: Any) -> str:
    """Return a type hint as text for readers who write YAML."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" if value != "" else '`""`' for value in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(yaml_type(each) for each in args)
    if origin is tuple:
        return f"list of {yaml_type(args[0])}"
    return "null" if hint is types.NoneType else hint.__name__


def options(name: str) -> str:
    """Return a table of the fields of a class: name, type, default, meaning and the config strings that read the field.

    Raises:
      ValueError: the docstring of the class has no text for a field.
    """
    from jaxquant.config.recipes import RECIPES

    cls, quant = (getattr(importlib.import_module(f"jaxquant.{OPTIONS[each]}"), each) for each in (name, "QuantConfig"))
    hints, texts = typing.get_type_hints(cls), dict(attribute_texts(cls))
    elsewhere = {field.name for field in dataclasses.fields(quant)} if name == "TrainConfig" else set()
    lines = ["| field | type | default | meaning |", "| --- | --- | --- | --- |"]
    for field in sorted(dataclasses.fields(cls), key=lambda field: "group" in field.metadata):  # fields of recipes last
        if field.name in elsewhere:
            continue
        text = texts.get(field.name) or next((f"see `{key}`" for key in texts if f"`{field.name}`" in texts[key]), "")
        if not text:
            raise ValueError(f"the docstring of {name} does not list {field.name} under Attributes")
        default = "required" if field.default is dataclasses.MISSING else f"`{json.dumps(field.default)}`"
        readers = ", ".join(f"`{string}`" for string, row in RECIPES.items() if field.name in row.fields)
        meaning = f"{text[:1].upper()}{text[1:]}".rstrip(".") + "." + (f" Read by {readers}." if readers else "")
        lines.append(
            f"| `{field.name}` | {yaml_type(hints[field.name])} | {default} | {meaning.replace('|', '&#124;')} |"
        )
    return "\n".join(lines)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marked lines of a page; mkdocs calls this function for each page."""
    write = {"api": api, "options": options}
    return re.sub(r"^<!-- (api|options): (\w+) -->$", lambda found: write[found[1]](found[2]), markdown, flags=re.M)
