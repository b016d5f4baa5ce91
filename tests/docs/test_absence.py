"""What README, docs and docstrings say is absent: each statement is listed here, and is held against the code."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxquant
from jaxquant.audit.health import HealthMonitor
from jaxquant.config.recipes import RECIPES
from jaxquant.ops.conv import conv_general_dilated
from jaxquant.ops.ragged import ragged_dot
from tests.docs.test_blocks import BLOCK, PAGES, ROOT

X = jax.ShapeDtypeStruct((8, 8), "float32")


def timed_on() -> list[str]:
    """Return the devices whose figures ``scripts/bench.py`` wrote, in NAME-DEVICE.json, as "1 x NVIDIA H200"."""
    found = (json.loads(path.read_text()) for path in (ROOT / "benchmarks").glob("*.json"))
    return [figures["device"] for figures in found if isinstance(figures, dict) and "device" in figures]


def no_tpu() -> None:
    assert [device for device in timed_on() if "TPU" in device] == []


def no_mesh_of_chips() -> None:
    assert [device for device in timed_on() if not device.startswith("1 x ") and not device.endswith(" cpu")] == []


def no_explicit_ragged() -> None:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    rows = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, PartitionSpec("x")))
    recipe, image = RECIPES["fp8_current"].recipe, rows[None, :, :, None]
    with jax.set_mesh(mesh):
        with pytest.raises(NotImplementedError, match="explicit mesh"):
            ragged_dot(rows, jnp.ones((1, 8, 8)), jnp.array([4]), recipe=recipe)
        with pytest.raises(NotImplementedError, match="explicit mesh"):
            conv_general_dilated(image, jnp.ones((1, 1, 1, 1)), (1, 1), "SAME", recipe=recipe)


def no_calibrating_methods() -> None:
    names = [path.stem for path in (ROOT / "jaxquant").rglob("*.py")] + list(jaxquant.__all__)
    assert [name for name in names if re.search("gptq|awq|smooth|odml", name, re.I)] == []


def no_trainer_in_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["packages"]["find"]["include"] == ["jaxquant", "jaxquant.*"]  # built by tests/scripts/test_wheel.py


def no_nnx_health() -> None:
    with pytest.raises(TypeError, match="HealthMonitor taps the layers of a Linen module"):
        HealthMonitor(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), {"quantization": "fp8"}, lambda params, x: x, X)


def held(test: str) -> Callable[[], None]:
    """Held by a test of its own, which is there."""
    file, name = test.split("::")
    return lambda: (f"def {name}(" in (ROOT / "tests" / file).read_text()) or pytest.fail(test)


no_ops_of_libraries = held("docs/test_out_of_reach.py::test_the_message_is_what_a_user_sees")
no_conversion_of_mapped_kernels = held(
    "serving/test_convert.py::test_kernels_that_are_not_read_as_they_are_stored_stay_in_float"
)
no_other_packed_matmul = held("formats/test_packed_array.py::test_what_does_not_fit_is_refused")
no_maxtext_fields = held("config/test_quant_config.py::test_maxtext_features_that_are_not_here")
STATEMENTS: list[tuple[str, str, Callable[[], None]]] = [
    ("README.md", "no TPU has run this code yet", no_tpu),
    (
        "README.md",
        "H100, H200 and B200 have no matmul of `fp4`",
        held("docs/test_strings_compile.py::test_gpus_have_no_matmul_of_four_bits"),
    ),
    (
        "docs/index.md",
        "What it is not, yet ¶ H200s have run it on two days (`benchmarks/on-chip.md`), and no TPU has",
        no_tpu,
    ),
    (
        "docs/from/qwix.md",
        "What Qwix has and jaxquant has not: GPTQ, AWQ, SmoothQuant, ODML export",
        no_calibrating_methods,
    ),
    ("docs/from/maxtext.md", "errors that name the field: not here", no_maxtext_fields),
    ("docs/guide/audit.md", "in a checkout and not in the wheel", no_trainer_in_the_wheel),
    (
        "docs/guide/choosing.md",
        "compilers for H100, H200 and B200 have no matmul of plain e2m1",
        held("docs/test_strings_compile.py::test_gpus_have_no_matmul_of_four_bits"),
    ),
    ("docs/guide/choosing.md", "contractions that it has no op for (convolutions, ragged matmuls", no_ops_of_libraries),
    ("docs/guide/health.md", "the layers of Linen models alone; an NNX module is a TypeError", no_nnx_health),
    ("docs/guide/meshes.md", "(ragged matmuls and convolutions not there)", no_explicit_ragged),
    ("docs/guide/meshes.md", "Several hosts, and several accelerators, have not been tried", no_mesh_of_chips),
    ("docs/guide/serving.md", "under `WeightNorm` is not converted", no_conversion_of_mapped_kernels),
    (
        "docs/guide/what.md",
        "What cannot be reached",
        held("docs/test_out_of_reach.py::test_every_line_of_the_tables_is_run"),
    ),
    (
        "docs/start/pure.md",
        "What cannot be reached",
        held("docs/test_out_of_reach.py::test_every_line_of_the_tables_is_run"),
    ),
    ("jaxquant/formats/packed_matmul.py", "there is no other yet", no_other_packed_matmul),
    (
        "jaxquant/config/quant_config.py",
        "a field of MaxText's that asks for what is not implemented",
        no_maxtext_fields,
    ),
]
"""Page, words, and the check that fails when they stop being true."""

ABSENT = re.compile(
    r"(?<!that is )(?<!that are )\bnot here\b|\bnot implemented\b|\bno kernel\b|\bNo accelerator\b"
    r"|\b(?:none|not|nothing)\b[^.;:|¶]*\b(?:yet|on a chip|accelerator)\b|\bha(?:s|ve) not (?:run|been)\b"
    r"|\bjaxquant has (?:not|none|no)\b|\bis not converted\b|\bnot there\b|\b[Cc]annot be reached\b"
    r"|\bcompilers?\b[^.;|¶]*\brefuses?\b|\bmodels alone\b|\bnot in the wheel\b|\bit has no op\b|\bonly on\b"
)
"""Words by which a statement says that something is absent."""


def text_of(path: Path) -> str:
    """Return a page without its code, or the docstrings of a module, on one line."""
    if path.suffix == ".md":
        return " ".join(BLOCK.sub("", path.read_text()).replace("\n\n", " ¶ ").split())
    tree = ast.parse(path.read_text())
    strings = [
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    return " ".join(" ".join(text.split()) for text in strings if isinstance(text, str))


@pytest.mark.parametrize(
    ("page", "words", "check"), STATEMENTS, ids=[f"{page}: {words}" for page, words, _ in STATEMENTS]
)
def test_it_is_still_true(page: str, words: str, check: Callable[[], None]):
    assert words in text_of(ROOT / page), "the page does not say so any more; take the line out of the list"
    check()


def test_every_statement_of_absence_is_listed():
    sources = [*PAGES, *(ROOT / "jaxquant").rglob("*.py")]
    missing = []
    for path in sources:
        text, page = text_of(path), path.relative_to(ROOT).as_posix()
        listed = [span for name, words, _ in STATEMENTS if name == page for span in _places(text, words)]
        narrow = ABSENT if path.suffix == ".md" else re.compile(r"\bnot implemented\b|\bno other yet\b")
        for found in narrow.finditer(text):
            if not any(start < found.end() and found.start() < end for start, end in listed):
                missing.append((page, text[max(found.start() - 60, 0) : found.end() + 60]))
    assert missing == [], "list it, with a check that fails when it stops being true"


def _places(text: str, words: str) -> list[tuple[int, int]]:
    return [found.span() for found in re.finditer(re.escape(words), text)]
