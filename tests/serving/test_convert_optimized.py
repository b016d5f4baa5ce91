"""The served model to the bits of the trained one as users compile them, one recipe of each kind, in bfloat16.

All recipes on all backends, compiled with little optimization: ``test_convert.py``.
"""

from __future__ import annotations

import pytest

from tests.serving.models import schemes
from tests.serving.test_convert import check_linen, check_what_is_converted

OPTIMIZED = True
STRINGS = ("int8", "fp8", "fp8_current", "int4w", "aqt_fp8_full")


@pytest.mark.parametrize(("string", "backend"), [pair for pair in schemes() if pair[0] in STRINGS])
def test_linen_serves_what_it_trained(string, backend):
    if backend != "native":
        pytest.importorskip(backend)
    check_what_is_converted(string, *check_linen(string, backend, "bfloat16", 1))
