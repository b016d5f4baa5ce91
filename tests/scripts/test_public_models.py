"""Every public model of the table has what builds it, and the tables say what the rows say."""

import importlib
import json

from scripts import public_models
from scripts.public_models import MODELS, PACKAGES

ROW = {
    "model": "lm1b",
    "recipe": "fp8",
    "steps": 50,
    "quantized": 12,
    "all": 13,
    "share": 0.75,
    "why": [["head", "output head"]],
    "loss": 3.25,
    "histories": 36,
    "advanced": 35,
    "check": "ok",
    "served": "same bits",
}
FACE = {"quantized": 13, "all": 13, "share": 1.0, "float": [], "loss": 3.25, "check": "ok"}


def test_every_model_has_what_builds_it():
    for name, model in MODELS.items():
        assert callable(getattr(importlib.import_module(f"scripts.public.{model.module}"), name))
        assert model.environment in PACKAGES


def test_the_tables():
    rows = [{"model": "lm1b", "recipe": "float", "loss": 3.5}, ROW | {"face": FACE}]
    text = public_models.write_functions(rows).splitlines()[-1]
    expected = "| lm1b | fp8 | 12 of 13 | 75.0% | 1 output head | 3.2500 (3.5000) | 35 of 36 | ok | same bits |"
    assert text == expected
    assert public_models.write_faces(rows).splitlines()[2:] == [
        "| lm1b | fp8 | 13 of 13 | 100.0% | - | 3.2500 (the same) | ok |"
    ]
    failed = public_models.write_functions([{"model": "vmoe", "recipe": "fp8", "error": "ValueError: no"}])
    assert failed.splitlines()[2:] == ["| vmoe | fp8 | fails | | ValueError: no | | | | |"]


def test_rows_that_are_kept_are_read_but_those_that_failed(tmp_path):
    file = tmp_path / "rows.json"
    assert public_models.read(file) == {}
    file.write_text("\n".join(map(json.dumps, [ROW, {"model": "vmoe", "recipe": "fp8", "error": "no"}])))
    assert public_models.read(file) == {("lm1b", "fp8"): ROW}
