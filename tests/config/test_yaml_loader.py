"""The strict loader: YAML 1.2 scalars, typed construction, errors with their place."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, Literal

import pytest

from jaxquant.config.loader import load_yaml, parse_overrides
from jaxquant.core.typed import build, to_mapping


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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4e-4", 4e-4), ("1.5", 1.5), ("1.", 1.0), (".5", 0.5), ("-1E3", -1000.0),
        (".inf", math.inf), ("-.inf", -math.inf),
        ("12", 12), ("-3", -3), ("+7", 7), ("010", 10), ("0o17", 15), ("0x1F", 31),
        ("true", True), ("false", False), ("no", "no"), ("on", "on"), ("yes", "yes"), ("off", "off"), ("y", "y"),
        ("null", None), ("~", None), ("", None), ("'4'", "4"), ("1:30", "1:30"), ("2024-01-02", "2024-01-02"),
        ("1_000", "1_000"), ("fixed,-224,224", "fixed,-224,224"), ("e4", "e4"), ("-", None), ("[1, 2.0]", [1, 2.0]),
    ],
)  # fmt: skip
def test_scalars(tmp_path, text, value):
    if text == "-":  # a list with one empty item
        value = [None]
        text = "\n- "
    got = load_yaml(write(tmp_path, f"k: {text}\n"))["k"]
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", r"c.yml line 3: key 'a' is given twice, first on line 1"),
        ("x:\n  a: 1\n  a: 3\n", r"c.yml line 3: key 'a' is given twice, first on line 2"),
        ("a: [1\n", r"c.yml line 2: "),
        ("a: 1\n---\nb: 2\n", r"c.yml line 2: "),
    ],
)
def test_bad_yaml(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        load_yaml(write(tmp_path, text))


def test_top_level_and_files(tmp_path):
    with pytest.raises(TypeError, match=r"c.yml: top level must be a mapping, got list"):
        load_yaml(write(tmp_path, "- 1\n"))
    assert load_yaml(write(tmp_path, "# nothing\n")) == {}
    with pytest.raises(ValueError, match=r"absent.yml cannot be read: No such file or directory"):
        load_yaml(tmp_path / "absent.yml")
    with pytest.raises(ValueError, match=r"cannot be read: Is a directory"):
        load_yaml(tmp_path)
    path = tmp_path / "latin.yml"
    path.write_bytes(b"a: \xff\n")
    with pytest.raises(ValueError, match=r"latin.yml is not UTF-8 text: invalid start byte at byte 3"):
        load_yaml(path)


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


@pytest.mark.parametrize(
    ("mapping", "kind", "message"),
    [
        ({"txet": "x"}, ValueError, "Outer has no field 'txet'; did you mean 'text'?"),
        ({"inner": {}}, ValueError, "Outer.inner needs field 'width', which has no default"),
        ({"inners": [{"width": 1}, {"width": "x"}]}, TypeError, "Outer.inners[1].width must be int, got 'x' (str)"),
        ({"count": 5.0}, TypeError, "Outer.count must be int, got 5.0 (float)"),
        ({"rate": "4e-4"}, TypeError, "Outer.rate must be float, got '4e-4' (str)"),
        ({"mode": "fsat"}, ValueError, "Outer.mode must be one of 'fast', 'slow', got 'fsat'; did you mean 'fast'?"),
        ({"pair": [1]}, ValueError, "Outer.pair must have 2 items, got 1"),
        ({"words": ["a", 2]}, TypeError, "Outer.words[1] must be str, got 2 (int)"),
        ([], TypeError, "Outer must be a mapping, got [] (list)"),
    ],
)
def test_build_errors(mapping, kind, message):
    with pytest.raises(kind, match=re.escape(message)) as error:
        build(Outer, mapping)
    assert str(error.value).count("slow") <= 1  # the choices stand there once


def test_overrides():
    words = ["steps=20", "quantization=int8", "a.b=3", "a.c=4e-4", "quantization=", "eq=x=y", "l=[1, no]", "n=null"]
    assert parse_overrides(words) == {
        "steps": 20, "quantization": "", "a": {"b": 3, "c": 4e-4}, "eq": "x=y", "l": [1, "no"], "n": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["steps"], "override 'steps' is not of the form key=value"),
        (["=3"], "override '=3' is not of the form key=value"),
        (["a..b=3"], "override 'a..b=3' is not of the form key=value"),
        (["a=3", "a.b=4"], "override 'a.b=4' puts a key under 'a', which has a value already"),
    ],
)
def test_bad_overrides(words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_overrides(words)
