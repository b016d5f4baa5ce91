"""Whatever stands in a config gets a sentence that names it, at once: no other error, no minute, no gigabyte."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxquant.config.loader import MAX_BYTES, load_yaml, parse_overrides
from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.typed import build
from train.config import TrainConfig

LIMIT_S = 2.0
"""A second on an idle machine."""

LONGEST = 300 + len(", ".join(field.name for field in dataclasses.fields(TrainConfig)))
"""Of a sentence: the names of all fields, a shown key of 200, and words."""


def refused(call: Callable[[], Any]) -> str:
    """Return the sentence with which something is refused; it is short and comes soon."""
    began = time.process_time()
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert caught.type in (ValueError, TypeError)
    assert time.process_time() - began < LIMIT_S
    assert len(str(caught.value)) < LONGEST
    return str(caught.value)


TEXTS: dict[str, tuple[str, str]] = {
    "alias": ("steps: &a [3]\nseed: *a", "line 2: alias *a is not read; write out what it stands for"),
    "nested flow": ("steps: " + "[" * 10_000, "is nested too deep; a config is flatter"),
    "5,000 digits": ("seed: 0\nsteps: " + "9" * 5000, "line 2: integer '99999999999999999999'... of 5000 digits"),
    "too long": ("a: b\n" * MAX_BYTES, "is larger than 100,000 bytes; a config is smaller"),
    "control character": ("steps: 3\nseed: \x07", "line 2: character 7 is not allowed"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_a_text_is_refused_with_its_line_at_once(case: str, tmp_path: Path):
    text, message = TEXTS[case]
    path = tmp_path / "c.yml"
    path.write_text(text)
    assert message in refused(lambda: build(TrainConfig, load_yaml(path)))


def test_files_that_have_no_end_are_refused():
    assert "'/dev/zero' is a device, not a file" in refused(lambda: load_yaml("/dev/zero"))
    assert "null character" in refused(lambda: load_yaml("a\0b.yml"))


def test_an_override_is_refused_at_once():
    for word, message in (("a." * 10_000 + "a=1", "has no field 'a'"), ("steps=" + "9" * 400, "integer of 1329 bits")):
        assert message in refused(lambda word=word: build(TrainConfig, parse_overrides([word])))


NUMBERS: list[tuple[str, Any, str]] = [
    ("learning_rate", 10**400, "TrainConfig.learning_rate is too large for a float, got an integer of 1329 bits"),
    ("steps", 10**5000, "steps must be at most 2147483647, got an integer of 16610 bits"),
    ("run_dir", "a\0b", "run_dir 'a\\x00b' has a null character"),
    ("constant_bound_config", [1e-300] * 6, "constant_bound_config fwd_lhs must lie between 1e-30 and 1e30"),
]


def test_odd_numbers_are_refused():
    for name, value, message in NUMBERS:
        fields = {"quantization": "aqt_fp8_full"} if name.startswith("constant") else {}
        assert message in refused(lambda name=name, value=value, rest=fields: build(TrainConfig, {name: value} | rest))


def test_every_number_of_a_run_has_a_range():
    """On both sides; a field that is added gets one, too."""
    for name, default in vars(TrainConfig()).items():
        beyond = {int: (10**150, -(10**150)), float: (1e150, -1e150, float("nan"))}.get(type(default), ())
        for value in beyond:
            assert name in refused(lambda name=name, value=value: build(TrainConfig, {name: value}))


def test_a_pattern_that_is_not_read_is_refused():
    config = {"rules": [{"path": "(a", "recipe": None}], "quantization": "int8"}
    text = refused(lambda: build(QuantConfig, config))
    assert text.startswith("rule path '(a' is not a regular expression: missing ), unterminated subpattern")
