"""Modules and names that ``import jaxquant`` loads. Each test runs a new process, because modules stay loaded."""

from __future__ import annotations

import ast
import itertools
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from flax import linen as nn

import jaxquant
from jaxquant.compat import maxtext

ROOT = Path(__file__).parents[1]
STAGES = """
import json, sys
loaded = lambda: sorted({name.partition(".")[0] for name in sys.modules})
import jaxquant
bare = loaded()
[getattr(jaxquant, name) for name in jaxquant.__all__ if "serving" not in jaxquant._DEFINED_IN.get(name, name)]
from jaxquant.backends import load
load("native")
training = loaded()
from jaxquant import *
is_listed = all(name in dir(jaxquant) for name in jaxquant.__all__)
called = [name for name in jaxquant.__all__ if name not in jaxquant._DEFINED_IN and callable(getattr(jaxquant, name))]
print(json.dumps([bare, training, is_listed, called]))
"""


def run(code: str, *flags: str) -> str:
    done = subprocess.run([sys.executable, *flags, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_the_import_loads_nothing_training_no_checkpoint_library_and_no_public_name_warns():
    bare, training, is_listed, called = json.loads(run(STAGES, "-W", "error"))
    assert not {"jax", "flax", "optax", "orbax", "tensorstore", "yaml"} & set(bare)
    assert {"jax", "flax"} <= set(training)
    assert not {"orbax", "tensorstore", "aqt", "qwix"} & set(training)
    assert is_listed
    assert called == []  # a package is not a function


def test_a_public_name_is_a_function_a_class_or_a_subpackage():
    packages = {name for name in jaxquant.__all__ if name not in jaxquant._DEFINED_IN}
    assert packages == {"aot", "audit", "compat", "exact", "ops", "optim", "serving", "state"}
    with pytest.raises(AttributeError, match=r"; use jaxquant\.compat\.maxtext\.configure_quantization"):
        jaxquant.configure_quantization  # noqa: B018


DISTRIBUTIONS = {"aqt": "aqtp", "google": "protobuf", "orbax": "orbax-checkpoint", "yaml": "pyyaml"}


def imported_packages() -> set[str]:
    """Return the third-party packages that the library imports; the programs have extras for theirs."""
    found: set[str] = set()
    for path in set(ROOT.glob("jaxquant/**/*.py")) - {
        *ROOT.glob("jaxquant/training/*"),
        *ROOT.glob("jaxquant/bench/*"),
    }:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {name.partition(".")[0] for name in names}
    return found - sys.stdlib_module_names - {"jaxquant"}


def test_what_is_imported_is_a_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[<>=\[]", each)[0] for each in project["dependencies"]}
    assert {DISTRIBUTIONS.get(name, name) for name in imported_packages()} == declared | {"gguf"}
    assert any(each.startswith("gguf>") for each in project["optional-dependencies"]["train"])  # rare tensor types


TAKERS = {
    "maybe_quantize_model": lambda config: jaxquant.maybe_quantize_model(nn.Dense(2), config),
    "quantize": lambda config: jaxquant.quantize(lambda p, x: x @ p, config),
    "coverage": lambda config: jaxquant.coverage(lambda x: x, 1.0, config=config),
    "configure_quantization": lambda config: maxtext.configure_quantization(config),
    "convert": lambda config: jaxquant.convert(nn.Dense(2), {"params": {}}, config),
}
REFUSED = [
    (3, TypeError, "config 3 must be a QuantConfig"),
    (["fp8"], TypeError, r"config \['fp8'\] must be a QuantConfig"),
    ({"quantization": 8}, TypeError, "QuantConfig.quantization must be str, got 8"),
    ("fp9", ValueError, "quantization 'fp9' is not a known recipe; did you mean 'fp8'"),
    ({"quantization": "intmp", "quant_backend": "qwix"}, ValueError, "'intmp' does not run on quant_backend 'qwix'"),
    ("absent.yml", ValueError, "absent.yml cannot be read"),
]


def test_whatever_takes_a_config_refuses_it_alike_and_says_so():
    for (name, take), (config, kind, message) in itertools.product(TAKERS.items(), REFUSED):
        with pytest.raises(kind, match=message) as refused:
            take(config)
        assert type(refused.value) is kind, name
