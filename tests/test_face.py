"""What ``import jaxquant`` loads and names, each question in a fresh process: modules stay loaded in this one."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jaxquant

ROOT = Path(__file__).parents[1]
LOADED = "import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"


def run(code: str, *flags: str) -> str:
    done = subprocess.run([sys.executable, *flags, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def loaded_by(code: str) -> set[str]:
    return set(json.loads(run(f"{code}; {LOADED}")))


def test_the_import_loads_nothing():
    assert loaded_by("import jaxquant") & {"jax", "flax", "optax", "orbax", "tensorstore", "yaml"} == set()


def test_quantized_training_needs_no_checkpoint_library():
    names = [name for name in jaxquant.__all__ if "serving" not in jaxquant._DEFINED_IN.get(name, name)]
    assert {"maybe_quantize_model", "state", "coverage", "audit", "save_quantized"} <= set(names)
    loaded = loaded_by(f"import jaxquant; [getattr(jaxquant, name) for name in {names}]")
    assert {"jax", "flax"} <= loaded
    assert loaded & {"orbax", "tensorstore", "aqt", "qwix"} == set()


def test_every_public_name_is_there_and_none_warns():
    code = "import jaxquant; from jaxquant import *; print(all(name in dir(jaxquant) for name in jaxquant.__all__))"
    assert run(code, "-W", "error").strip() == "True"


def test_another_name_is_an_error():
    with pytest.raises(AttributeError, match="module 'jaxquant' has no attribute 'quantise'"):
        jaxquant.quantise  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'quantise'"):
        from jaxquant import quantise  # noqa: F401 # pyright: ignore


@pytest.mark.parametrize("first", ["jaxquant.audit.health", "jaxquant.aot.compile"])
def test_audit_is_a_package_and_a_function_whichever_module_comes_first(first):
    code = f"import {first}, jaxquant; print(callable(jaxquant.audit), jaxquant.audit.coverage.coverage.__name__)"
    assert run(code).split() == ["True", "coverage"]


def test_the_audit_of_what_ran_does_not_load_that_of_what_will_run():
    modules = [f"jaxquant.audit.{path.stem}" for path in (ROOT / "jaxquant" / "audit").glob("[!_]*.py")]
    assert "jaxquant.audit.coverage" in modules
    code = f"import sys, {', '.join(modules)}; print([name for name in sys.modules if name.startswith('jaxquant.aot')])"
    assert run(code).strip() == "[]"


@pytest.mark.parametrize("command", [["jaxquant.audit"], ["jaxquant", "audit"]], ids=" ".join)
def test_the_audit_is_told_by_the_name_that_called_it(command: list[str]):
    done = subprocess.run([sys.executable, "-m", *command, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert f"usage: python -m {' '.join(command)} [" in done.stdout


DISTRIBUTIONS = {"orbax": "orbax-checkpoint", "yaml": "pyyaml"}
EXTRAS = {"aqt": "jaxquant/backends/_aqt.py", "qwix": "jaxquant/backends/qwix.py"}


def imported_packages() -> dict[str, set[str]]:
    """Return the packages of others that jaxquant imports, with the files that do."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "jaxquant").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for top in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"jaxquant"}:
                found.setdefault(top, set()).add(path.relative_to(ROOT).as_posix())
    return found


def test_what_is_imported_is_a_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[<>=\[]", each)[0] for each in project["dependencies"]}
    found = imported_packages()
    assert {name: found.pop(name) for name in EXTRAS} == {name: {path} for name, path in EXTRAS.items()}
    assert {DISTRIBUTIONS.get(name, name) for name in found} == declared


def test_a_base_install_trains_and_prints_the_table_of_coverage():
    extras = ("aqt", "qwix", "grain", "tensorboardX", "tokenizers", "plotly", "pyarrow", "flatbuffers", "libtpu")
    code = f"""
import sys
sys.modules |= dict.fromkeys({extras})  # their import is an error
import jax, jax.numpy as jnp, jaxquant
from flax import linen as nn
x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
model = jaxquant.maybe_quantize_model(nn.Dense(2), {{"quantization": "fp8"}}, x)
variables = jax.eval_shape(model.init, jax.random.key(0), x)
print(jaxquant.coverage(model.apply, variables, x).text())
"""
    assert "e4m3 × e4m3" in run(code)


def test_it_tells_type_checkers_that_it_has_types():
    spec = importlib.util.find_spec("jaxquant")
    assert spec is not None
    assert spec.origin is not None
    assert (Path(spec.origin).parent / "py.typed").is_file()
    assert 'jaxquant = ["py.typed"]' in (ROOT / "pyproject.toml").read_text()
