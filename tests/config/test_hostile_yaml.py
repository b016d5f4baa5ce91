"""Whatever stands in a config gets a sentence that names it, at once: no other error, no minute, no gigabyte."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxquant.config.loader import MAX_CHARACTERS, load_yaml, parse_overrides
from jaxquant.config.mixed_precision import MixedPrecisionEntry, load_mixed_precision
from jaxquant.config.quant_config import QuantConfig
from jaxquant.config.recipes import RECIPES
from jaxquant.config.rules import Rule
from jaxquant.core.calibration import Calibration
from jaxquant.core.recipe import DelayedSpec, MatmulSpec, Recipe, SparsitySpec, TensorSpec
from jaxquant.core.typed import build
from train.config import TrainConfig
from train.generate import Sampling

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


def bomb(lines: int) -> str:
    """Return ten lines of which each holds the one before ten times."""
    head = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    return head + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, lines))


TEXTS: dict[str, tuple[str, str]] = {
    "alias bomb": (bomb(10), "line 4: more than 10,000 values, aliases written out"),
    "alias of itself": ("steps: &a [*a]", "line 1: alias *a stands in what it names"),
    "alias of nothing": ("steps: *a", "line 1: found undefined alias 'a'"),
    "nested flow": ("steps: " + "[" * 10_000, "line 1: nested more than 32 deep"),
    "tag of an int": (
        "seed: 1\nsteps: !!int many",
        "line 2: could not determine a constructor: tag 'tag:yaml.org,2002:int' is not read",
    ),
    "400 digits": ("steps: " + "9" * 400, "of 400 digits is too large"),
    "5,000 digits": ("seed: 0\nsteps: " + "9" * 5000, "line 2: integer '99999999999999999999'... of 5000 digits"),
    "float": ("learning_rate: 1e999", "line 1: number '1e999' is too large"),
    "too long": ("a: b\n" * MAX_CHARACTERS, "characters; a config has at most 100,000"),
    "key of a list": ("? [a, b]\n: 3", "line 1: key ['a', 'b'] is not a string"),
    "control character": ("steps: 3\nseed: \x07", "line 2: character 7 is not allowed"),
    "a long key": ("k" * 900 + ": 3", "TrainConfig has no field 'kkk"),
    "text for a number": ("steps: " + "k" * 50_000, "TrainConfig.steps must be int, got 'kkk"),
    "long bounds": (
        "quantization: aqt_fp8_full\nconstant_bound_config: " + "k" * 5000,
        "has 5000 characters, of at most 200",
    ),
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


def test_what_is_odd_and_well_is_read(tmp_path: Path):
    path = tmp_path / "c.yml"
    path.write_text("a: &x {b: 1}\nc: *x\nd: !!str 5\ne: [*x, *x]\nf: -.inf\n")
    assert load_yaml(path) == {"a": {"b": 1}, "c": {"b": 1}, "d": "5", "e": [{"b": 1}] * 2, "f": float("-inf")}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("a." * 10_000 + "a=1", "nests more than 32 deep"),
        ("steps=" + "[" * 10_000, "nested more than 32 deep"),
        ("steps=" + "9" * 400, "of 400 digits is too large"),
        ("k" * 100_000, "is not of the form key=value"),
    ],
    ids=["dots", "brackets", "digits", "letters"],
)
def test_an_override_is_refused_at_once(word: str, message: str):
    assert message in refused(lambda: build(TrainConfig, parse_overrides([word])))


NUMBERS: list[tuple[str, Any, str]] = [
    ("learning_rate", 10**400, "TrainConfig.learning_rate is too large for a float, got an integer of 1329 bits"),
    ("adam_eps", 0.0, "adam_eps must be at least 1.2e-38, got 0.0"),
    ("warmup_steps_fraction", float("nan"), "warmup_steps_fraction must be at least 0, got nan"),
    ("steps", 2**31, "steps must be at most 2147483647, got 2147483648"),
    ("steps", 10**5000, "steps must be at most 2147483647, got an integer of 16610 bits"),
    ("mesh_data", 0, "mesh_data must be -1 or at least 1, got 0"),
    ("run_dir", "a\0b", "run_dir 'a\\x00b' has a null character"),
    ("amax_history_length", 10**12, "amax_history_length must be at most 1048576, got 1000000000000"),
    ("constant_bound_config", [1e-300] * 6, "constant_bound_config fwd_lhs must lie between 1e-30 and 1e30"),
]


@pytest.mark.parametrize(
    ("name", "value", "message"), NUMBERS, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(NUMBERS)]
)
def test_every_number_has_its_range(name: str, value: Any, message: str):
    fields = {"quantization": "fp8"} if name.startswith("amax") else {}
    assert message in refused(lambda: build(TrainConfig, {name: value} | fields))


def test_every_number_of_a_run_has_a_range():
    """On both sides; a field that is added gets one, too."""
    for name, default in vars(TrainConfig()).items():
        beyond = {int: (10**150, -(10**150)), float: (1e150, -1e150, float("nan"))}.get(type(default), ())
        for value in beyond:
            assert name in refused(lambda name=name, value=value: build(TrainConfig, {name: value}))


# Patterns of rules.


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(a", "missing ), unterminated subpattern"),
        ("a{99999999999999999999}", "repetition number is too large"),
        ("a" * 2000, "it has 2,000 characters, of at most 1,000"),
        ("(?<=a*)b", "fixed-width"),
    ],
    ids=range(4),
)
def test_a_pattern_that_is_not_read_is_refused_with_its_place(pattern: str, message: str):
    text = refused(lambda: build(QuantConfig, {"rules": [{"path": pattern, "recipe": None}], "quantization": "int8"}))
    assert text.startswith("rule path '")
    assert message in text


DEEP = ["[" * 100_000, '{"a": ' * 100_000, '{".*": {"w_bits": ' + "9" * 5000 + "}}"]


@pytest.mark.parametrize("text", DEEP, ids=["lists", "mappings", "digits"])
def test_a_file_of_bits_is_refused_at_once(text: str, tmp_path: Path):
    path = tmp_path / "m.json"
    path.write_text(text)
    assert str(path) in refused(lambda: load_mixed_precision(path))


# Constructors in Python.

OF_CLASSES: dict[type, Any] = {
    QuantConfig: QuantConfig(),
    TrainConfig: TrainConfig(),
    Rule: Rule("a", "int8"),
    MixedPrecisionEntry: MixedPrecisionEntry(),
    Recipe: RECIPES["fp8"].recipe,
    TensorSpec: TensorSpec("int8"),
    MatmulSpec: MatmulSpec(),
    DelayedSpec: DelayedSpec(),
    SparsitySpec: SparsitySpec(2, 4, 0, 1),
    Calibration: Calibration(),
    Sampling: Sampling(),
}
"""A value of every class of configuration."""

ODD: list[Any] = [
    *(None, "x", "", 1, -1, 0, 1.5, float("nan"), float("inf"), True, 10**400, 3 + 1j, b"x", "a\0"),
    *([], {}, (), [1], ("a",), {"a": 1}, {1}, [[]], object(), int, print, np.arange(2), np.float32(3)),
]


@pytest.mark.parametrize("cls", OF_CLASSES, ids=lambda cls: cls.__name__)
def test_a_constructor_takes_a_value_or_refuses_it_by_a_sentence(cls: type):
    """An error is one that this project raises: what it raises is written there with ``raise``."""
    raw = []
    for field in dataclasses.fields(cls):
        for odd in ODD if field.init else ():
            try:
                dataclasses.replace(OF_CLASSES[cls], **{field.name: odd})
            except (ValueError, TypeError, NotImplementedError) as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                if not str(place.line).startswith("raise") or not str(error):
                    raw.append(f"{field.name}={odd!r:.30}: {error}")
    assert raw == []
