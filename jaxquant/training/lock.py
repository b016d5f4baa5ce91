"""One writer a run folder: a second process is told who the first one is, and a dead one's place is taken."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAME = "writer.lock"
STALE_S = 90.0
"""A writer whose process cannot be seen from here, and that has not touched the file for so long, is dead."""
_TRY_S = 3.0  # a file that says nothing is taken after two
_SEEN_S = 0.5  # of a process on this host one look tells whether it lives


class Busy(ValueError):
    """Another process writes to the run folder."""


class RunLock:
    """The right to write to a run folder, for the first process of a run.

    The file says whose it is, and its time of change is a heartbeat for hosts and containers that do not see each
    other's processes.
    """

    def __init__(self, run_dir: Path):
        import filelock

        self._run_dir, self._timeout = run_dir, filelock.Timeout
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
        limit = _SEEN_S if before else _TRY_S
        if before and before.hostname != _own_hostname():
            limit = STALE_S + _TRY_S
            say(f"{NAME} is of {who}; waiting for up to {limit:.0f} s to see whether it lives")
        try:
            self._lease.acquire(timeout=limit)
        except self._timeout:
            where = f"run {self._run_dir} is being written by {_name(self._lease.owner or before)}"
            raise Busy(f"{where}; wait for it, stop it, or choose another run_dir") from None
        if before:
            say(f"{who} is gone; going on in its place")

    def check(self) -> None:
        """Look whether the folder is still this process's, which has acquired it.

        Raises:
          Busy: another process has taken it over, as it may where this one did not touch the file for so long.
        """
        deadline, owner = time.monotonic() + _TRY_S, self._lease.owner
        while not owner and self._run_dir.is_dir() and time.monotonic() < deadline:
            time.sleep(0.05)  # who looks whether the file is stale lays it aside for a moment
            owner = self._lease.owner
        if self._run_dir.is_dir() and (not owner or owner.token != self._lease.token):
            raise Busy(f"run {self._run_dir} was taken over by {_name(owner)} while this process stood still")

    def release(self) -> None:
        """Let others have the folder."""
        self._lease.release()


def _name(owner: Any) -> str:
    return f"process {owner.pid} on {owner.hostname}" if owner else "another process"


def _own_hostname() -> str:
    """Return what a lease calls this host: a container's has more than its name."""
    import filelock

    with tempfile.TemporaryDirectory() as folder, filelock.SoftFileLease(f"{folder}/{NAME}") as lease:
        return lease.owner.hostname if lease.owner else ""
