"""A small text corpus and a tiny run on it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jaxquant.config.loader import build, load_yaml
from train.config import TrainConfig
from train.loop import prepare

ROOT = Path(__file__).resolve().parents[2]
CI_CONFIG = ROOT / "configs/models/ci.yml"
STEPS = 24


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile each program once for all tests, workers and subprocesses: compiling is most of their time."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    options = {
        "jax_compilation_cache_dir": str(folder / "compiled"),
        "jax_persistent_cache_min_compile_time_secs": 0.2,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in options}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in options.items():
            patch.setenv(name.upper(), str(value))
            jax.config.update(name, value)
        reset_cache()
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty documents of counted words: easy to learn, no two alike."""
    folder = tmp_path_factory.mktemp("corpus")
    for document in range(40):
        words = [f"item {number * (document + 3) % 97} of {document}" for number in range(30)]
        (folder / f"{document:02}.txt").write_text("\n".join(words))
    return folder


@pytest.fixture(scope="session")
def tiny(corpus: Path) -> TrainConfig:
    fields = {"dataset": "text", "dataset_path": str(corpus), "steps": STEPS, "checkpoint_every": 3}
    return build(TrainConfig, load_yaml(CI_CONFIG) | fields)


@pytest.fixture(scope="session")
def finished(tiny: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return quantization -> folder of a run that was not interrupted, made once with the optimization of its user."""
    folders: dict[tuple[str, bool], Path] = {}

    def get(quantization: str) -> Path:
        key = (quantization, jax.config.values["jax_disable_most_optimizations"])
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("finished") / "run"
            train(quantized(tiny, quantization), folders[key])
        return folders[key]

    return get


def quantized(config: TrainConfig, quantization: str) -> TrainConfig:
    return dataclasses.replace(config, quantization=quantization)


def train(config: TrainConfig, run_dir: Path, **fields: Any) -> list[str]:
    """Train in this process and return what was said before the first step."""
    said: list[str] = []
    prepare(dataclasses.replace(config, run_dir=str(run_dir), **fields), said.append)()
    return said


def read_losses(run_dir: Path) -> dict[int, float]:
    """Step -> loss; a step that stands twice fails here."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    pairs = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert len(pairs) == len(dict(pairs)), "a step stands twice in metrics.jsonl"
    return dict(pairs)
