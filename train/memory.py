"""How much memory this process has needed."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def peak_resident_bytes() -> int:
    """Return the largest resident set that this process has had, in bytes.

    Linux's ``VmHWM`` where there is one: unlike ``ru_maxrss`` it does not begin with what the parent had at the fork.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def return_large_blocks() -> None:
    """Make the allocator give blocks above 1 MiB back to the system as soon as they are freed.

    glibc by itself learns to keep blocks of up to 32 MiB for later: a program that handles a model layer by layer would
    hold several times what it uses. For a program of our own, at its start; elsewhere than under glibc it does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)
