"""Mutated configurations: each is read, or refused with an error of a documented type."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

import yaml

from jaxquant.config.loader import load_yaml, parse_overrides
from jaxquant.config.mixed_precision import load_mixed_precision
from jaxquant.core.typed import build
from tests.attacks.tally import Tally
from tests.mutate import mutate_json
from tests.serving.test_hostile import ODD
from train.config import TrainConfig

ROOT = Path(__file__).parents[2]
ODD_TEXTS = (
    *("nan", ".inf", "-1", "9" * 400, "0x" + "f" * 99, "1e999", "!!int x", "!mine", "*a", "&a ", "<<: ", "? ", "- "),
    *("[" * 50, "{a: " * 50, "null", "~", "'", '"', "|", ">", "\t", "\0", "\x1b", "\ufeff", "\u2028", "#", ": ", ", "),
    *("(a+)+$", "(?P<x", r"\1", ".*", "fp8", "fp9", "int8", "qwix", "aqt", "true", "[]", "{}", "-0.0", "1_000", "1e-3"),
)


def attack_configs(count: int, seed: int) -> Tally:
    """Read ``count`` mutated configurations as ``python -m train`` does: files, command lines, files of ``intmp``."""
    rng, tally = random.Random(seed), Tally()
    files = sorted(ROOT.glob("configs/**/*.yml"))
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}
    defaults = yaml.safe_load(texts["configs/base.yml"])
    mixed = {path.name: json.loads(path.read_text()) for path in sorted(ROOT.glob("configs/intmp/*.json"))}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "mutated"
        for number in range(count):
            way = rng.random()
            if way < 0.6:
                name = rng.choice(sorted(texts))
                path.write_bytes(_mangle(rng, texts[name].encode()))
                tally.attempt(f"{number}: {name}, bytes", lambda: build(TrainConfig, load_yaml(path)))
            elif way < 0.75:
                fields = mutate_json(rng, {key: defaults[key] for key in rng.sample(sorted(defaults), 12)}, ODD)
                path.write_text(yaml.safe_dump(fields))
                tally.attempt(f"{number}: values", lambda: build(TrainConfig, load_yaml(path)))
            elif way < 0.9:
                keys = rng.choices(sorted(defaults), k=rng.randrange(1, 4))
                words = [_mangle(rng, f"{key}={defaults[key]}".encode()).decode(errors="replace") for key in keys]
                tally.attempt(f"{number}: {words}", lambda words=words: build(TrainConfig, parse_overrides(words)))
            else:
                name = rng.choice(sorted(mixed))
                text = json.dumps(mutate_json(rng, mixed[name], ODD))
                path.write_bytes(_mangle(rng, text.encode()) if rng.random() < 0.5 else text.encode())
                tally.attempt(f"{number}: {name}", lambda: load_mixed_precision(path))
    return tally


def _mangle(rng: random.Random, data: bytes) -> bytes:
    """Change a text in one to four places: bits, bytes, pieces left out, doubled or moved, odd words put in."""
    for _ in range(rng.randrange(1, 5)):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.randrange(1, 60))
        kind = rng.randrange(6)
        if kind == 0 and start < len(data):
            data = data[:start] + bytes([data[start] ^ 1 << rng.randrange(8)]) + data[start + 1 :]
        elif kind == 1:
            data = data[:start] + data[end:]
        elif kind == 2:
            data = data[:end] + data[start:end] * rng.randrange(1, 40) + data[end:]
        elif kind == 3:
            place = rng.randrange(len(data) + 1)
            data = data[:place] + data[start:end] + data[place:]
        else:  # an odd word instead of a value, or anywhere
            colon = data.find(b": ", start)
            line = data.find(b"\n", max(colon, 0))
            word = rng.choice(ODD_TEXTS).encode()
            if kind == 4 and 0 <= colon < line:
                data = data[: colon + 2] + word + data[line:]
            else:
                data = data[:start] + word + data[start:]
    return data
