"""Jaxprs that are nested in equations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxquant.kernels.platforms import UNLESS_SHARDED

JITS = frozenset({"jit", "pjit", "closed_call", "core_call", UNLESS_SHARDED})
REMATS = frozenset({"checkpoint", "remat", "remat2"})


def open_jaxpr(jaxpr: Any) -> Any:
    """Return the open jaxpr of an open or closed jaxpr."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def called(eqn: Any) -> Any:
    """Return the jaxpr that a jit or remat equation calls, or the primal program of a custom derivative."""
    return eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]


def programs(params: dict[str, Any]) -> Iterator[Any]:
    """Yield the open jaxprs in the params of an equation."""
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(open_jaxpr(item), "eqns"):
                yield open_jaxpr(item)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of constants and of carried values among the operands of a scan."""
    if "ft_in" in params:  # jax 0.12
        consts, carries, _ = (len(list(part)) for part in params["ft_in"].unpack())
        return consts, carries
    return params["num_consts"], params["num_carry"]
