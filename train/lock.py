"""One writer a run folder: a second process is told who the first one is, and a dead one's place is taken."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock

NAME = "writer.lock"
STALE_S = 90.0
"""A writer whose process cannot be seen from here, and that has not touched the file for so long, is dead."""
_TRY_S = 3.0  # a file that says nothing is taken after two


class Busy(ValueError):
    """Another process writes to the run folder."""


class RunLock:
    """The right to write to a run folder, for the first process of a run.

    The file says whose it is, and its time of change is a heartbeat for hosts and containers that do not see each
    other's processes.
    """

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._lease = filelock.SoftFileLease(run_dir / NAME, lease_duration=STALE_S, thread_local=False)

    def acquire(self, say: Callable[[str], None]) -> None:
        """Take the folder, which is there; nothing to do where this process has it.

        Raises:
          Busy: a living process has it, named with its host. Where that process cannot be seen, it takes a while.
          OSError: the file cannot be written.
        """
        if self._lease.is_locked:
            return
        before = self._lease.owner
        who = _name(before)
        limit = _TRY_S
        if before and before.hostname != _own_hostname():
            limit += STALE_S
            say(f"{NAME} is of {who}; waiting for up to {limit:.0f} s to see whether it lives")
        try:
            self._lease.acquire(timeout=limit)
        except filelock.Timeout:
            where = f"run {self._run_dir} is being written by {_name(self._lease.owner or before)}"
            raise Busy(f"{where}; wait for it, stop it, or choose another run_dir") from None
        if before:
            say(f"{who} has ended without a word; going on in its place")

    def release(self) -> None:
        """Let others have the folder."""
        self._lease.release()


def _name(owner: Any) -> str:
    return f"process {owner.pid} on {owner.hostname}" if owner else "another process"


def _own_hostname() -> str:
    """Return what a lease calls this host: a container's has more than its name."""
    with tempfile.TemporaryDirectory() as folder, filelock.SoftFileLease(f"{folder}/{NAME}") as lease:
        return lease.owner.hostname if lease.owner else ""
