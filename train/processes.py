"""A run on several processes: joining them, arrays that span them, and what they have to agree on.

Each process runs the same program on its own devices. All of them read the same data stream and take part in every
jitted function and checkpoint; process 0 alone prints and writes metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def join(coordinator_address: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Connect this process with the others; nothing to do where no argument is given.

    Args:
      coordinator_address: HOST:PORT of process 0, reachable from all.
      num_processes: how many there are.
      process_id: number of this one, from 0.

    Raises:
      ValueError: only some are given, or the number is not one of this run.
    """
    given = {
        "--coordinator-address": coordinator_address,
        "--num-processes": num_processes,
        "--process-id": process_id,
    }
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return
    if coordinator_address is None or num_processes is None or process_id is None:
        raise ValueError(f"a run of several processes needs {' and '.join(missing)} too")
    if not 0 <= process_id < num_processes:
        raise ValueError(f"--process-id must be in 0..{num_processes - 1}, got {process_id}")
    jax.distributed.initialize(coordinator_address, num_processes, process_id)


def is_main() -> bool:
    """Whether this process is the one that prints and writes."""
    return jax.process_index() == 0


def place(mesh: Mesh, spec: PartitionSpec, arrays: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
    """Make arrays that span all processes of ones that every process has; one process leaves that to jit."""
    if jax.process_count() == 1:
        return arrays
    sharding = NamedSharding(mesh, spec)
    return {
        name: jax.make_array_from_callback(x.shape, sharding, lambda index, x=x: x[index]) for name, x in arrays.items()
    }


class Flag:
    """A question that is true for all processes as soon as it is for one, without waiting where there is only one.

    ``ask`` starts a collective behind the step at hand; reading its answer when that step's metrics are read costs no
    further wait. It takes a result of that step and gives it back for the next one, so that the three run in this order
    in every process: programs that run side by side can wait for each other's collectives forever.
    """

    def __init__(self, mesh: Mesh):
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._any = jax.jit(
            lambda flags, after: (flags.any(), after), out_shardings=NamedSharding(mesh, PartitionSpec())
        )

    def ask(self, mine: bool, after: Any) -> tuple[Any, Any]:
        """Start asking; every process does so. Returns the answer, for bool(), and ``after`` for the next step."""
        if jax.process_count() == 1:
            return mine, after
        size = self._sharding.mesh.size
        flags = jax.make_array_from_callback((size,), self._sharding, lambda index: np.full((size,), mine)[index])
        return self._any(flags, after)


def all_agree(mine: bool) -> bool:
    """Whether something is true in every process; waits for all of them."""
    if jax.process_count() == 1:
        return mine
    return bool(np.all(multihost_utils.process_allgather(np.array(mine))))


def wait_for_all(name: str) -> None:
    """Return when every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
