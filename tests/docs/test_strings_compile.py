"""README's table of strings by chip, compared with the chips' compilers."""

from __future__ import annotations

import json
import re
from typing import Any

import jax
import pytest

import jaxquant
from jaxquant.cli import main
from tests.docs.test_blocks import ROOT
from tests.models import chain

OPTIMIZED = True  # compiled like users' programs for chips
CHIPS = {"H100": "h100", "H200": "h200", "B200": "b200", "v5e": "v5e", "v5p": "v5p", "v6e": "v6e", "v7x": "v7x"}


def table() -> list[Any]:
    """Return (target, strings) of each chip of the table that has a compiler here."""
    section = (ROOT / "README.md").read_text().partition("## Which string")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*?) \| .* \| `(\w+)` \|$", section, re.M)
    return [pytest.param(CHIPS[each], [text], id=CHIPS[each]) for row, text in rows for each in CHIPS if each in row]


def audit(strings: list[str], target: str) -> Any:
    """Audit one training step that has a layer for each string; the layer's name is the string."""
    x = jax.ShapeDtypeStruct((256, 256), "bfloat16")
    layers = chain(**dict.fromkeys(strings, 256))
    rules = [{"path": string, "recipe": string} for string in strings]
    model = jaxquant.maybe_quantize_model(layers, {"rules": rules, "quant_backend": "native"}, x)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    return jaxquant.aot.audit(jax.grad(lambda v, x: model.apply(v, x).sum()), variables, x, target=target)


def committed() -> dict[str, dict[str, str]]:
    """Return the rows of the committed table of strings and chips, by string."""
    rows = json.loads((ROOT / "benchmarks/results/strings-chips.json").read_text())
    return {row["quantization"]: row for row in rows}


IN_TABLE = [param for param in table() if param.id in committed()["int8"]]


@pytest.mark.parametrize(("target", "strings"), IN_TABLE)
def test_the_strings_of_a_chip_are_in_the_committed_table(target: str, strings: list[str]):
    became = [committed()[string][target] for string in strings]
    assert not any(re.search("refused|s32|f16", each.replace("bf16", "")) for each in became), became


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize(("target", "strings"), [param for param in table() if param not in IN_TABLE])
def test_the_strings_of_a_chip_compile_for_it(target: str, strings: list[str]):
    found = audit(strings, target)
    assert found.outcome.fell_back == []
    assert found.counts


def test_the_table_names_every_chip_that_has_a_compiler():
    assert [param.id for param in table()] == list(CHIPS.values())


@pytest.mark.aot
@pytest.mark.parametrize(("target", "strings"), [("h200", ["fp4", "mxfp4", "int4"]), ("b200", ["mxfp8", "fp4"])])
def test_a_sample_of_the_committed_table_is_what_the_compilers_say(tmp_path, target: str, strings: list[str]):
    only = [f"--only={string}" for string in strings]
    assert main(["bench", "strings", "--target", target, "--out", str(tmp_path), *only]) == 0
    found = json.loads((tmp_path / "strings-chips.json").read_text())
    assert {row["quantization"]: row[target] for row in found} == {name: committed()[name][target] for name in strings}
