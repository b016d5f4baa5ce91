"""Implementation of the command ``jaxquant servers``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator

from jaxquant import terminal
from jaxquant.export.servers import (
    CHIPS,
    RULES,
    SAME,
    SERVERS,
    Layer,
    ServedLayer,
    check_names,
    read_layers,
    served_layers,
    surviving_strings,
    worst_result,
)


def print_servers(checkpoint: str, server: str | None, chip: str | None, strict: bool) -> int:
    """Print how servers compute a checkpoint.

    Args:
      checkpoint: Hugging Face folder or GGUF file.
      server: name of a server, or None for all.
      chip: name of a chip, or None for all.
      strict: whether the result is 1 if a layer is not known to be computed as stored.

    Returns:
      0, or 1 in strict mode.

    Raises:
      ValueError: the server or the chip is unknown, or strict mode lacks one of them.
    """
    if strict and (server is None or chip is None):
        raise ValueError("--strict compares with one server on one chip; add --server and --chip")
    layers = read_layers(checkpoint)
    if server is None or chip is None:
        print(terminal.table([("server", "version", "chips", "result", "how"), *summary_rows(layers, server, chip)]))
        return 0
    served = served_layers(layers, server, chip)
    header = ("layer", "weight stored", "weight computed", "input stored", "input computed", "result")
    print(terminal.table([header, *layer_rows(served)]))
    for how, source in dict.fromkeys((each.how, each.source) for each in served if each.how):
        print(f"{how}. Source: {source}, {SERVERS[server]['at']}")
    unchanged = ", ".join(surviving_strings(server, chip)) or "not known"
    print(f"Strings that {server} on {chip} computes unchanged: {unchanged}")
    changed = [each for each in served if each.result != SAME]
    if strict and changed:
        count, first = f"{len(changed)} of {len(served)} layers", f"{changed[0].layer.name}: {changed[0].result}"
        problem = f"{checkpoint} has {count} that {server} on {chip} is not known to compute as stored ({first})"
        print(f"error: {problem}; export in another format, or use another server", file=sys.stderr)
        return 1
    return 0


def summary_rows(layers: list[Layer], server: str | None = None, chip: str | None = None) -> Iterator[tuple[str, ...]]:
    """Yield a row for each server and class of chips: server, version, chips, result, explanation.

    Classes without a rule for the server are left out, unless their chip is given.

    Raises:
      ValueError: the server or the chip is unknown.
    """
    check_names(server, chip)
    for name, about in SERVERS.items():
        for kind in dict.fromkeys(CHIPS.values()):
            chips = [each for each in CHIPS if CHIPS[each] == kind]
            is_known = any(rule.server == name and kind in rule.chips for rule in RULES)
            if server in (None, name) and (chip in chips or (chip is None and is_known)):
                served = served_layers(layers, name, chips[0])
                how = "; ".join(dict.fromkeys(each.how for each in served if each.how))
                yield name, about["version"], ", ".join(chips), worst_result(served), how


def layer_rows(served: Iterable[ServedLayer]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each layer; layers that differ only in their indices share a row with their number."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for each in served:
        layer = each.layer
        row = (layer.weight, each.weight, layer.input, each.input, each.result)
        groups.setdefault((re.sub(r"\.\d+(?=\.)", ".*", layer.name), *row), []).append(layer.name)
    for (pattern, *rest), names in groups.items():
        yield f"{pattern} ({len(names)})" if len(names) > 1 else names[0], *rest
