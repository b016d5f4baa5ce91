"""A run on several processes: joining them, arrays that span them, and what they have to agree on.

Each process runs the same program on its own devices. All of them read the same data stream and take part in every
jitted function and checkpoint; process 0 alone prints and writes metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

T = TypeVar("T")


def join(*words: Any) -> None:
    """Connect this process with the others; nothing to do where no argument is given.

    Args:
      words: HOST:PORT of process 0, reachable from all; how many there are; the number of this one, from 0; or None.

    Raises:
      ValueError: only some are given, or the number is not one of this run.
    """
    given = dict(zip(("--coordinator-address", "--num-processes", "--process-id"), words, strict=True))
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return
    if missing:
        raise ValueError(f"a run of several processes needs {' and '.join(missing)} too")
    if not 0 <= words[2] < words[1]:
        raise ValueError(f"--process-id must be in 0..{words[1] - 1}, got {words[2]}")
    # jax would take SIGTERM for a service of its own, and one that comes before the first step would go unheard.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(*words)


def check_devices() -> None:
    """Refuse a platform that JAX cannot start here; its own errors are of several kinds, one of them without a word.

    Raises:
      ValueError: naming what was asked for.
    """
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        asked = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
        reason = (str(error).splitlines() or [f"its plug-in ends in {type(error).__name__}"])[0]
        found = f"JAX_PLATFORMS={asked or ''} names no platform that JAX can start here ({reason})"
        raise ValueError(f"{found}; install its plug-in and driver, or set JAX_PLATFORMS=cpu") from None


def is_main() -> bool:
    """Whether this process is the one that prints and writes."""
    return jax.process_index() == 0


def place(mesh: Mesh, spec: PartitionSpec, arrays: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
    """Make arrays that span all processes of ones that every process has; one process leaves that to jit."""
    if jax.process_count() == 1:
        return arrays
    sharding = NamedSharding(mesh, spec)
    return {name: jax.make_array_from_callback(x.shape, sharding, x.__getitem__) for name, x in arrays.items()}


def in_order(result: T) -> T:
    """Return the result of a jitted function; between several CPU processes, once it is computed.

    A CPU runs programs that do not need each other's results side by side, so two programs can reach their collectives
    in another order in each process, which then wait for each other forever. Accelerators run programs in the order in
    which they were started.
    """
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        jax.block_until_ready(result)
    return result


class Flag:
    """A question that is true for all processes as soon as it is for one, without waiting where there is only one.

    ``ask`` starts a collective behind the step at hand; reading its answer when that step's metrics are read costs no
    further wait.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._any = jax.jit(lambda flags: flags.any(), out_shardings=NamedSharding(mesh, PartitionSpec()))

    def ask(self, mine: bool) -> Any:
        """Start asking; every process does so. Returns the answer, for bool()."""
        if jax.process_count() == 1:
            return mine
        placed = place(self._mesh, PartitionSpec(self._mesh.axis_names), {"flags": np.full(self._mesh.size, mine)})
        return in_order(self._any(placed["flags"]))


def all_agree(mine: bool) -> bool:
    """Whether something is true in every process; waits for all of them."""
    if jax.process_count() == 1:
        return mine
    return bool(np.all(multihost_utils.process_allgather(np.array(mine))))


def wait_for_all(name: str) -> None:
    """Return when every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
