"""Experts as gpt-oss stores them: one tensor for all experts of a layer, in which rows of gate and up alternate.

    experts.gate_up_proj [E, D, 2F], gate_up_proj_bias [E, 2F]      experts.down_proj [E, F, D], down_proj_bias [E, D]
    in MXFP4: gate_up_proj_blocks [E, 2F, D/32, 16], gate_up_proj_scales [E, 2F, D/32]

Source: ``modeling_gpt_oss.py`` and ``integrations/mxfp4.py`` of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxquant.export.layouts import concatenate

_PARTS = {"gate_proj": ("gate_up_proj", 0, 2), "up_proj": ("gate_up_proj", 1, 2), "down_proj": ("down_proj", 0, 1)}
ENDS = {".weight": "", ".bias": "_bias", ".weight_packed": "_blocks", ".weight_scale": "_scales"}
"""End of a tensor's name for one expert -> end of the name of the stored tensor."""
_NAME = re.compile(rf"(.*\.experts)\.(\d+)\.({'|'.join(_PARTS)})({'|'.join(map(re.escape, ENDS))})")


class Slice(NamedTuple):
    """Rows of one expert in a stored tensor: the row ``start`` and every ``step``-th row after it."""

    stored: str
    expert: int
    start: int
    step: int

    @classmethod
    def of(cls, name: str) -> Slice | None:
        """Return the place of a tensor of one expert, or None for other names."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        part, start, step = _PARTS[match[3]]
        return cls(f"{match[1]}.{part}{ENDS[match[4]]}", int(match[2]), start, step)

    def read(self, array: np.ndarray) -> np.ndarray:
        """Return the rows [out, in], or [out] of a bias, of the stored tensor ``array``."""
        part = array[self.expert]
        rows = (part.T if self.stored.endswith("_proj") else part)[self.start :: self.step]
        return rows if rows.ndim == 1 else rows.reshape(len(rows), -1)


def join(parts: Mapping[Slice, np.ndarray]) -> np.ndarray:
    """Return the stored tensor that consists of ``parts``; the inverse of ``Slice.read``."""
    order = sorted(parts)
    name, whole = order[0].stored, concatenate([parts[each][None] for each in order])
    pairs = whole.reshape(-1, order[0].step, *whole.shape[1:]).swapaxes(1, 2)
    whole = pairs.reshape(len(pairs), -1, *pairs.shape[3:])
    if name.endswith("_blocks"):
        return whole.reshape(*whole.shape[:2], -1, 16)
    return whole.swapaxes(1, 2) if name.endswith("_proj") else whole
