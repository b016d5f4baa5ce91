"""Mutated configurations: each is read, or refused with an error of a documented type."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

import yaml

from jaxquant.config.loader import load_yaml
from jaxquant.config.mixed_precision import load_mixed_precision
from jaxquant.core.typed import build
from tests.attacks.tally import Tally
from tests.mutate import mutate_bytes, mutate_json
from train.config import TrainConfig

ROOT = Path(__file__).parents[2]
ODD = [None, True, -1, 0, 10**12, 1e308, "", "x", "object", [], [[]], [-1], {}, {"a": 1}, "\0", "../x", ["x"] * 50]


def attack_configs(count: int, seed: int) -> Tally:
    """Read ``count`` mutated configurations: files of runs by their bytes and by their values, files of ``intmp``."""
    rng, tally = random.Random(seed), Tally()
    files = [path.read_bytes() for path in sorted(ROOT.glob("configs/**/*.yml"))]
    defaults = yaml.safe_load((ROOT / "configs/base.yml").read_text())
    mixed = [json.loads(path.read_text()) for path in sorted(ROOT.glob("configs/intmp/*.json"))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mutated"
        for number in range(count):
            way, read = rng.random(), lambda: build(TrainConfig, load_yaml(path))
            if way < 0.4:
                data = rng.choice(files)
                for _ in range(rng.randrange(1, 5)):
                    data = mutate_bytes(rng, data, len(data)) or data
                path.write_bytes(data)
            elif way < 0.7:
                fields = mutate_json(rng, {key: defaults[key] for key in rng.sample(sorted(defaults), 12)}, ODD)
                path.write_text(yaml.safe_dump(fields))
            else:
                read = lambda: load_mixed_precision(path)  # noqa: E731
                text = json.dumps(mutate_json(rng, rng.choice(mixed), ODD)).encode()
                path.write_bytes(mutate_bytes(rng, text, len(text)) if rng.random() < 0.5 else text)
            tally.attempt(f"{number} of seed {seed}", read)
    return tally
