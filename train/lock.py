"""One writer a run folder: a second process is told who the first one is, and a dead one's place is taken."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

NAME = "writer.lock"
BEAT_S = 15.0
STALE_S = 90.0
"""A writer on another host, or on a file system without locks, that has not touched the file for so long is dead."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Busy(ValueError):
    """Another process writes to the run folder."""


class RunLock:
    """The right to write to a run folder, for the first process of a run.

    The kernel holds the lock on the file and frees it when the process ends, however it ends. The file says who it is,
    and its time of change is a heartbeat for hosts whose locks do not reach each other.
    """

    def __init__(self, run_dir: Path):
        self._path = run_dir / NAME
        self._file: IO[str] | None = None
        self._ended = threading.Event()

    def acquire(self, say: Callable[[str], None]) -> None:
        """Take the folder, which is there; nothing to do where this process has it.

        Raises:
          Busy: a living process has it, named with its host.
          OSError: the file cannot be written.
        """
        if self._file is not None:
            return
        with contextlib.ExitStack() as opened:
            file = opened.enter_context(self._path.open("a+", encoding="utf-8"))
            self._take(file, say)
            opened.pop_all()
        self._file = file
        threading.Thread(target=self._beat, name="run lock", daemon=True).start()

    def release(self) -> None:
        """Let others have the folder."""
        self._ended.set()
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None

    def _take(self, file: IO[str], say: Callable[[str], None]) -> None:
        has_locks = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._busy(_owner(file)) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            has_locks = False
        owner = _owner(file)
        if owner is not None:
            # The kernel has freed the lock of a process that ended here; of others the heartbeat tells.
            if (not has_locks or owner[1] != socket.gethostname()) and self._is_fresh(file):
                raise self._busy(owner)
            say(f"process {owner[0]} on {owner[1]} has ended without a word; going on in its place")
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n")
        file.flush()

    def _busy(self, owner: tuple[int, str] | None) -> Busy:
        who = f"process {owner[0]} on {owner[1]}" if owner else "another process"
        where = f"run {self._path.parent} is being written by {who}"
        return Busy(f"{where}; wait for it, stop it, or choose another run_dir")

    def _is_fresh(self, file: IO[str]) -> bool:
        """Whether the file was touched lately, by the clock of whoever keeps the file."""
        before = os.fstat(file.fileno())
        os.utime(self._path)
        age = os.stat(self._path).st_mtime - before.st_mtime
        if age < STALE_S:
            os.utime(self._path, ns=(before.st_atime_ns, before.st_mtime_ns))  # looking is no heartbeat
        return age < STALE_S

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                os.utime(self._path)
            except OSError:  # the folder is gone, which the next checkpoint tells
                return


def _owner(file: IO[str]) -> tuple[int, str] | None:
    """Return the process that the file names, and its host."""
    file.seek(0)
    try:
        owner = json.loads(file.read(4096))
        return int(owner["pid"]), str(owner["host"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
