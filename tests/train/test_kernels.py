"""A run whose casts and matmuls are kernels, without a TPU."""

import dataclasses
from pathlib import Path

import jax
import pytest

from jaxquant.ops import implementation
from tests.train.conftest import quantized, read_losses, train
from train.config import TrainConfig


@pytest.mark.slow
def test_a_run_with_kernels_learns_as_xlas_and_says_what_ran(tiny: TrainConfig, tmp_path: Path, capsys, monkeypatch):
    jax.clear_caches()  # what this process traced before is no choice of the run
    monkeypatch.setattr(implementation, "_made", {})
    config = dataclasses.replace(quantized(tiny, "fp8"), steps=2, num_layers=1)
    losses = {}
    for name in ("pallas", "xla"):
        train(dataclasses.replace(config, implementation=name), tmp_path / name)
        losses[name] = read_losses(tmp_path / name)
    assert losses["pallas"] == pytest.approx(losses["xla"], rel=1e-3)
    out = capsys.readouterr().out
    assert (
        "kernels (pallas): dot_general, quantize; quantize: xla, pallas was asked for; a scale without history" in out
    )
    assert out.count("kernels (pallas)") == 1  # none of the other run
