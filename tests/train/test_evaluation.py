"""Evaluation: one table of the float, the trained and the served model; the last two have the same bits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.cli import main
from jaxquant.training.conversion import convert_run
from jaxquant.training.data import make_iterators
from jaxquant.training.serving import evaluate, open_contenders, open_served
from tests.numerics import EVALUATION_DIFFERENCE_RTOL, EVALUATION_LOSS_ATOL


@pytest.fixture(scope="module")
def run(finished: Any) -> Path:
    return finished("fp8")


@pytest.fixture(scope="module")
def served(run: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the folders of the run converted as trained, and converted to weight-only int4."""
    folder = tmp_path_factory.mktemp("converted")
    convert_run(run, folder / "fp8", say=lambda text: None)
    convert_run(run, folder / "int4w", {"quantization": "int4w"}, say=lambda text: None)
    return [folder / "fp8", folder / "int4w"]


@pytest.fixture(scope="module")
def rows(run: Path, served: list[Path]) -> dict[str, dict[str, Any]]:
    return {row["model"].rpartition("/")[2]: row for row in evaluate(open_contenders(run, served))}


def test_what_serves_is_what_was_trained(run: Path, rows: Any, finished: Any):
    assert list(open_contenders(finished(""), [])) == ["float"]
    wrote = json.loads((run / "summary.json").read_text())["held_out_loss"]
    assert rows["trained"]["held-out loss"] == pytest.approx(wrote, abs=EVALUATION_LOSS_ATOL)
    assert list(rows) == ["float", "trained", "fp8", "int4w"]
    assert [row["quantization"] for row in rows.values()] == ["none", "fp8", "fp8", "int4w"]
    assert [row["backend"] for row in rows.values()] == ["–", "native", "native", "native"]
    assert rows["fp8"]["to the one before"] == 0
    assert rows["int4w"]["MB"] < rows["fp8"]["MB"] < rows["trained"]["MB"] == rows["float"]["MB"]
    same = ("held-out loss", "gap", "agreement", "max |Δ logit| to first")
    assert [rows["trained"][name] for name in same] == [rows["fp8"][name] for name in same]


def test_numbers_are_those_of_a_plain_loop(run: Path, served: list[Path]):
    """Loss, agreement and the largest difference from whole arrays of float64, padding left out."""
    models = {"float": open_contenders(run, [])["float"], "int4w": open_served(served[1])}
    config = dataclasses.replace(models["float"].config, eval_batches=2)
    losses, counts, agreed, largest = np.zeros(2), 0, 0, 0.0
    for batch in make_iterators(config, config.batch_size).held_out():
        inputs = [jnp.asarray(batch[name]) for name in ("inputs", "segment_ids", "positions")]
        real, logits = batch["segment_ids"] > 0, []
        for index, m in enumerate(models.values()):
            found = jax.jit(m.model.apply)(m.params, m.quant_state, *inputs, rngs={"quant": jax.random.key(0)})
            found = np.asarray(found, np.float64)
            logits.append(found)
            right = np.take_along_axis(found, batch["targets"][..., None], -1)[..., 0]
            losses[index] += (np.log(np.exp(found).sum(-1)) - right)[real].sum()
        counts += real.sum()
        agreed += (logits[0].argmax(-1) == logits[1].argmax(-1))[real].sum()
        largest = max(largest, np.abs(logits[0] - logits[1])[real].max())
    rows = evaluate(models, batches=2)
    assert [row["held-out loss"] for row in rows] == pytest.approx(losses / counts, abs=EVALUATION_LOSS_ATOL)
    assert rows[1]["agreement"] == f"{100 * agreed / counts:.2f}%"
    assert rows[1]["max |Δ logit| to first"] == pytest.approx(largest, rel=EVALUATION_DIFFERENCE_RTOL)


def test_command(run: Path, served: list[Path], rows: Any, capsys: pytest.CaptureFixture[str]):
    assert main(["evaluate", str(run), *map(str, served)]) == 0
    names = ["float", "trained", *(f"served: {folder}" for folder in served)]
    assert [row["model"] for row in rows.values()] == names
    text, err = capsys.readouterr()
    assert err == ""
    for row in rows.values():
        (line,) = [line for line in text.splitlines() if line.startswith(f"{row['model']} ")]
        for value in row.values():
            assert str(value) in line


def test_what_does_not_compare_is_refused(
    run: Path, served: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for words, message in (
        ([str(run), "--batches", "0"], "Invalid value for '--batches': 0 is not in the range x>=1; see "),
        ([str(served[0])], "is a converted checkpoint; pass its run first"),
        ([str(run), str(tmp_path / "absent")], "absent is not a folder; pass the folder of a run"),
    ):
        assert main(["evaluate", *words]) == 2
        out, err = capsys.readouterr()
        assert (out, err.startswith("error: "), message in err, err.count("\n")) == ("", True, True, 1)
    one = open_served(run)
    other = dataclasses.replace(one, shape=dataclasses.replace(one.shape, vocab_size=64))
    with pytest.raises(ValueError, match=rf"different vocabularies: a {one.shape.vocab_size}, b 64$"):
        evaluate({"a": one, "b": other})
