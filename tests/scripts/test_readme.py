"""The README's example runs, and its table of strings is the table of recipes."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxquant
from jaxquant import RECIPES

README = (Path(__file__).parents[2] / "README.md").read_text()


def strings_table():
    """Write the table of recipes as the README has it."""
    groups = {}
    for name, row in RECIPES.items():
        groups.setdefault(id(row), (row, []))[1].append(f"`{name}`" if name else '`""`')
    lines = ["| `quantization` | numbers | `auto` | also on |", "| --- | --- | --- | --- |"]
    for row, names in groups.values():
        others = ", ".join(backend for backend in row.backends if backend != row.auto)
        lines.append(f"| {', '.join(names)} | {row.summary} | {row.auto} | {others} |")
    return "\n".join(lines)


def test_the_table_of_strings_is_current():
    assert strings_table() in README, f"replace the README's table of strings with:\n{strings_table()}"


def example(framework="linen"):
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    examples = [block for block in blocks if block.startswith("import")]
    assert len(examples) == 2
    (block,) = [block for block in examples if ("import nnx" in block) == (framework == "nnx")]
    return block


@pytest.mark.parametrize("quantization", ["", "int8", "fp8"])
def test_the_example_trains(quantization, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = example()
    assert '"quantization": "fp8"' in code
    scope = {}
    exec(code.replace('"quantization": "fp8"', f'"quantization": "{quantization}"'), scope)
    params, state = scope["params"], scope["quant_state"]
    start, _ = scope["jaxquant"].state.split(scope["model"].init(jax.random.key(1), scope["x"]))
    first = scope["loss"](start, scope["quant_state"], jax.random.key(0))
    last = scope["loss"](params, state, jax.random.key(0))
    assert last < 0.1 * first
    histories = [
        leaf for path, leaf in jax.tree.leaves_with_path(state) if "amax_history" in jax.tree_util.keystr(path)
    ]
    assert bool(histories) == (quantization == "fp8")
    assert all(jnp.sum(history > 0) == 200 for history in histories)  # one amax a step
    if quantization == "fp8":
        for block in re.findall(r"```python\n(.*?)```", README, flags=re.S):
            if not block.startswith("import"):  # what follows uses the example's names
                exec(block, scope)
        found = scope["found"].layers()
        assert [layer["fwd"] for layer in found] == ["float8_e4m3fn × float8_e4m3fn"] * 2
        # Nothing asks for the gradient of x.
        assert [layer["dlhs"] for layer in found] == ["", "float8_e5m2 × float8_e4m3fn"]
        assert int(scope["micro_state"].inner.mini_step) == 1
        trained = jaxquant.maybe_quantize_model(scope["plain"], scope["config"], scope["x"])
        variables = jaxquant.state.merge(params, state)
        np.testing.assert_array_equal(jax.jit(trained.apply)(variables, scope["x"]), scope["y"])


@pytest.mark.parametrize("quantization", ["", "fp8"])
def test_the_nnx_example_trains(quantization):
    code = example("nnx")
    assert '"quantization": "fp8"' in code
    scope = {}
    exec(code.replace('"quantization": "fp8"', f'"quantization": "{quantization}"'), scope)
    first = jnp.mean((scope["x"][:, :1] * scope["x"][:, 1:2]) ** 2)  # of a model that says 0
    assert scope["loss"](scope["model"]) < 0.1 * first
    state = nnx.to_pure_dict(nnx.state(scope["model"], scope["jaxquant"].state.QuantState))
    histories = [
        leaf for path, leaf in jax.tree.leaves_with_path(state) if "amax_history" in jax.tree_util.keystr(path)
    ]
    assert len(histories) == (6 if quantization else 0)
    assert all(jnp.sum(history > 0) == 200 for history in histories)  # one amax a step


@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_the_example_is_short(framework):
    lines = [line for line in example(framework).splitlines() if line.strip()]
    assert len(lines) <= 18


def test_the_files_it_names_are_there():
    root = Path(__file__).parents[2]
    for path in re.findall(r"`((?:configs|scripts|constraints|benchmarks|tests|train|jaxquant)/[\w./-]*)`", README):
        assert (root / path).exists(), path
