"""Conversion of runs: what serves from the files is the trained model, bit for bit, and what does not fit is named."""

from __future__ import annotations

import dataclasses
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
from jaxquant.core.paths import tree_bytes
from jaxquant.core.qtensor import is_tensor
from jaxquant.core.typed import build, to_mapping
from tests.serving.trees import assert_same
from tests.train.conftest import STEPS
from train.__main__ import main
from train.config import TrainConfig
from train.conversion import Conversion, convert_run, converted_shapes, served_config
from train.model import Decoder
from train.serving import Served, contenders, open_served
from train.sums import DATA, seal, write_checkpoint_sums

KERNELS = [f"layers/self_attention/{name}" for name in ("query", "key", "value", "out")]
KERNELS += [f"layers/mlp/{name}" for name in ("wi_0", "wi_1", "wo")]
SCHEMES = {
    "fp8": ("native", "float8_e4m3fn"),
    "int8": ("aqt", "int8"),
    "fp8_full": ("qwix", "float8_e4m3fn"),
}
NAMES = ["fp8", "int8", pytest.param("fp8_full", marks=pytest.mark.slow)]
Logits = Callable[[Served], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Case:
    """A run, the folder that it was converted to, and what the conversion said of it."""

    run: Path
    out: Path
    made: Conversion
    said: list[str]


@pytest.fixture(scope="module")
def runs(finished: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return name of a scheme -> folder of a run with it.

    Without quant state it is the unquantized run under another configuration: nothing is trained for it alone.
    """
    folders: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name in ("", "fp8"):
            return finished(name)
        if name not in folders:
            folder = tmp_path_factory.mktemp("run") / "run"
            fields = {"quantization": name, "quant_backend": SCHEMES[name][0]}
            folders[name] = configured(finished(""), folder, **fields)
        return folders[name]

    return get


def configured(run: Path, folder: Path, **fields: Any) -> Path:
    """Copy a run as if it had been trained with another configuration, which its checkpoints record too."""
    shutil.copytree(run, folder)
    config = folder / "config.yml"
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | fields))
    made_with = to_mapping(build(TrainConfig, yaml.safe_load(config.read_text())))
    for checkpoint in (folder / "checkpoints").iterdir():
        data = checkpoint / DATA
        data.write_text(json.dumps(json.loads(data.read_text()) | {"config": made_with}))
        write_checkpoint_sums(checkpoint)
        seal(checkpoint)
    return folder


@pytest.fixture(scope="module")
def converted(runs: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Return name of a scheme -> its converted run, made once."""
    cases: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in cases:
            run, out, said = runs(name), tmp_path_factory.mktemp("converted") / "out", []
            cases[name] = Case(run, out, convert_run(run, out, say=said.append), said)
        return cases[name]

    return get


@pytest.fixture(scope="module")
def logits() -> Logits:
    """Return the logits of a packed batch; one program a model."""

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


def require(backend: str) -> None:
    if backend != "native":
        pytest.importorskip(backend)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_served_from_disk_is_what_was_trained(name: str, converted: Any, logits: Logits):
    backend, _ = SCHEMES[name]
    require(backend)
    case = converted(name)
    trained, served = open_served(case.run), open_served(case.out)
    assert served.config.resolved_backend == backend
    assert served.config == dataclasses.replace(trained.config, checkpoint_is_quantized=True)
    assert served.step == trained.step == case.made.step
    assert served.quant_state == {}
    np.testing.assert_array_equal(logits(trained), logits(served))
    off = contenders(case.run, [])["float"]
    assert (logits(off) != logits(served)).any()  # so it is the quantized model that both are


@pytest.mark.parametrize("name", NAMES)
def test_the_tree_is_that_of_jaxquant_convert(name: str, converted: Any):
    backend, dtype = SCHEMES[name]
    require(backend)
    case = converted(name)
    trained = open_served(case.run)
    tokens = jnp.zeros((1, 32), jnp.int32)
    variables = quantization_state.merge(trained.params, trained.quant_state)
    expected = jaxquant.convert(variables, trained.config, tokens, model=Decoder(trained.shape))["params"]
    found = serving.load(case.out)
    assert_same(found.params, expected)
    assert found.extra["step"] == trained.step
    floats = sum(leaf.size for leaf in jax.tree.leaves(trained.params))
    assert case.made.bytes_bf16 == 2 * floats
    held = jax.tree.leaves(found.params, is_leaf=is_tensor)
    assert case.made.bytes_quantized == sum(tree_bytes(leaf) if is_tensor(leaf) else leaf.nbytes for leaf in held)
    shapes = converted_shapes(trained.config, trained.shape, tokens)
    assert jax.tree.structure(shapes) == jax.tree.structure(found.params)
    for path in KERNELS:
        layer = at(found.params, path)
        assert layer["kernel"].qvalue.dtype == dtype
        scale = layer["kernel"].input_scale
        assert (scale is not None) == (trained.quant_state != {})
        assert scale is None or (scale > 0).all()
    assert set(case.made.layers) == set(KERNELS)
    assert set(case.made.layers.values()) == {trained.config.quantization}


def test_bfloat16_embeddings_are_written_as_they_are_read(runs: Any, tmp_path: Path, logits: Logits):
    configured(runs(""), tmp_path / "run", quantization="int8", dtype="bfloat16", quant_backend="native")
    convert_run(tmp_path / "run", tmp_path / "out", say=lambda text: None)
    served = open_served(tmp_path / "out")
    assert served.params["token_embedder"]["embedding"].dtype == jnp.bfloat16
    assert at(served.params, "layers/mlp/wi_0/kernel").qvalue.dtype == jnp.int8
    assert {leaf.dtype.name for leaf in jax.tree.leaves(served.params["decoder_norm"])} == {"float32"}
    np.testing.assert_array_equal(logits(open_served(tmp_path / "run")), logits(served))


# Post-training.


@pytest.mark.parametrize(("string", "dtype"), [("int4w", "int4"), ("fp8", "float8_e4m3fn")])
def test_an_unquantized_run_is_converted_after_training(
    string: str, dtype: str, runs: Any, tmp_path: Path, logits: Logits, monkeypatch: pytest.MonkeyPatch
):
    said: list[str] = []
    monkeypatch.setattr("train.conversion.CALIBRATION_BATCHES", 3)
    made = convert_run(runs(""), tmp_path / "out", {"quantization": string}, say=said.append)
    served, float_ = open_served(tmp_path / "out"), open_served(runs(""))
    assert made.config.quantization == string
    # More than the run's eval_batches, which is 2.
    assert sum(text.startswith("calibrating fp8: batch ") for text in said) == (3 if string == "fp8" else 0)
    for path in KERNELS:
        layer = at(served.params, path)
        assert layer["kernel"].qvalue.dtype == dtype
        scale = layer["kernel"].input_scale
        assert (scale is not None) == (string == "fp8")
        assert scale is None or (np.asarray(scale) > 0).all()
    # Served is the float model with quantized layers: nearer to it than 0 is, and not the same.
    exact, found = logits(float_), logits(served)
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert 0 < error < 1


def test_another_quantization_replaces_the_runs(converted: Any, runs: Any, tmp_path: Path, logits: Logits):
    """Nothing is left of fp8, neither its scales nor options of it; the numbers are those of the unquantized run's."""
    said: list[str] = []
    run = configured(runs("fp8"), tmp_path / "run", rules=[{"path": ".*/mlp/wo", "recipe": "fp8"}])
    made = convert_run(run, tmp_path / "out", {"quantization": "int8w"}, say=said.append)
    assert said[0].startswith("quantization 'int8w' replaces all of the run's, its rules too; to keep a field,")
    assert (made.config.quantization, set(made.layers.values())) == ("int8w", {"int8w"})
    served = open_served(tmp_path / "out")
    assert at(served.params, KERNELS[0])["kernel"].input_scale is None
    assert at(served.params, KERNELS[0])["kernel"].qvalue.dtype == jnp.int8
    tokens = jnp.zeros((1, 32), jnp.int32)
    params = open_served(runs("fp8")).params
    expected = jaxquant.convert({"params": params}, {"quantization": "int8w"}, tokens, model=Decoder(served.shape))
    assert_same(served.params, expected["params"])


def test_served_config_replaces_all_or_lays_over():
    config = TrainConfig(quantization="fp8", amax_init="flax", rules=[{"path": ".*wo", "recipe": None}])
    over = served_config(config, {"quant_backend": "native"})
    assert (over.quantization, over.amax_init, over.rules) == ("fp8", "flax", config.rules)
    anew = served_config(config, {"quantization": "int8w"})
    assert (anew.quantization, anew.amax_init, anew.rules) == ("int8w", TrainConfig().amax_init, TrainConfig().rules)
    assert served_config(config, {}) == config
    with pytest.raises(ValueError, match=r"^steps is no field of the quantization; a conversion changes quantization_"):
        served_config(config, {"steps": 3})


def test_a_step_is_chosen(runs: Any, tmp_path: Path):
    made = convert_run(runs("fp8"), tmp_path / "out", step=STEPS - 3, say=lambda text: None)
    assert (made.step, open_served(tmp_path / "out").step) == (STEPS - 3, STEPS - 3)


# What is refused.


def test_command(runs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["convert", str(runs("fp8")), "--out", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [line for line in out.splitlines() if line.startswith("converted ")][-1].startswith("converted 11 of 11: ")
    assert f"{tmp_path}/out: step {STEPS} of {runs('fp8')} in fp8 on native, 7 kernels converted." in out
    assert open_served(tmp_path / "out").config.quantization == "fp8"


@pytest.mark.parametrize(
    ("run", "words", "message"),
    [
        ("", [], "is not quantized; say how to serve it, as with quantization=int8"),
        ("", ["quantization=int7"], "int7"),
        ("", ["quantization=int8", "steps=3"], "steps is no field of the quantization"),
        ("", ["banana"], "banana"),
        ("fp8", ["--step", "5"], "has no checkpoint of step 5; it has"),
        ("fp8", ["--out", "."], ". exists; choose another name or remove it"),
    ],
)
def test_command_refuses(run: str, words: list[str], message: str, runs: Any, tmp_path: Path, capsys: Any):
    folder = str(runs(run))
    capsys.readouterr()  # of a run that this test is the first to ask for
    assert main(["convert", folder, "--out", str(tmp_path / "out"), *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.startswith("error: "), message in err, err.count("\n")) == ("", True, True, 1)
    assert not (tmp_path / "out").exists()


def resaved(case: Case, folder: Path, change: Callable[[dict[str, Any]], Any], **train_fields: Any) -> Path:
    """Write a converted checkpoint anew with another tree, or another configuration."""
    found = serving.load(case.out)
    tree = jax.tree.map(lambda leaf: leaf, found.params, is_leaf=is_tensor)
    change(tree)
    extra = dict(found.extra)
    extra["train"] = extra["train"] | train_fields
    serving.save(folder, tree, found.config, extra=extra)
    return folder


def _keep(tree: Any) -> None:
    del tree


def _drop_leaf(tree: Any) -> None:
    del tree["layers"]["mlp"]["wo"]


MISFITS: dict[str, tuple[Callable[[Any], None], dict[str, Any], tuple[str, ...]]] = {
    "missing leaf": (_drop_leaf, {}, ("layers/mlp/wo/kernel",)),
    "wider decoder": (_keep, {"mlp_dim": 96}, ("layers/mlp/wi_0/kernel", "(2, 32, 64)", "(2, 32, 96)")),
    "layers not scanned": (_keep, {"scan_layers": False}, ("layers/mlp/wi_0/kernel", "layers_0/mlp/wi_0/kernel")),
    "another recipe": (_keep, {"quantization": "int8w"}, ("layers/mlp/wo/kernel", "float8_e4m3fn", "int8")),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_checkpoint_that_does_not_fit_its_decoder_names_both_sides(misfit: str, converted: Any, tmp_path: Path):
    change, fields, named = MISFITS[misfit]
    folder = resaved(converted("fp8"), tmp_path / "out", change, **fields)
    with pytest.raises(ValueError, match=re.escape(str(folder))) as caught:
        open_served(folder)
    for text in named:
        assert text in str(caught.value), str(caught.value)


def test_overrides_of_a_converted_checkpoint(converted: Any, tmp_path: Path):
    out = converted("fp8").out
    with pytest.raises(ValueError, match=rf"^quantization cannot be changed in the converted checkpoint {out}; c"):
        open_served(out, {"quantization": "int8"})
    served = open_served(out, {"quantize_kvcache": True, "kv_quant_dtype": "int8"})
    assert served.engine(slots=1).empty().key.dtype == jnp.int8
    assert open_served(out).engine(slots=1).empty().key.dtype == jnp.float32


def test_a_folder_without_a_decoder_is_refused(converted: Any, tmp_path: Path):
    out = converted("fp8").out
    serving.save(tmp_path / "plain", serving.load(out).params, {"quantization": "fp8"})
    with pytest.raises(ValueError, match=r"plain holds no decoder of a training run; load it with jaxquant\.s"):
        open_served(tmp_path / "plain")
