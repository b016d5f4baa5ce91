"""One writer a run folder: a second process is told who the first one is, and a dead one's place is taken."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from filelock import SoftFileLease, Timeout

NAME = "writer.lease"
PATIENCE_S = 3.0
"""The time to take a dead writer's place on this host, or that of a file that is no lease."""
STALE_S = 90.0
"""A writer on another host that has not renewed its lease for so long is dead."""


class Busy(ValueError):
    """Another process writes to the run folder."""


class RunLock:
    """The right to write to a run folder, for the first process of a run: a lease that its process renews."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._lease = SoftFileLease(run_dir / NAME, lease_duration=STALE_S, thread_local=False)

    def acquire(self, say: Callable[[str], None]) -> None:
        """Take the folder, which is there; nothing to do where this process has it.

        Of a writer on another host nobody here knows whether it lives: its lease is watched until it is renewed.

        Raises:
          Busy: a living process has it, named with its host.
          OSError: the file cannot be written.
        """
        if self._lease.is_locked:
            return
        who, is_elsewhere = self._owner()
        if is_elsewhere:
            say(f"{who} writes to {self._run_dir}; waiting up to {STALE_S:.0f} s to see whether it still runs")
        try:
            self._lease.acquire(timeout=STALE_S + PATIENCE_S if is_elsewhere else PATIENCE_S)
        except Timeout:
            raise Busy(
                f"run {self._run_dir} is being written by {self._owner()[0] or 'another process'}; wait for it, stop "
                "it, or choose another run_dir"
            ) from None
        if who:
            say(f"{who} has ended without a word; going on in its place")

    def release(self) -> None:
        """Let others have the folder."""
        self._lease.release()

    def _owner(self) -> tuple[str, bool]:
        """Return who writes ("" for nobody), and whether that is on another host."""
        owner = self._lease.owner
        if owner is None:
            return "", False
        host = owner.hostname.partition("?")[0]  # without the namespace of its process numbers
        return f"process {owner.pid} on {host}", host != socket.gethostname()
