"""The strict loader: YAML 1.2 scalars, typed construction; any other content of a config is an error with its name."""

import dataclasses
import math
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytest

from jaxquant.config.loader import MAX_BYTES, load_yaml, parse_overrides
from jaxquant.core.typed import build, to_mapping
from jaxquant.training.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class Inner:
    width: int
    names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Outer:
    text: str = ""
    count: int = 0
    rate: float = 0.0
    flag: bool = False
    maybe: int | None = None
    mode: Literal["fast", "slow"] = "fast"
    pair: tuple[int, float] = (0, 0.0)
    words: list[str] = dataclasses.field(default_factory=list)
    table: Mapping[str, float] = dataclasses.field(default_factory=dict)
    inner: Inner | None = None
    inners: tuple[Inner, ...] = ()
    either: tuple[float, ...] | str = ()
    anything: Any = None


def write(tmp_path, text):
    path = tmp_path / "c.yml"
    path.write_text(text)
    return path


SCALARS = {
    "4e-4": 4e-4, "1.5": 1.5, "1.": 1.0, ".5": 0.5, "-1E3": -1000.0, ".inf": math.inf, "-.inf": -math.inf,
    "12": 12, "-3": -3, "+7": 7, "010": 10, "0o17": 15, "0x1F": 31, "true": True, "false": False,
    "no": "no", "on": "on", "yes": "yes", "off": "off", "y": "y", "null": None, "~": None, "": None, "'4'": "4",
    "1:30": "1:30", "2024-01-02": "2024-01-02", "1_000": "1_000", "fixed,-224,224": "fixed,-224,224", "e4": "e4",
    "\n- ": [None], "[1, 2.0]": [1, 2.0],
}  # fmt: skip


def test_scalars(tmp_path):
    for text, value in SCALARS.items():
        got = load_yaml(write(tmp_path, f"k: {text}\n"))["k"]
        assert (got, type(got)) == (value, type(value)), text


LIMIT_S = 2.0
"""Limit in seconds; the load takes a second on an idle machine."""
LONGEST = 300 + len(", ".join(field.name for field in dataclasses.fields(TrainConfig)))
"""Limit for the length of a message: the names of all fields, a key of 200 characters, and words."""


def refused(call: Callable[[], Any]) -> str:
    """Return the error message; check that it is short and appears soon."""
    began = time.process_time()
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert caught.type in (ValueError, TypeError)
    assert time.process_time() - began < LIMIT_S
    assert len(str(caught.value)) < LONGEST
    return str(caught.value)


TEXTS = {
    "a: 1\nb: 2\na: 3\n": "c.yml line 3: key 'a' is already on line 1; remove one of the two",
    "x:\n  a: 1\n  a: 3\n": "c.yml line 3: key 'a' is already on line 2; remove one of the two",
    "a: [1\n": "c.yml line 2: ",
    "a: 1\n---\nb: 2\n": "c.yml line 2: ",
    "- 1\n": "c.yml must be a mapping of names to values, got list",
    "steps: &a [3]\nseed: *a": "line 2: YAML alias *a is not supported; replace the alias with the value",
    "steps: " + "[" * 10_000: "is nested too deep; use fewer levels",
    "seed: 0\nsteps: " + "9" * 5000: "line 2: integer 99999999999999999999... of 5000 digits",
    "a: b\n" * MAX_BYTES: "is larger than the limit of 100,000 bytes; check the path",
    "steps: 3\nseed: \x07": "line 2: character 7 is not allowed in YAML",
}


def test_a_text_that_is_no_config_is_refused_with_its_line_at_once(tmp_path):
    for text, message in TEXTS.items():
        assert message in refused(lambda text=text: load_yaml(write(tmp_path, text))), text[:40]
    assert load_yaml(write(tmp_path, "# nothing\n")) == {}


def test_what_is_no_file_of_text_is_refused(tmp_path):
    (tmp_path / "latin.yml").write_bytes(b"a: \xff\n")
    for path, message in (
        (tmp_path / "absent.yml", "absent.yml cannot be read: No such file or directory; check the path"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "latin.yml", "latin.yml is not UTF-8 (byte 3: invalid start byte); save the file as UTF-8"),
        ("/dev/zero", "'/dev/zero' is a device; pass the path of a regular file"),
        ("a\0b.yml", "null character, which no path may contain; remove the character"),
    ):
        assert message in refused(lambda path=path: load_yaml(path))


NUMBERS: list[tuple[str, Any, str]] = [
    ("learning_rate", 10**400, "TrainConfig.learning_rate is too large for a float, got an integer of 1329 bits"),
    ("steps", 10**5000, "steps must be at most 2147483647, got an integer of 16610 bits"),
    ("run_dir", "a\0b", "run_dir 'a\\x00b' contains a null character"),
    ("constant_bound_config", [1e-300] * 6, "constant_bound_config: bound fwd_lhs must be between 1e-30 and 1e30"),
]


def test_every_number_of_a_run_has_a_range():
    """Both a minimum and a maximum; new fields need a range, too."""
    for name, value, message in NUMBERS:
        fields = {name: value} | ({"quantization": "aqt_fp8_full"} if name.startswith("constant") else {})
        assert message in refused(lambda fields=fields: build(TrainConfig, fields))
    for name, default in vars(TrainConfig()).items():
        for value in {int: (10**150, -(10**150)), float: (1e150, -1e150, math.nan)}.get(type(default), ()):
            assert name in refused(lambda name=name, value=value: build(TrainConfig, {name: value}))


FULL = {
    "text": "t", "count": 3, "rate": 0.5, "flag": True, "maybe": 4, "mode": "slow", "pair": [1, 2.0], "words": ["a"],
    "table": {"x": 1.0}, "inner": {"width": 2, "names": ["n"]}, "inners": [{"width": 1, "names": []}], "either": "1,2",
    "anything": [1, "x"],
}  # fmt: skip


def test_build_and_back():
    built = build(Outer, FULL)
    assert built.inner == Inner(2, ("n",))
    assert built.inners == (Inner(1),)
    assert built.pair == (1, 2.0)
    assert to_mapping(built) == FULL
    assert build(Outer, to_mapping(built)) == built
    assert build(Outer, {}) == Outer()


def test_ints_become_floats():
    built = build(Outer, {"rate": 3, "pair": [1, 2], "table": {"x": 1}, "either": [1, 2]})
    assert [type(value) for value in (built.rate, built.pair[1], built.table["x"], *built.either)] == [float] * 5


BAD = [
    ({"txet": "x"}, ValueError, "Outer has no field 'txet'; did you mean 'text'?"),
    ({"inner": {}}, ValueError, "Outer.inner needs field 'width', which has no default"),
    ({"inners": [{"width": 1}, {"width": "x"}]}, TypeError, "Outer.inners[1].width must be int, got 'x' (str)"),
    ({"count": 5.0}, TypeError, "Outer.count must be int, got 5.0 (float)"),
    ({"rate": "4e-4"}, TypeError, "Outer.rate must be float, got '4e-4' (str)"),
    ({"mode": "fsat"}, ValueError, "Outer.mode must be one of 'fast', 'slow', got 'fsat'; did you mean 'fast'?"),
    ({"pair": [1]}, ValueError, "Outer.pair must have 2 items, got 1"),
    ([], TypeError, "Outer must be a mapping, got [] (list)"),
]


def test_build_errors():
    for mapping, kind, message in BAD:
        with pytest.raises(kind, match=re.escape(message)):
            build(Outer, mapping)


def test_overrides():
    words = ["steps=20", "quantization=int8", "a.b=3", "a.c=4e-4", "quantization=", "eq=x=y", "l=[1, no]", "n=null"]
    assert parse_overrides(words) == {
        "steps": 20, "quantization": "", "a": {"b": 3, "c": 4e-4}, "eq": "x=y", "l": [1, "no"], "n": None,
    }  # fmt: skip
    for words, message in (
        (["steps"], "override 'steps' must have the form key=value, such as steps=20"),
        (["=3"], "override '=3' must have the form key=value, such as steps=20"),
        (["a=3", "a.b=4"], "override 'a.b=4' sets a field of 'a', which already has a value"),
    ):
        assert message in refused(lambda words=words: parse_overrides(words))
