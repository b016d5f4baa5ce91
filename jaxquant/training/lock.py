"""Lock of a run folder: a second writer gets an error, and the lock of a dead writer is taken over."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAME = "writer.lock"
STALE_S = 90.0
"""Seconds without a heartbeat after which a writer whose process is not visible is considered dead."""
_TRY_S = 3.0  # more than the two seconds after which an empty lock file is taken over
_LOCAL_S = 0.5  # enough to check whether a process on this host is alive


class Busy(ValueError):
    """Raised when another process writes to the run folder."""


class RunLock:
    """Lock on a run folder, held by the first process of a run.

    The file names its owner. Its modification time is a heartbeat for hosts and containers that cannot see each other's
    processes.
    """

    def __init__(self, run_dir: Path):
        import filelock

        self._run_dir, self._timeout = run_dir, filelock.Timeout
        self._lease = filelock.SoftFileLease(run_dir / NAME, lease_duration=STALE_S, thread_local=False)

    def acquire(self, say: Callable[[str], None]) -> None:
        """Acquire the lock of an existing folder; does nothing if this process already has the lock.

        Raises:
          Busy: a live process holds the lock; the message names the process and its host. This can take
            ``STALE_S`` seconds if that process is not visible from here.
          OSError: the file cannot be written.
        """
        if self._lease.is_locked:
            return
        before = self._lease.owner
        who = _name(before)
        limit = _LOCAL_S if before else _TRY_S
        if before and before.hostname != _own_hostname():
            limit = STALE_S + _TRY_S
            say(f"{NAME} belongs to {who}; waiting up to {limit:.0f} s to check whether it is alive")
        try:
            self._lease.acquire(timeout=limit)
        except self._timeout:
            where = f"run {self._run_dir} is being written by {_name(self._lease.owner or before)}"
            raise Busy(f"{where}; wait for it, stop it, or choose another run_dir") from None
        if before:
            say(f"{who} is dead; taking over its lock")

    def check(self) -> None:
        """Check that this process still holds the lock.

        Raises:
          Busy: another process has taken the lock, because this process has not updated its heartbeat for too long.
        """
        deadline, owner = time.monotonic() + _TRY_S, self._lease.owner
        while not owner and self._run_dir.is_dir() and time.monotonic() < deadline:
            time.sleep(0.05)  # another process that checks for staleness moves the file for a moment
            owner = self._lease.owner
        if self._run_dir.is_dir() and (not owner or owner.token != self._lease.token):
            raise Busy(f"run {self._run_dir} was taken over by {_name(owner)} while this process was suspended")

    def release(self) -> None:
        """Release the lock."""
        self._lease.release()


def _name(owner: Any) -> str:
    return f"process {owner.pid} on {owner.hostname}" if owner else "another process"


def _own_hostname() -> str:
    """Return the name of this host in a lease; in a container it differs from the host name."""
    import filelock

    with tempfile.TemporaryDirectory() as folder, filelock.SoftFileLease(f"{folder}/{NAME}") as lease:
        return lease.owner.hostname if lease.owner else ""
