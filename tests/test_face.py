"""What ``import jaxquant`` loads and names, each question in a fresh process: modules stay loaded in this one."""

from __future__ import annotations

import ast
import json
import os
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
    load = "from jaxquant.backends import load; load('native')"
    loaded = loaded_by(f"import jaxquant; [getattr(jaxquant, name) for name in {names}]; {load}")
    assert {"jax", "flax"} <= loaded
    assert loaded & {"orbax", "tensorstore", "aqt", "qwix"} == set()


def test_every_public_name_is_there_and_none_warns():
    code = "import jaxquant; from jaxquant import *; print(all(name in dir(jaxquant) for name in jaxquant.__all__))"
    assert run(code, "-W", "error").strip() == "True"


def test_a_public_name_is_a_function_a_class_or_a_subpackage():
    packages = {name for name in jaxquant.__all__ if name not in jaxquant._DEFINED_IN}
    assert packages == {"aot", "audit", "compat", "ops", "optim", "serving", "state"}
    assert len(jaxquant.__all__) - len(packages) <= 16
    assert not any(callable(getattr(jaxquant, name)) for name in packages)


def test_a_name_of_a_subpackage_is_found_there():
    with pytest.raises(AttributeError, match=r"; it is jaxquant\.compat\.maxtext\.configure_quantization"):
        jaxquant.configure_quantization  # noqa: B018


def test_the_audit_of_what_ran_does_not_load_that_of_what_will_run():
    modules = [f"jaxquant.audit.{path.stem}" for path in (ROOT / "jaxquant" / "audit").glob("[!_]*.py")]
    assert "jaxquant.audit.coverage" in modules
    code = f"import sys, {', '.join(modules)}; print([name for name in sys.modules if name.startswith('jaxquant.aot')])"
    assert run(code).strip() == "[]"


DISTRIBUTIONS = {"aqt": "aqtp", "google": "protobuf", "orbax": "orbax-checkpoint", "yaml": "pyyaml"}


def imported_packages() -> set[str]:
    """Return the packages of others that jaxquant imports."""
    found: set[str] = set()
    for path in (ROOT / "jaxquant").rglob("*.py"):
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


def test_a_base_install_trains_and_prints_the_table_of_coverage():
    extras = ("grain", "tensorboardX", "tokenizers", "plotly", "pyarrow", "flatbuffers", "libtpu")
    code = f"""
import sys
sys.modules |= dict.fromkeys({extras})  # their import is an error
import jax, jax.numpy as jnp, jaxquant
from flax import linen as nn
x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
for string in ("fp8", "int8", "int4"):
    model = jaxquant.maybe_quantize_model(nn.Dense(2), {{"quantization": string}}, x)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    print(jaxquant.coverage(model.apply, variables, x).text(120))
"""
    out = run(code)
    assert all(f"{element} × {element}" in out for element in ("e4m3", "int8", "int4"))


TYPED = """
from flax import linen as nn
from flax import nnx
from jaxquant import maybe_quantize_model, quantize
import jaxquant

class Linen(nn.Module):
    width: int = 3

class Nnx(nnx.Module):
    width = 3

reveal_type(maybe_quantize_model(Linen(), "fp8"))
reveal_type(jaxquant.maybe_quantize_model(Nnx(), {"quantization": "fp8"}))
reveal_type(quantize(lambda p, x: x @ p, "fp8"))
reveal_type(jaxquant.aot.audit)
jaxquant.state.TrainState, jaxquant.serving.save, jaxquant.ops
jaxquant.maybe_quantise_model
jaxquant.maybe_quantize_model(lambda x: x, "fp8")
"""


def test_type_checkers_know_the_names_and_what_comes_back(tmp_path: Path):
    (tmp_path / "user.py").write_text(TYPED)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    found = [
        (each["severity"], each["message"].splitlines()[0]) for each in json.loads(done.stdout)["generalDiagnostics"]
    ]
    types = [message.partition(" is ")[2] for severity, message in found if severity == "information"]
    assert types[:3] == ['"Linen"', '"Nnx"', '"QuantizedFunction"']
    assert types[3].endswith('-> Audit"')
    misspelt, no_model = [message for severity, message in found if severity == "error"]
    assert misspelt == '"maybe_quantise_model" is not a known attribute of module "jaxquant"'
    assert no_model.startswith('Argument of type "(x: Unknown) -> Unknown" cannot be assigned to parameter "model"')


TAKERS = {
    "maybe_quantize_model": lambda config: jaxquant.maybe_quantize_model(nn.Dense(2), config),
    "quantize": lambda config: jaxquant.quantize(lambda p, x: x @ p, config),
    "describe_layers": lambda config: jaxquant.describe_layers(nn.Dense(2), config),
    "coverage": lambda config: jaxquant.coverage(lambda x: x, 1.0, config=config),
    "configure_quantization": lambda config: maxtext.configure_quantization(config),
    "configure_kv_quant": lambda config: maxtext.configure_kv_quant(config),
    "get_quantization_rule": lambda config: maxtext.get_quantization_rule(config),
    "convert": lambda config: jaxquant.convert({"params": {}}, config, model=nn.Dense(2)),
    "calibrate": lambda config: jaxquant.calibrate({"params": {}}, config, [], model=nn.Dense(2)),
}
REFUSED = [
    (3, TypeError, "config 3 must be a QuantConfig"),
    (["fp8"], TypeError, r"config \['fp8'\] must be a QuantConfig"),
    ({"quantization": 8}, TypeError, "QuantConfig.quantization must be str, got 8"),
    ("fp9", ValueError, "quantization 'fp9' is not a known recipe; did you mean 'fp8'"),
    ({"quantization": "intmp", "quant_backend": "qwix"}, ValueError, "'intmp' does not run on quant_backend 'qwix'"),
    ("absent.yml", ValueError, "absent.yml cannot be read"),
]


@pytest.mark.parametrize("name", TAKERS)
def test_whatever_takes_a_config_refuses_it_alike_and_says_so(name: str):
    for config, kind, message in REFUSED:
        with pytest.raises(kind, match=message) as refused:
            TAKERS[name](config)
        assert type(refused.value) is kind
    taker = getattr(jaxquant if name in jaxquant.__all__ else maxtext, name)
    assert "TypeError, ValueError, NotImplementedError: the config, as" in taker.__doc__
