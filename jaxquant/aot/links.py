"""The cost of a collective: participating chips, their links, and the bytes that each chip sends one way.

For S bytes over n chips, a ring sends (n − 1)/n · S for an all-gather, a reduce-scatter or an all-to-all, twice as much
for an all-reduce, and S for a permutation. Over several NVLink domains (``Chip.domain`` chips each) a collective has
two levels that run in parallel: each chip receives its share of the other domains' data over its own network card, and
the chips of a domain exchange all data over NVLink.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from jaxquant.aot.chips import Chip

_GROUPS = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


def first_group(attributes: str) -> tuple[int, ...]:
    """Return the devices of a collective's first group, or () if the attributes list no groups.

    For a permutation, return the first pair of devices with the largest distance.

    Args:
      attributes: attributes of the instruction in HLO text.
    """
    if found := _GROUPS.search(attributes):
        return tuple(int(each) for each in found[1].split(",") if each)
    if found := _IOTA.search(attributes):
        shape, sizes, order = ([int(each) for each in (part or "").split(",") if each] for part in found.groups())
        ids = np.arange(math.prod(sizes)).reshape(sizes)
        return tuple(int(each) for each in ids.transpose(order or None).reshape(shape[0], -1)[0])
    if found := _PAIRS.search(attributes):
        pairs = [tuple(map(int, each.split(","))) for each in re.findall(r"\{(\d+,\d+)\}", found[1])]
        return max(pairs, key=lambda pair: abs(pair[0] - pair[1]), default=())
    return ()


def duration(chip: Chip, collective: Any, devices: int) -> float:
    """Estimate the seconds of one run of a collective at the full rate of its links.

    Args:
      chip: chip whose links are used.
      collective: ``program.Collective`` to estimate.
      devices: number of devices of the program, for a collective whose attributes list no groups.
    """
    group = collective.members or tuple(range(devices))
    size = len(group)
    if size < 2:
        return 0.0
    rounds = 2 if collective.kind == "all-reduce" else 1
    share = 1.0 if collective.kind == "collective-permute" else (size - 1) / size
    sent = rounds * share * collective.bytes
    one_way = chip.link / 2
    if not chip.domain:
        return sent / one_way
    domains = len({each // chip.domain for each in group})
    if domains == 1:
        return sent / one_way
    inside = size / domains
    if collective.kind == "collective-permute":
        return sent / chip.network
    network = rounds * collective.bytes * (domains - 1) / domains / inside / chip.network
    nvlink = rounds * collective.bytes * (inside - 1) / inside / one_way
    return max(network, nvlink)
