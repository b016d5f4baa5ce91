"""What came of attempts to read what was mutated."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

DOCUMENTED = (ValueError, TypeError, NotImplementedError)
LONGEST_MESSAGE = 2000


@dataclasses.dataclass
class Tally:
    """Counts of attempts.

    Attributes:
      read, refused: number of inputs that were read, and that raised a documented error.
      wrong: the other inputs, one line each.
      slowest_s: process seconds of the slowest attempt.
    """

    read: int = 0
    refused: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    slowest_s: float = 0.0

    def attempt(self, what: str, call: Callable[[], Any], documented: tuple[type, ...] = DOCUMENTED) -> None:
        began = time.process_time()
        try:
            call()
            self.read += 1
        except Exception as error:  # every type is counted
            message = str(error)
            if type(error) not in documented or not message or len(message) > LONGEST_MESSAGE:
                self.wrong.append(f"{what}: {type(error).__name__}: {message[:300]}")
            else:
                self.refused += 1
        self.slowest_s = max(self.slowest_s, time.process_time() - began)
