"""A small text corpus and a tiny run on it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxquant.config.loader import build, load_yaml
from train.config import TrainConfig
from train.loop import prepare

ROOT = Path(__file__).resolve().parents[2]
CI_CONFIG = ROOT / "configs/models/ci.yml"
STEPS = 24


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
    """Return quantization -> folder of a run that was not interrupted, made once."""
    folders: dict[str, Path] = {}

    def get(quantization: str) -> Path:
        if quantization not in folders:
            folders[quantization] = tmp_path_factory.mktemp("finished") / "run"
            train(quantized(tiny, quantization), folders[quantization])
        return folders[quantization]

    return get


def quantized(config: TrainConfig, quantization: str) -> TrainConfig:
    backend = "native" if quantization else "auto"
    return dataclasses.replace(config, quantization=quantization, quant_backend=backend)


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
