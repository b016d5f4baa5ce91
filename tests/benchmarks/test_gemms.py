"""The GEMM set measures what it says, on a layer small enough for a test."""

import pytest

from benchmarks import gemms
from benchmarks.gemms import Contender, Layer, measure_gemm_set


class OneGemm(Layer):
    """One matmul in place of four, as compiling is all the time."""

    gemms = ((32, 64),)


TINY = OneGemm(tokens=16)


def test_the_layer_is_the_published_one():
    assert Layer().gemms == ((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096))
    assert 3 * Layer().flops == pytest.approx(1.917e13, rel=1e-3)  # the figure beside TransformerEngine's times


@pytest.mark.slow
def test_contenders_are_timed_against_bf16_in_one_run():
    contenders = (Contender("jax"), Contender("flax", "fp8"), Contender("native", "fp8"))
    bf16, flax, native = measure_gemm_set(TINY, 2, contenders)
    assert bf16["speedup"] == 1
    assert (bf16["low"], flax["low"], native["low"]) == ("0%", "100%", "100%")
    for row in (bf16, flax, native):
        assert all(row[f"{name} ms"] > 0 for name in (*gemms.PROGRAMS, "fwd + bwd"))
        assert row["TFLOP/s"] >= 0
        assert row["note"] == ""


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
