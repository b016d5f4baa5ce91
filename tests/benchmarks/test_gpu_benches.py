"""What is measured on a GPU runs on a CPU at small shapes, or says why not."""

import pytest

from benchmarks import gpu_kernels
from benchmarks.gpu_kernels import BLOCK_CASTS, BLOCKS, CASTS, PRODUCTS, compare_kernels
from jaxquant.kernels.block_matmul import cases as blocks
from jaxquant.kernels.quantize import cases as casts
from jaxquant.kernels.quantize import gpu as quantize_gpu


def test_kernels_are_refused_where_there_is_no_gpu():
    rows = list(compare_kernels((CASTS[0], BLOCK_CASTS[0], PRODUCTS[0], BLOCKS[0]), 1))
    assert [row["kernel"] for row in rows] == ["quantize", "block_quantize", "matmul", "block_matmul"]
    assert all("needs an NVIDIA GPU" in row["note"] for row in rows)


@pytest.mark.parametrize(
    ("add", "equal", "note"), [(0, 1.0, ""), (1, 0.75, "WRONG: differs from its reference by up to 255")]
)
def test_a_kernel_that_differs_from_its_reference_is_wrong(monkeypatch, add, equal, note):
    def quantize(x, scale, **options):
        out = reference(x, scale, **options)
        return out._replace(q=out.q.at[: len(out.q) // 2].add(add))

    reference = gpu_kernels.quantize_reference.quantize
    monkeypatch.setattr(quantize_gpu, "quantize", quantize)
    monkeypatch.setattr(quantize_gpu, "refusal", lambda *args, **options: None)
    [row] = compare_kernels([casts.Case((64, 128), "int8", transposed=True)], 1)
    assert row["equal"] == pytest.approx(equal, abs=0.001)
    assert row["note"] == note
    assert row["kernel ms"] > 0


def test_a_product_of_blocks_is_timed_beside_xlas_of_dequantized_operands(monkeypatch):
    monkeypatch.setattr(gpu_kernels.mosaic_gpu, "refuse_device", lambda *args, **options: None)
    monkeypatch.setattr(gpu_kernels, "blocks_gpu", gpu_kernels.blocks_reference)
    cases = blocks.Case((1, 8, 130, 256)), blocks.Case((2, 128, 8, 128), form="grouped", groups=(1,))
    dense, grouped = compare_kernels(cases, 1)
    assert dense["equal"] == grouped["equal"] == 1
    assert dense["xla ms"] > 0
