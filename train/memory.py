"""How much memory this process has needed."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


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
