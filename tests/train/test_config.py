"""Configuration of a run: values of the shipped files, and errors."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxquant.cli import main
from jaxquant.config.loader import load_yaml
from jaxquant.core.typed import build
from jaxquant.training.config import TrainConfig
from jaxquant.training.model import Decoder
from jaxquant.training.start import read_config
from jaxquant.training.step import model_config
from tests.train.conftest import ROOT


def test_base_file_has_every_field_at_its_default():
    mapping = load_yaml(ROOT / "configs/base.yml")
    assert build(TrainConfig, mapping) == TrainConfig()
    assert set(mapping) == {field.name for field in dataclasses.fields(TrainConfig)}
    for path in (ROOT / "configs/models").glob("*.yml"):
        build(TrainConfig, load_yaml(path))


@pytest.mark.parametrize(("name", "parameters"), [("1b", 1_235_814_400), ("llama3-8b", 8_030_261_248)])
def test_large_shapes_have_their_models_parameters(name, parameters):
    config = build(TrainConfig, load_yaml(ROOT / f"configs/models/{name}.yml"))
    model = Decoder(model_config(config, 128256))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == parameters


def test_run_dir_is_named_after_config_and_quantization():
    path = str(ROOT / "configs/quickstart.yml")
    assert read_config(path, []).run_dir == "runs/quickstart-float"
    assert read_config(path, ["quantization=fp8"]).run_dir == "runs/quickstart-fp8-native"
    assert read_config(path, ["run_dir=elsewhere"]).run_dir == "elsewhere"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("stepz=3", "stepz"),
        ("steps=0", "steps must be at least 1, got 0"),
        ("quantization=int9", "int8"),
        ("framework=nnx", "is not supported by this program; leave framework out, and see examples/nnx_loop.py"),
        ("num_kv_heads=3", "num_query_heads 4 is not a multiple of num_kv_heads 3"),
        ("gradient_accumulation_steps=3", "batch_size 8 is not a multiple of gradient_accumulation_steps 3"),
        ("vocab_size=8", "vocab_size 8 is smaller than the tokenizer's"),
        ("dataset_path=/nonexistent", "/nonexistent"),
    ],
)
def test_bad_words_are_refused_with_exit_2(word, message, tmp_path, corpus, capsys):
    words = ["dataset=text", f"dataset_path={corpus}", f"run_dir={tmp_path / 'run'}", word]
    assert main(["train", str(ROOT / "configs/models/ci.yml"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_remat_policies_need_what_they_keep():
    for kept in ("none", "quantized"):
        TrainConfig(quantization="fp8", quant_backend="native", remat_policy=kept, saved_activations="fp8")
    with pytest.raises(ValueError, match=r"saved_activations 'fp8' has no effect with remat_policy 'matmuls', which"):
        TrainConfig(remat_policy="matmuls", saved_activations="fp8")
    for fields in ({}, {"quantization": "int8", "quant_backend": "aqt"}, {"quantization": "aqt_fp8"}):
        with pytest.raises(ValueError, match="remat_policy 'quantized' saves the residuals of the native backend"):
            TrainConfig(remat_policy="quantized", **fields)


def test_a_platform_that_is_not_there_is_one_sentence(monkeypatch, capsys):
    """On a machine without GPUs, the plug-in raises an assertion without a message."""
    for error in (RuntimeError("Unable to initialize backend 'cuda': no driver\nmore"), AssertionError()):
        monkeypatch.setattr(jax, "devices", lambda error=error: (_ for _ in ()).throw(error))
        assert main(["serve", "x", "--prompt", "a"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: JAX_PLATFORMS=cpu has no platform that JAX can start here (")
        assert line.endswith("); install its plug-in and driver, or set JAX_PLATFORMS=cpu")


def test_the_config_of_a_run_goes_on_with_that_run(tmp_path: Path):
    path = tmp_path / "config.yml"
    path.write_text("run_dir: runs/elsewhere\n")
    assert read_config(str(path), []).run_dir == "runs/elsewhere"
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match=r"its run_dir is 'runs/elsewhere'; add run_dir=.* to continue that run"):
        read_config(str(path), [])
    assert read_config(str(path), ["run_dir=x"]).run_dir == "x"
    path.write_text(f"run_dir: {tmp_path}\n")
    assert read_config(str(path), []).run_dir == str(tmp_path)
