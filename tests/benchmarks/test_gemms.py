"""The GEMM set measures what it says, on a layer small enough for a test."""

import pytest

from benchmarks.gemms import Contender, Layer, measure_gemm_set


class OneGemm(Layer):
    """One matmul in place of four, as compiling is all the time."""

    gemms = ((32, 64),)


TINY = OneGemm(tokens=16)


def test_one_that_cannot_run_says_why(monkeypatch):
    def refuse(self, features, x):
        if self.library == "aqt":
            raise ImportError("quant_backend 'aqt' needs the package aqtp")
        return dense(self, features, x)

    dense = Contender.dense
    monkeypatch.setattr(Contender, "dense", refuse)
    _, aqt = measure_gemm_set(TINY, 1, (Contender("jax"), Contender("aqt", "int8")))
    assert aqt["note"] == "did not run: quant_backend 'aqt' needs the package aqtp"
    assert aqt["speedup"] == "–"
    with pytest.raises(ImportError, match="aqtp"):
        measure_gemm_set(TINY, 1, (Contender("aqt", "int8"),))
