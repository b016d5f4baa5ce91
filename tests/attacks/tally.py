"""What came of attempts to read what was mutated."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

DOCUMENTED = (ValueError, TypeError, NotImplementedError)
LONGEST_MESSAGE = 2000


@dataclasses.dataclass
class Tally:
    """What came of attempts.

    Attributes:
      read, refused: how many were taken, and refused as documented.
      wrong: those that ended otherwise, each as one line.
      slowest_s: process seconds of the slowest.
      slowest: what that was.
    """

    read: int = 0
    refused: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    slowest_s: float = 0.0
    slowest: str = ""
    kinds: Counter[str] = dataclasses.field(default_factory=Counter)

    def attempt(self, what: str, call: Callable[[], Any], documented: tuple[type, ...] = DOCUMENTED) -> None:
        began = time.process_time()
        try:
            call()
            self.read += 1
        except Exception as error:  # every kind is what is looked for
            message = str(error)
            if type(error) not in documented or not message or len(message) > LONGEST_MESSAGE:
                self.wrong.append(f"{what}: {type(error).__name__}: {message[:300]}")
            else:
                self.refused += 1
                self.kinds[type(error).__name__] += 1
        seconds = time.process_time() - began
        if seconds > self.slowest_s:
            self.slowest_s, self.slowest = seconds, what
