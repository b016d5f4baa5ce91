"""Runs on several processes: initialization, arrays that span processes, and agreement between them.

Each process runs the same program on its own devices. All processes read the same data stream and take part in every
jitted function and checkpoint; only process 0 prints and writes metrics.
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
    """Connect this process with the others; does nothing if all arguments are None.

    Args:
      words: HOST:PORT of process 0, reachable from all processes; number of processes; index of this process, from 0.
        All arguments can be None.

    Raises:
      ValueError: only some arguments are set, or the index is out of range.
    """
    given = dict(zip(("--coordinator-address", "--num-processes", "--process-id"), words, strict=True))
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return
    if missing:
        raise ValueError(f"a run of several processes also requires {' and '.join(missing)}")
    if not 0 <= words[2] < words[1]:
        raise ValueError(f"--process-id must be in 0..{words[1] - 1}, got {words[2]}")
    # Otherwise JAX's preemption service handles SIGTERM, and a signal before the first step is lost.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(*words)


def check_devices() -> None:
    """Raise a ``ValueError`` if JAX cannot start the platform. JAX itself raises errors of several types.

    Raises:
      ValueError: the platform does not start; the message names the platform.
    """
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
        reason = (str(error).splitlines() or [f"its plug-in raises {type(error).__name__}"])[0]
        problem = f"JAX_PLATFORMS={platforms or ''} has no platform that JAX can start here ({reason})"
        raise ValueError(f"{problem}; install its plug-in and driver, or set JAX_PLATFORMS=cpu") from None


def is_main() -> bool:
    """Whether this process prints and writes."""
    return jax.process_index() == 0


def shard(mesh: Mesh, spec: PartitionSpec, arrays: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
    """Create arrays that span all processes from equal arrays in each process; jit does this for one process."""
    if jax.process_count() == 1:
        return arrays
    sharding = NamedSharding(mesh, spec)
    return {name: jax.make_array_from_callback(x.shape, sharding, x.__getitem__) for name, x in arrays.items()}


def sync_cpu(result: T) -> T:
    """Call a jitted function and return its result; with several CPU processes, block until the result is computed.

    CPUs run independent programs concurrently, so two programs can reach their collectives in a different order in each
    process and deadlock. Accelerators run programs in dispatch order.
    """
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        jax.block_until_ready(result)
    return result


class Flag:
    """A flag that becomes true in all processes once it is true in one process.

    ``any_process`` dispatches a collective after the current step. Reading its answer together with the metrics of the
    step adds no further wait.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._any = jax.jit(lambda flags: flags.any(), out_shardings=NamedSharding(mesh, PartitionSpec()))

    def any_process(self, condition: bool) -> Any:
        """Dispatch a collective, and return its result: whether the condition is true in any process."""
        if jax.process_count() == 1:
            return condition
        placed = shard(self._mesh, PartitionSpec(self._mesh.axis_names), {"flags": np.full(self._mesh.size, condition)})
        return sync_cpu(self._any(placed["flags"]))


def all_agree(condition: bool) -> bool:
    """Return whether a condition holds in every process; blocks until all processes have called this function."""
    if jax.process_count() == 1:
        return condition
    return bool(np.all(multihost_utils.process_allgather(np.array(condition))))


def wait_for_all(name: str) -> None:
    """Block until every process has called this function."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
