"""Changes at random places of JSON values and of bytes, for the fuzzers of configs, manifests and checkpoints."""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Sequence
from typing import Any


def mutate_json(rng: random.Random, value: Any, odd: Sequence[Any], keys: Sequence[str] = ("a",)) -> Any:
    """Return a JSON value with one place changed to an odd one, removed or added."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key, new, kind = rng.choice(list(value)), dict(value), rng.random()
        if kind < 0.1:
            del new[key]
        elif kind < 0.2:
            new[rng.choice([*keys, f"{key}x"])] = new[key]
        else:
            new[key] = mutate_json(rng, new[key], odd, keys)
        return new
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [mutate_json(rng, each, odd, keys) if n == place else each for n, each in enumerate(value)]
    if type(value) is int and rng.random() < 0.3:
        return value + rng.choice([-1, 1, -value, value, 2**32])
    alike = [each for each in odd if type(each) is type(value)]  # gets further
    return copy.deepcopy(rng.choice(alike if alike and rng.random() < 0.5 else odd))


def mutate_bytes(rng: random.Random, data: bytes, upto: int) -> bytes:
    """Return bytes with some of the first ``upto`` changed, cut out, put in or the end cut off."""
    place, kind = rng.randrange(max(1, min(upto, len(data)))), rng.random()
    if kind < 0.5:
        new = bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 8])):
            new[rng.randrange(max(1, min(upto, len(data))))] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        return bytes(new)
    if kind < 0.65:
        word = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**32, 2**63, 2**64 - 1, len(data), len(data) + 1]))
        return data[:place] + word + data[place + 8 :]
    if kind < 0.8:
        return data[:place]
    if kind < 0.9:
        return data[:place] + data[place + rng.randrange(1, 9) :]
    return data[:place] + rng.randbytes(rng.randrange(1, 9)) + data[place:]
