"""Conversion of runs: the converted folder serves the trained model, bit for bit, and a mismatch is an error."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

import jaxquant
from jaxquant import serving
from jaxquant import state as quantization_state
from jaxquant.cli import main
from jaxquant.core.paths import tree_bytes
from jaxquant.core.qtensor import is_tensor
from jaxquant.core.typed import build, to_mapping
from jaxquant.training.config import TrainConfig
from jaxquant.training.conversion import Conversion, convert_run, converted_shapes, served_config
from jaxquant.training.model import Decoder
from jaxquant.training.serving import Served, open_contenders, open_served
from jaxquant.training.sums import DATA, add_late_sums, write_checkpoint_sums
from tests.serving.trees import assert_same
from tests.train.conftest import STEPS

KERNELS = [f"layers/self_attention/{name}" for name in ("query", "key", "value", "out")]
KERNELS += [f"layers/mlp/{name}" for name in ("wi_0", "wi_1", "wo")]
SCHEMES = {"fp8": ("native", "float8_e4m3fn"), "int8": ("aqt", "int8")}
Logits = Callable[[Served], np.ndarray]


@pytest.fixture(scope="module")
def runs(finished: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return quantization -> folder of a run; int8 has no quant state, so its run needs no training."""

    @functools.cache
    def get(name: str) -> Path:
        if name != "int8":
            return finished(name)
        folder = tmp_path_factory.mktemp("run") / "run"
        return configured(finished(""), folder, quantization=name, quant_backend=SCHEMES[name][0])

    return get


@pytest.fixture(scope="module")
def converted(runs: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Conversion]]:
    """Return quantization -> folder of the converted run, and the result of the conversion."""

    @functools.cache
    def get(name: str) -> tuple[Path, Conversion]:
        out = tmp_path_factory.mktemp("converted") / "out"
        return out, convert_run(runs(name), out, say=lambda text: None)

    return get


def configured(run: Path, folder: Path, **fields: Any) -> Path:
    """Copy a run and change its configuration, also in its checkpoints."""
    shutil.copytree(run, folder)
    config = folder / "config.yml"
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | fields))
    made_with = to_mapping(build(TrainConfig, yaml.safe_load(config.read_text())))
    for checkpoint in (folder / "checkpoints").iterdir():
        data = checkpoint / DATA
        data.write_text(json.dumps(json.loads(data.read_text()) | {"config": made_with}))
        write_checkpoint_sums(checkpoint)
        add_late_sums(checkpoint)
    return folder


@pytest.fixture(scope="module")
def logits() -> Logits:
    """Return the logits of a packed batch, computed in one program per model."""

    def run(served: Served) -> np.ndarray:
        inputs = jnp.asarray(np.random.default_rng(0).integers(0, 256, (3, 32)), jnp.int32)
        segments = jnp.asarray([[1] * 12 + [2] * 20, [1] * 32, [1] * 30 + [0] * 2])
        positions = jnp.asarray([[*range(12), *range(20)], [*range(32)], [*range(30), 0, 0]])
        rngs = {"quant": jax.random.key(0)}
        apply = jax.jit(lambda params, state: served.model.apply(params, state, inputs, segments, positions, rngs=rngs))
        return np.asarray(apply(served.params, served.quant_state))

    return run


def at(tree: Any, path: str) -> Any:
    for name in path.split("/"):
        tree = tree[name]
    return tree


@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_served_from_disk_is_what_was_trained(name: str, runs: Any, converted: Any, logits: Logits):
    (backend, dtype), (out, made) = SCHEMES[name], converted(name)
    trained, served = open_served(runs(name)), open_served(out)
    assert served.config == dataclasses.replace(trained.config, checkpoint_is_quantized=True)
    assert served.config.resolved_backend == backend
    assert served.step == trained.step == made.step
    assert served.quant_state == {}
    np.testing.assert_array_equal(logits(trained), logits(served))
    off = open_contenders(runs(name), [])["float"]
    assert (logits(off) != logits(served)).any()  # so it is the quantized model that both are
    # The tree is that of jaxquant.convert.
    variables = quantization_state.merge(trained.params, trained.quant_state)
    tokens = jnp.zeros((1, 32), jnp.int32)
    expected = jaxquant.convert(Decoder(trained.shape), variables, trained.config, tokens)["params"]
    found = serving.load(out).params
    assert_same(found, expected)
    assert jax.tree.structure(converted_shapes(trained.config, trained.shape, tokens)) == jax.tree.structure(found)
    floats = sum(leaf.size for leaf in jax.tree.leaves(trained.params))
    assert made.bytes_bf16 == 2 * floats
    held = jax.tree.leaves(found, is_leaf=is_tensor)
    assert made.bytes_quantized == sum(tree_bytes(leaf) if is_tensor(leaf) else leaf.nbytes for leaf in held)
    for path in KERNELS:
        layer = at(found, path)
        assert layer["kernel"].qvalue.dtype == dtype
        scale = layer["kernel"].input_scale
        assert (scale is not None) == (trained.quant_state != {})
        assert scale is None or (scale > 0).all()
    assert made.layers == dict.fromkeys(KERNELS, trained.config.quantization)


def test_bfloat16_embeddings_are_written_as_they_are_read(runs: Any, tmp_path: Path, logits: Logits):
    configured(runs(""), tmp_path / "run", quantization="int8", dtype="bfloat16", quant_backend="native")
    convert_run(tmp_path / "run", tmp_path / "out", say=lambda text: None)
    served = open_served(tmp_path / "out")
    assert served.params["token_embedder"]["embedding"].dtype == jnp.bfloat16
    assert at(served.params, "layers/mlp/wi_0/kernel").qvalue.dtype == jnp.int8
    assert {leaf.dtype.name for leaf in jax.tree.leaves(served.params["decoder_norm"])} == {"float32"}
    np.testing.assert_array_equal(logits(open_served(tmp_path / "run")), logits(served))


# Post-training quantization.


def test_an_unquantized_run_is_converted_after_training(runs: Any, tmp_path: Path, logits: Logits):
    said: list[str] = []
    convert_run(runs(""), tmp_path / "out", {"quantization": "fp8"}, say=said.append)
    # More than the run's eval_batches, 2.
    assert sum(text.startswith("calibrating fp8: held-out batch ") for text in said) > 2
    served = open_served(tmp_path / "out")
    for path in KERNELS:
        layer = at(served.params, path)
        assert layer["kernel"].qvalue.dtype == "float8_e4m3fn"
        assert (np.asarray(layer["kernel"].input_scale) > 0).all()
    # The float model with quantized layers is served: closer to the float model than 0 is, but not equal.
    exact, found = logits(open_served(runs(""))), logits(served)
    assert 0 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < 1


def test_another_quantization_replaces_the_runs(converted: Any, runs: Any, tmp_path: Path, logits: Logits):
    """No scales and no options of fp8 remain; the numbers equal those of the unquantized run."""
    said: list[str] = []
    run = configured(runs("fp8"), tmp_path / "run", rules=[{"path": ".*/mlp/wo", "recipe": "fp8"}])
    made = convert_run(run, tmp_path / "out", {"quantization": "int8w"}, say=said.append)
    assert said[0].startswith("quantization 'int8w' replaces the run's options, including rules; to keep a field,")
    assert (made.config.quantization, set(made.layers.values())) == ("int8w", {"int8w"})
    served = open_served(tmp_path / "out")
    assert at(served.params, KERNELS[0])["kernel"].input_scale is None
    assert at(served.params, KERNELS[0])["kernel"].qvalue.dtype == jnp.int8
    tokens = jnp.zeros((1, 32), jnp.int32)
    params = open_served(runs("fp8")).params
    expected = jaxquant.convert(Decoder(served.shape), {"params": params}, {"quantization": "int8w"}, tokens)
    assert_same(served.params, expected["params"])


def test_served_config_replaces_all_or_lays_over():
    config = TrainConfig(quantization="fp8", amax_init="flax", rules=[{"path": ".*wo", "recipe": None}])
    over, anew = served_config(config, {"quant_backend": "native"}), served_config(config, {"quantization": "int8w"})
    assert (over.quantization, over.amax_init, over.rules) == ("fp8", "flax", config.rules)
    assert (anew.quantization, anew.amax_init, anew.rules) == ("int8w", TrainConfig().amax_init, TrainConfig().rules)


def test_command(runs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs(""), runs("fp8")
    capsys.readouterr()  # of their training
    for run, words, message in (
        ("", [], "is not quantized; pass a quantization, such as quantization=int8"),
        ("", ["quantization=int8", "steps=3"], "steps is not a quantization field"),
        ("fp8", ["--step", "5"], "has no checkpoint of step 5; use one of"),
        ("fp8", ["--out", "."], ". exists; choose another name or remove it"),
    ):
        folder = str(runs(run))
        capsys.readouterr()  # output of a run that this test may be the first to need
        assert main(["convert", folder, "--out", str(tmp_path / "out"), *words]) == 2
        out, err = capsys.readouterr()
        assert (out, err.startswith("error: "), message in err, err.count("\n")) == ("", True, True, 1)
        assert not (tmp_path / "out").exists()
    assert main(["convert", str(runs("fp8")), "--out", str(tmp_path / "out"), "--step", str(STEPS - 3)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [line for line in out.splitlines() if line.startswith("converted ")][-1].startswith("converted 11 of 11: ")
    assert f"{tmp_path}/out: step {STEPS - 3} of {runs('fp8')} in fp8 on native, 7 kernels converted." in out
    assert open_served(tmp_path / "out").step == STEPS - 3


def test_a_checkpoint_that_does_not_fit_its_decoder_names_both_sides(converted: Any, tmp_path: Path):
    found = serving.load(converted("fp8")[0])
    for number, (fields, named) in enumerate(
        (
            ({"mlp_dim": 96}, ("layers/mlp/wi_0/kernel", "(2, 32, 64)", "(2, 32, 96)")),
            ({"scan_layers": False}, ("layers/mlp/wi_0/kernel", "layers_0/mlp/wi_0/kernel")),
            ({"quantization": "int8w"}, ("layers/mlp/wo/kernel", "float8_e4m3fn", "int8")),
        )
    ):
        folder = tmp_path / str(number)
        serving.save(folder, found.params, found.config, extra=found.extra | {"train": found.extra["train"] | fields})
        with pytest.raises(ValueError, match=re.escape(str(folder))) as caught:
            open_served(folder)
        assert all(text in str(caught.value) for text in named)
    serving.save(tmp_path / "plain", found.params, {"quantization": "fp8"})
    with pytest.raises(ValueError, match=r"plain has no decoder of a training run; load the folder with jaxquant\.s"):
        open_served(tmp_path / "plain")


def test_overrides_of_a_converted_checkpoint(converted: Any, tmp_path: Path):
    out = converted("fp8")[0]
    with pytest.raises(ValueError, match=rf"^quantization cannot be changed in the converted checkpoint {out}; c"):
        open_served(out, {"quantization": "int8"})
    served = open_served(out, {"quantize_kvcache": True, "kv_quant_dtype": "int8"})
    assert served.engine(slots=1).empty().key.dtype == jnp.int8
    assert open_served(out).engine(slots=1).empty().key.dtype == jnp.float32
