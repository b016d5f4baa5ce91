"""Parser of a compiler's program: small HLO texts with known matmuls, moves and collectives."""

# ruff: noqa: E501  (compilers write such long lines)

import dataclasses
import json
from types import SimpleNamespace

import jax
import pytest

from jaxquant.aot import hlo, links, report, worker
from jaxquant.aot.chips import CHIPS, chip, gpu_target
from jaxquant.aot.outcome import Outcome, compare, locate
from jaxquant.aot.price import estimate
from jaxquant.aot.program import Collective, HloStep, Matmul, read_program
from jaxquant.core.typed import build

GPU = """HloModule jit_step, is_scheduled=true

%fused_slice (p0: f32[4,256,512], p1: s32[]) -> f8e4m3fn[256,512] {
  %p0 = f32[4,256,512]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = f32[1,256,512]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,256,512}
  %flat = f32[256,512]{1,0} bitcast(%one)
  ROOT %q = f8e4m3fn[256,512]{1,0} convert(%flat)
}

%fused_update (p0: bf16[4,128,512], p1: bf16[128,512], p2: s32[]) -> bf16[4,128,512] {
  %p0 = bf16[4,128,512]{2,1,0} parameter(0)
  %p1 = bf16[128,512]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %row = bf16[1,128,512]{2,1,0} bitcast(%p1)
  ROOT %new = bf16[4,128,512]{2,1,0} dynamic-update-slice(%p0, %row, %p2, %zero, %zero)
}

%body (t: (s32[], f32[4,256,512], bf16[4,128,512], f8e4m3fn[128,256])) -> (s32[], f32[4,256,512], bf16[4,128,512], /*index=3*/f8e4m3fn[128,256]) {
  %t = (s32[], f32[4,256,512]{2,1,0}, bf16[4,128,512]{2,1,0}, /*index=3*/f8e4m3fn[128,256]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %w = f32[4,256,512]{2,1,0} get-tuple-element(%t), index=1
  %y = bf16[4,128,512]{2,1,0} get-tuple-element(%t), index=2
  %x = f8e4m3fn[128,256]{1,0} get-tuple-element(%t), index=3
  %q = f8e4m3fn[256,512]{1,0} fusion(%w, %i), kind=kLoop, calls=%fused_slice, metadata={op_name="jit(step)/while/body/layer/convert"}
  %all = f8e4m3fn[256,512]{1,0} all-gather(%q), replica_groups={{0,1}}, dimensions={0}
  %s = f32[] constant(1)
  %mm = (bf16[128,512]{1,0}, s8[4194304]{0}) custom-call(%x, %all, %s, %s), custom_call_target="__cublas$lt$matmul$f8", metadata={op_name="jit(step)/while/body/layer/dot_general"}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %out = bf16[128,512]{1,0} get-tuple-element(%mm), index=0
  %new = bf16[4,128,512]{2,1,0} fusion(%y, %out, %i), kind=kLoop, calls=%fused_update
  ROOT %r = (s32[], f32[4,256,512]{2,1,0}, bf16[4,128,512]{2,1,0}, f8e4m3fn[128,256]{1,0}) tuple(%i, %w, %new, %x)
}

%condition (t.1: (s32[], f32[4,256,512], bf16[4,128,512], f8e4m3fn[128,256])) -> pred[] {
  %t.1 = (s32[], f32[4,256,512]{2,1,0}, bf16[4,128,512]{2,1,0}, f8e4m3fn[128,256]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%t.1), index=0
  %n = s32[] constant(4)
  ROOT %less = pred[] compare(%i.1, %n), direction=LT
}

ENTRY %main (a: (s32[], f32[4,256,512], bf16[4,128,512], f8e4m3fn[128,256])) -> f32[256,512] {
  %a = (s32[], f32[4,256,512]{2,1,0}, bf16[4,128,512]{2,1,0}, f8e4m3fn[128,256]{1,0}) parameter(0)
  %loop = (s32[], f32[4,256,512]{2,1,0}, bf16[4,128,512]{2,1,0}, f8e4m3fn[128,256]{1,0}) while(%a), condition=%condition, body=%bodyTRIPS
  %w.1 = bf16[4,128,512]{2,1,0} get-tuple-element(%loop), index=2
  %copy = bf16[4,128,512]{1,2,0} copy(%w.1)
  %start = (bf16[4,64,512]{2,1,0}, bf16[4,128,512]{2,1,0}) all-gather-start(%cut), replica_groups={{0,1}}, dimensions={1}
  %cut = bf16[4,64,512]{2,1,0} parameter(1)
  ROOT %done = bf16[4,128,512]{2,1,0} all-gather-done(%start)
}
"""

TPU = """HloModule jit_step

%fused (p0: bf16[16,128,8,32], p1: bf16[8,32,128,1]) -> f32[16,128,128,1] {
  %p0 = bf16[16,128,8,32]{3,1,2,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[8,32,128,1]{1,2,0,3:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %c = f32[16,128,128,1]{2,1,0,3:T(8,128)} convolution(%p0, %p1), window={size=8}, dim_labels=bfi0_0io1->bf10, metadata={op_name="jit(step)/out/dot_general"}
}

ENTRY %main (a: bf16[16,128,8,32], b: bf16[8,32,128,1]) -> f32[16,128,128,1] {
  %a = bf16[16,128,8,32]{3,1,2,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[8,32,128,1]{1,2,0,3:T(8,128)(2,1)} parameter(1)
  ROOT %f = f32[16,128,128,1]{2,1,0,3:T(8,128)} fusion(%a, %b), kind=kOutput, calls=%fused
}
"""

REDUCE_SCATTER = """HloModule jit_step

%all-reduce-scatter.2 (input_0: bf16[1024,1024], input_1: bf16[1024,1024]) -> (bf16[1024,256], bf16[256,1024]) {
  %input_0 = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %input_1 = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %all-reduce.6 = (bf16[1024,1024]{1,0:T(8,128)(2,1)}, bf16[1024,1024]{1,0:T(8,128)(2,1)}) all-reduce(%input_0, %input_1), channel_id=1, replica_groups={{0,1,2,3}}, use_global_device_ids=true, to_apply=%add
  %get-tuple-element.2 = bf16[1024,1024]{1,0:T(8,128)(2,1)} get-tuple-element(%all-reduce.6), index=0
  %zero = u32[] constant(0)
  %partition-id.5 = u32[] partition-id()
  %dynamic-slice.8 = bf16[1024,256]{1,0:T(8,128)(2,1)S(1)} dynamic-slice(%get-tuple-element.2, %zero, %partition-id.5), dynamic_slice_sizes={1024,256}
  %get-tuple-element.3 = bf16[1024,1024]{1,0:T(8,128)(2,1)} get-tuple-element(%all-reduce.6), index=1
  %dynamic-slice.9 = bf16[256,1024]{1,0:T(8,128)(2,1)S(1)} dynamic-slice(%get-tuple-element.3, %partition-id.5, %zero), dynamic_slice_sizes={256,1024}
  ROOT %tuple.4 = (bf16[1024,256]{1,0:T(8,128)(2,1)S(1)}, bf16[256,1024]{1,0:T(8,128)(2,1)S(1)}) tuple(%dynamic-slice.8, %dynamic-slice.9)
}

ENTRY %main (a: bf16[1024,1024], b: bf16[1024,1024]) -> (bf16[1024,256], bf16[256,1024]) {
  %a = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %b = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %fusion.11 = (bf16[1024,256]{1,0:T(8,128)(2,1)S(1)}, bf16[256,1024]{1,0:T(8,128)(2,1)S(1)}) fusion(%a, %b), kind=kCustom, calls=%all-reduce-scatter.2, metadata={op_name="jit(step)/transpose(jvp())/dot_general"}
}
"""

TRACED = """HloModule jit_step

_forward.1 {
  x.1 = f8e5m2[16,32]{1,0} parameter(0)
  y.1 = f8e5m2[32,8]{1,0} parameter(1)
  ROOT dot.1 = bf16[16,8]{1,0} dot(x.1, y.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="dot_general"}
}

ENTRY main.2 {
  x.2 = f8e5m2[16,32]{1,0} parameter(0)
  y.2 = f8e5m2[32,8]{1,0} parameter(1)
  ROOT call.1 = bf16[16,8]{1,0} call(x.2, y.2), to_apply=_forward.1, metadata={op_name="jit(step)/jvp(M)/layer/jit(_forward)"}
}
"""

FELL_BACK = """HloModule jit_step

ENTRY %main.2 (x: f16[16,32], y: f16[32,8]) -> bf16[16,8] {
  %x = f16[16,32]{1,0} parameter(0)
  %y = f16[32,8]{1,0} parameter(1)
  ROOT %d = bf16[16,8]{1,0} custom-call(%x, %y), custom_call_target="__cublas$gemm", metadata={op_name="jit(step)/jvp(M)/layer/jit(_forward)/dot_general"}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
}
"""

KNOWN_TRIPS = ', backend_config={"known_trip_count":{"n":"4"}}'


@pytest.mark.parametrize("trips", [KNOWN_TRIPS, ""], ids=["the compiler's count", "the counter's limit"])
def test_a_loop_counts_as_often_as_it_runs(trips):
    program = read_program(GPU.replace("TRIPS", trips))
    assert program.count() == {"f8e4m3fn": 4}
    (matmul,) = program.matmuls
    path = "jit(step)/while/body/layer/dot_general"
    assert (matmul.flops, matmul.times, matmul.path) == (2 * 128 * 256 * 512, 4, path)
    found = {(each.kind, each.dtype): (each.times, each.bytes) for each in program.collectives}
    assert found == {("all-gather", "f8e4m3fn"): (4, 256 * 512), ("all-gather", "bf16"): (1, 2 * 4 * 128 * 512)}


def test_moves_count_slices_and_updates_not_what_they_are_taken_from():
    program = read_program(GPU.replace("TRIPS", KNOWN_TRIPS))
    sizes = {move.kind: (move.bytes, move.times) for move in program.moves if move.kind == "copy"}
    assert sizes == {"copy": (2 * 2 * 4 * 128 * 512, 1)}
    quantize, update = (move.bytes for move in program.moves if move.kind == "fusion")
    # one of four layers in float32, the counter, the quantized layer out
    assert quantize == 4 * 256 * 512 + 4 + 256 * 512
    # one row is read and written, the counter is read; the stack is not copied
    assert update == 2 * 2 * 128 * 512 + 4
    assert program.moved == 4 * (quantize + update) + sizes["copy"][0]
    assert program.big_moves == 1


def test_a_tpu_matmul_is_a_convolution_in_a_fusion():
    program = read_program(TPU)
    assert program.count() == {"bf16": 1}
    assert not program.moves
    assert program.matmuls[0].path == "jit(step)/out/dot_general"


def test_a_tpu_reduce_scatter_is_an_all_reduce_in_a_fusion_that_keeps_a_slice():
    program = read_program(REDUCE_SCATTER)
    path = "jit(step)/transpose(jvp())/dot_general"
    assert program.collectives == [Collective("reduce-scatter", "bf16", 2 * 2 * 1024 * 1024, path, 1)]
    assert not program.moves
    whole = REDUCE_SCATTER.replace("tuple(%dynamic-slice.8,", "tuple(%get-tuple-element.2,")
    assert [each.kind for each in read_program(whole).collectives] == ["all-reduce"]


VMEM = """HloModule jit_step

%fused (p0: bf16[1024,1024], p1: f32[1024,1024]) -> (f32[1024,1024], f32[1024]) {
  %p0 = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %p1 = f32[1024,1024]{1,0:T(8,128)} parameter(1)
  %wide = f32[1024,1024]{1,0:T(8,128)} convert(%p0)
  %sum = f32[1024,1024]{1,0:T(8,128)} add(%wide, %p1)
  %row = f32[1024]{0:T(1024)S(1)} slice(%sum), slice={[0:1], [0:1024]}
  ROOT %both = (f32[1024,1024]{1,0:T(8,128)}, f32[1024]{0:T(1024)S(1)}) tuple(%sum, %row)
}

ENTRY %main (a: bf16[4096,1024], b: f32[1024,1024]) -> f32[1024,1024] {
  %a = bf16[4096,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %b = f32[1024,1024]{1,0:T(8,128)} parameter(1)
  %slice-start = ((bf16[4096,1024]{1,0:T(8,128)(2,1)}), bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) slice-start(%a), slice={[0:1024], [0:1024]}
  %slice-done = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} slice-done(%slice-start)
  %copy-start = (f32[1024,1024]{1,0:T(8,128)S(1)}, f32[1024,1024]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%b)
  %copy-done = f32[1024,1024]{1,0:T(8,128)S(1)} copy-done(%copy-start)
  %sums = (f32[1024,1024]{1,0:T(8,128)}, f32[1024]{0:T(1024)S(1)}) fusion(%slice-done, %b), kind=kLoop, calls=%fused, backend_config={"window_config":{"estimated_cycles":"7000"}}
  %odd = f32[1024]{0:T(1024)} custom-call(%sums), custom_call_target="mystery", frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, metadata={op_name="jit(step)/odd"}
  ROOT %sum = f32[1024,1024]{1,0:T(8,128)} get-tuple-element(%sums), index=0
}
"""


def test_what_lies_in_vmem_is_no_traffic_and_a_prefetch_no_move():
    program = read_program(VMEM)
    assert program.prefetched == 2 * 1024 * 1024 + 4 * 1024 * 1024  # the slice, not the array that is sliced
    fusion, odd = program.moves
    assert (fusion.bytes, fusion.cycles) == (4 * 1024 * 1024 + 4 * 1024 * 1024, 7000)
    assert (odd.kind, odd.path) == ("mystery", "jit(step)/odd")  # the kernel's attributes span several lines
    assert program.unknown == ["mystery"]
    found = estimate(chip("v6e"), program)
    assert found.moves == pytest.approx(7000 / 1.75e9 + odd.bytes / 1.64e12)
    assert found.memory == pytest.approx((program.prefetched + fusion.bytes + odd.bytes) / 1.64e12)


CUDNN = """HloModule jit_step

ENTRY %main (q: bf16[2,4096,32,128], k: bf16[2,4096,8,128]) -> bf16[2,32,4096,128] {
  %q = bf16[2,4096,32,128]{3,2,1,0} parameter(0)
  %k = bf16[2,4096,8,128]{3,2,1,0} parameter(1)
  %f = (bf16[2,32,4096,128]{3,1,2,0}, f32[2,32,4096]{2,1,0}, u8[0]{0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmaxDIRECTION", backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["2", "32", "4096", "4096"], "layout": {}}, "mask_type": "MASK"}}
  ROOT %o = bf16[2,32,4096,128]{3,1,2,0} get-tuple-element(%f), index=0
}
"""


OWN = """HloModule jit_step

ENTRY %main (x: bf16[512,1024], w: s8[3,256,1024]) -> bf16[3,512,256] {
  %x = bf16[512,1024]{1,0} parameter(0)
  %w = s8[3,256,1024]{2,1,0} parameter(1)
  %quantized = (s8[3,512,1024]{2,1,0}, s32[1,1]{1,0}) custom-call(%x), custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/jaxquant_quantize/pallas_call"}
  %q = s8[3,512,1024]{2,1,0} get-tuple-element(%quantized), index=0
  ROOT %y = bf16[3,512,256]{2,1,0} custom-call(%q, %w), custom_call_target="TARGET", metadata={op_name="jit(step)/cond/jaxquant_fp8_einsum/pallas_call"}
}
"""


@pytest.mark.parametrize("target", ["tpu_custom_call", "mosaic_gpu_v2"])
def test_kernels_of_our_own_are_known_and_products_on_gpus_are_matmuls(target):
    program = read_program(OWN.replace("TARGET", target))
    assert not program.unknown
    cast, *products = program.kernels
    (product,) = products or program.matmuls
    assert isinstance(product, Matmul) == (target == "mosaic_gpu_v2")
    assert (cast.flops, cast.bytes) == (0, 2 * 512 * 1024 + 3 * 512 * 1024 + 4)
    dtype = product.dtypes if isinstance(product, Matmul) else product.dtype
    assert (dtype, product.flops) == ("s8", 2 * 3 * 512 * 256 * 1024)


@pytest.mark.parametrize(("direction", "mask", "matmuls"), [("", "NO_MASK", 2), ("Backward", "CAUSAL", 2.5)])
def test_attention_kernels_have_flops_and_a_causal_one_half_of_them(direction, mask, matmuls):
    program = read_program(CUDNN.replace("DIRECTION", direction).replace("MASK", mask))
    (kernel,) = program.kernels
    assert kernel.flops == matmuls * 2 * 2 * 32 * 4096 * 4096 * 128
    assert not program.unknown
    assert not program.moves
    assert estimate(chip("h200"), program).matmul == pytest.approx(kernel.flops / 989e12 / 0.717)


def collective(kind, size, groups):
    return Collective(kind, "bf16", size, "", 1, links.first_group(groups))


def test_collectives_are_priced_one_way_by_kind_and_by_whose_links_they_take():
    h200, v6e = chip("h200"), chip("v6e")
    inside, across = "replica_groups={{0,1,2,3,4,5,6,7}}", "replica_groups=[1,64]<=[64]"
    gather = links.duration(h200, collective("all-gather", 8e9, inside), 64)
    assert gather == pytest.approx(7e9 / 450e9)
    assert links.duration(h200, collective("all-reduce", 8e9, inside), 64) == pytest.approx(2 * gather)
    # With 8 domains, each card fetches one eighth of the data of the seven other domains.
    wide = links.duration(h200, collective("all-gather", 8e9, across), 64)
    assert wide == pytest.approx(max(8e9 * 7 / 8 / 8 / 50e9, 7e9 / 450e9))
    assert links.duration(v6e, collective("all-gather", 8e9, across), 64) == pytest.approx(8e9 * 63 / 64 / 224e9)
    assert links.first_group("replica_groups=[8,8]<=[8,8]T(1,0)") == (0, 8, 16, 24, 32, 40, 48, 56)
    assert links.first_group("source_target_pairs={{0,1},{7,8}}") == (0, 1)
    strided = links.duration(h200, collective("all-gather", 8e9, "replica_groups=[8,8]<=[8,8]T(1,0)"), 64)
    assert strided == pytest.approx(8e9 * 7 / 8 / 50e9)  # no other chip of the domain fetches a share
    assert links.duration(h200, collective("all-reduce", 8e9, ""), 1) == 0


def test_a_fallback_is_found_by_its_path():
    asked, emitted = read_program(TRACED, is_optimized=False), read_program(FELL_BACK)
    assert asked.count() == {"f8e5m2": 1}
    assert compare(asked, emitted) == Outcome({PATH: 1}, [f"{PATH}: f16"], [], [])
    assert compare(asked, asked).fell_back == []


PATH = "jit(step)/jvp(M)/layer/jit(_forward)/dot_general"


def audit_of(asked, emitted, size=8):
    """Return the audit that the worker makes from the HLO texts before and after compilation."""
    traced = SimpleNamespace(as_hlo_module=lambda: SimpleNamespace(to_string=lambda: asked))

    def compiled():
        if not emitted:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 40 GB needed")
        stats = ("argument", "output", "alias", "temp")
        memory = SimpleNamespace(generated_code_size_in_bytes=0, **{f"{name}_size_in_bytes": size for name in stats})
        return SimpleNamespace(as_text=lambda: emitted, memory_analysis=lambda: memory)

    lowered = SimpleNamespace(compiler_ir=lambda _: traced, compile=compiled)
    request = {"name": "step", "target": "h200", "topology": ""}
    return worker.compile_step(SimpleNamespace(lower=lambda: lowered), (), chip("h200"), 1, request)


def test_a_fallback_that_lost_its_path_is_not_taken_for_removed():
    found = audit_of(TRACED, FELL_BACK.replace(PATH, ""))
    assert found.outcome == Outcome({PATH: 1}, [f"{PATH}: probably fell back to f16"], [], [])
    assert report.verdict(found).startswith("FELL BACK: 1 of 1")


def test_what_was_removed_is_not_among_all():
    asked = read_program(TRACED, is_optimized=False)
    twin = TRACED.replace(
        "  ROOT call.1 =",
        "  call.2 = bf16[16,8]{1,0} call(x.2, y.2), to_apply=_forward.1, "
        'metadata={op_name="jit(step)/jvp(M)/twin/jit(_forward)"}\n  ROOT call.1 =',
    )
    eight = FELL_BACK.replace("f16[16,32]", "f8e5m2[16,32]").replace(" f16[32,8]", " f8e5m2[32,8]")
    found = audit_of(twin, eight)
    assert asked.count() == found.counts == {"f8e5m2": 1}
    assert report.verdict(found) == ("1 of 2 matmuls requested in 8 bits run in 8 bits: 1 unused and removed.")
    assert report.verdict(audit_of(TRACED, eight)) == "All 1 matmuls requested in 8 bits run in 8 bits."


def test_a_refused_step_shows_no_figures():
    found = audit_of(TRACED, "")
    assert not found.fits
    assert {found.counts, found.moved, found.moves, found.roofline} == {None}
    assert build(report.Audit, json.loads(found.to_json())) == found
    shown = found.to_markdown()
    assert "refuses this step: RESOURCE_EXHAUSTED" in shown
    assert "| peak memory | does not fit |" in shown
    assert "0.00" not in shown
    huge = audit_of(TRACED, FELL_BACK, 10**12)
    assert (huge.fits, "DOES NOT FIT" in str(huge)) == (False, True)
    made = audit_of(TRACED, FELL_BACK)
    made.unquantized = found  # compared with a refused step
    assert {row["unquantized"] for row in report.summary_rows(made)} == {"–", "does not fit", "0 s"}
    assert report.speedup(made) == ""


def test_layers_are_named_without_the_transformations():
    for path, name, kind in (
        ("jvp(Net)/Net/while/body/closed_call/mlp/wi/jit(_forward)", "Net/mlp/wi", "forward"),
        ("transpose(jvp(Net))/Net/while/body/checkpoint/rematted_computation/mlp", "Net/mlp", "recomputed"),
        ("jvp(Net)/while/body/Net.<lambda>/Net.layer/Net/mlp", "Net.layer/Net/mlp", "forward"),
    ):
        assert locate(f"jit(step)/{path}/dot_general") == (name, kind)


WORK = 2 * 8192**3


def seconds(target, lhs, rhs):
    """Estimate the time of one large matmul with operands of these dtypes."""
    arrays = (hlo.Array(lhs, (8192, 8192)), hlo.Array(rhs, (8192, 8192)), hlo.Array("bf16", (8192, 8192)))
    matmul = Matmul(*arrays, "dot", "", 1, WORK)
    return estimate(dataclasses.replace(chip(target), shares={}), HloStep([matmul])).matmul


def test_matmuls_are_priced_at_the_rate_of_their_unit_and_of_bf16_where_there_is_none():
    assert seconds("b200", "f4e2m1fn", "f4e2m1fn") == WORK / 9000e12
    assert seconds("b200", "f4e2m1fn", "f8e4m3fn") == seconds("b200", "f8e4m3fn", "f8e4m3fn") == WORK / 4500e12
    for target in set(CHIPS) - {"b200"}:  # the compiler converts them to bf16
        bf16 = seconds(target, "bf16", "bf16")
        assert seconds(target, "f4e2m1fn", "f4e2m1fn") == seconds(target, "f4e2m1fn", "f8e4m3fn") == bf16
    assert seconds("h200", "s4", "s4") == seconds("h200", "s8", "s8") == WORK / 1979e12
    assert seconds("h200", "s32", "s32") == seconds("h200", "f32", "f32")


def test_every_chip_has_its_peaks_and_every_gpu_its_description():
    for name, each in CHIPS.items():
        assert set(each.peak) == {"bf16", "fp8", "fp4", "int8", "f32"}, name
        assert (each.platform == "cuda") == (each.gpu is not None)
    assert "major: 10" in gpu_target(chip("b200"))
