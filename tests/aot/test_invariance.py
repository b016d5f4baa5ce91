"""Operations that depend on the batch, in programs that XLA:CPU compiled and in a short text of other compilers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant.aot import find_variant_operations
from jaxquant.cli import main
from jaxquant.training import audit

OPTIMIZED = None
ROOT = Path(__file__).parents[2]
CI_CONFIG = str(ROOT / "configs/models/ci.yml")
A, B, C = np.random.default_rng(1).standard_normal((3, 64, 96)).astype(np.float32)
LARGEST = float(jnp.finfo(jnp.float32).max)


def operations(function: Any, *args: Any) -> list[Any]:
    return find_variant_operations(jax.jit(function).lower(*args).compile())


def kinds(function: Any, *args: Any, is_forward: bool = True) -> set[str]:
    return {each.kind for each in operations(function, *args) if each.is_forward == is_forward}


def integers(x: Any) -> Any:
    return jnp.round(x * 2.0**10).astype(jnp.int32)


def power_of_two(x: Any) -> Any:
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jax.lax.bitcast_convert_type(((bits >> 23) & 0xFF) << 23, jnp.float32)


@pytest.mark.parametrize(
    ("kind", "function", "cured"),
    [
        ("sum", lambda x: x.sum(-1), lambda x: integers(x).sum(-1) * 2.0**-10),
        ("sum", lambda x: x.cumsum(-1), lambda x: integers(x).cumsum(-1)),
        ("sum", lambda x: x.prod(-1), lambda x: x.max(-1)),
        ("sum", lambda x: x.at[jnp.array([1, 1, 2])].add(x[:3]), lambda x: x.at[jnp.array([1, 1, 2])].max(x[:3])),
        ("matmul", lambda x: x @ x.T, lambda x: jnp.matmul(integers(x), integers(x).T)),
        ("exponential", jnp.exp, jnp.abs),
        ("rsqrt", jax.lax.rsqrt, jnp.sqrt),
        ("kernel", lambda x: jnp.linalg.qr(x)[0], lambda x: x / x.max(-1, keepdims=True)),
    ],
)
def test_every_kind_is_found_and_its_cure_is_not(kind, function, cured):
    assert kind in kinds(function, A)
    assert operations(cured, A) == []


HELD = {
    "plain": (lambda p, c: p + c, True),
    "negated": (lambda p, c: c - p, True),
    "moved": (lambda p, c: p[::-1].T + c.T, True),
    "masked": (lambda p, c: jnp.where(c > 0, p, 0) + 1.5, True),
    "of two masks": (lambda p, c: jnp.where(c > 0, p, -p) + c, True),
    "rounded to float32": (lambda p, c: jax.lax.reduce_precision(p, 8, 23) + c, True),
    "rounded to float16": (lambda p, c: jax.lax.reduce_precision(p, 5, 10) + c, False),
    "minimum": (lambda p, c: jnp.minimum(p, LARGEST) + c, False),
    "clamped": (lambda p, c: jax.lax.clamp(-LARGEST, p, LARGEST) + c, False),
    "selected": (lambda p, c: jnp.where(p > LARGEST, jnp.inf, p) + c, False),
    "selected, constant": (lambda p, c: jnp.where(p > LARGEST, jnp.inf, p) + 1.5, False),
}


@pytest.mark.parametrize("form", HELD)
def test_a_product_in_a_sum_is_listed_if_and_only_if_the_compiler_rounds_once(form):
    function, is_listed = HELD[form]
    assert (kinds(lambda a, b, c: function(a * b, c), A, B, C) == {"product in a sum"}) is is_listed
    assert operations(lambda a, c: function(a * 4, c), A, C) == []
    if np.any(jax.jit(lambda a, b, c: a * b + c)(A, B, C) != A * B + C):  # this CPU has fused multiply-add
        once = jax.jit(lambda a, b, c: function(a * b, c))(A, B, C)
        product = jax.jit(lambda a, b: a * b)(A, B)
        assert bool(np.any(once != jax.jit(function)(product, C))) is is_listed


def test_complex_products_are_sums_of_products():
    c64 = jax.lax.complex
    for function in (jnp.multiply, jnp.divide):
        assert kinds(lambda a, b, c, f=function: f(c64(a, b), c64(b, c)).real, A, B, C) >= {"product in a sum"}
    assert operations(lambda a, b, c: (c64(a, b) + c).real, A, B, C) == []


def test_a_runtime_power_of_two_is_exact_and_an_argument_is_not_known_to_be_one():
    assert operations(lambda a, b, c: a * power_of_two(b) + c, A, B, C) == []
    assert operations(lambda a, b, c: a * (1 / jnp.where(b > 0, power_of_two(b), 1.0)) + c, A, B, C) == []
    assert kinds(lambda a, b, c: a * (b * power_of_two(b)) + c, A, B, C) == {"product in a sum"}


def with_loop(rows: int) -> Any:
    def function(x: Any, y: Any) -> Any:
        return jax.lax.scan(lambda h, _: (jnp.sqrt(jnp.abs(h)) * y + x, None), x, None, 50)[0]

    return kinds(function, A[:rows, :8], B[:rows, :8])


def test_operations_in_loops_and_in_loops_that_are_one_function_are_found():
    assert with_loop(1) == with_loop(64) == {"product in a sum"}


def loss(w: Any, x: Any) -> Any:
    return (integers(jnp.abs(x) * w).sum() * 2.0**-10 + (x * w).max()) / 2


def test_operations_of_the_backward_pass_and_of_the_update_are_not_forward():
    def step(w: Any, x: Any, count: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(w, x)
        return w - gradient * 0.9**count * gradient.sum(), value, jnp.cos(count)

    assert kinds(step, A[0], B, 3.0) == set()
    assert {"sum", "power"} <= kinds(step, A[0], B, 3.0, is_forward=False)
    assert kinds(jax.value_and_grad(lambda w, x: (x * w).sum()), A[0], B) == {"sum"}
    assert kinds(jax.grad(lambda w, x: jnp.exp(x * w).sum()), A[0], B) != set()  # no other result


def test_a_rematerialized_forward_pass_is_part_of_the_backward_pass():
    def value(w: Any, x: Any) -> Any:
        return jnp.tanh(jnp.tanh(x @ w) @ w).max()

    args = A[:, :64], B[:, :64]
    plain, remat = (operations(jax.value_and_grad(f), *args) for f in (value, jax.checkpoint(value)))
    forward = [sum(each.count for each in found if each.is_forward) for found in (plain, remat)]
    assert forward[0] == forward[1] == 4
    assert sum(each.count for each in remat) > sum(each.count for each in plain)


TEXT = """HloModule step

%add (x: T[], y: T[]) -> T[] {
  %x = T[] parameter(0)
  %y = T[] parameter(1)
  ROOT %sum = T[] add(%x, %y)
}

%fused (p0: T[8,64], p1: T[64,16]) -> T[8,16] {
  %p0 = T[8,64]{1,0} parameter(0)
  %p1 = T[64,16]{1,0} parameter(1)
  ROOT %d = T[8,16]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: T[8,64], b: T[64,16]) -> (T[8,16], T[8,16], T[8,16], T[8,16], T[64,16]) {
  %a = T[8,64]{1,0} parameter(0)
  %b = T[64,16]{1,0} parameter(1)
  %gemm = (T[8,16]{1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul"
  %out = T[8,16]{1,0} get-tuple-element(%gemm), index=0
  %triton = T[8,16]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused, backend_config={"kind":"__triton_gemm"}
  %mosaic = T[8,16]{1,0} custom-call(%a, %b), custom_call_target="tpu_custom_call", metadata={op_name="own_kernel"}
  %renamed = T[8,16]{1,0} custom-call(%triton), custom_call_target="Sharding"
  %grad = T[64,16]{1,0} negate(%b), metadata={op_name="jit(step)/transpose(jvp())/neg"}
  %both = (T[8,16]{1,0}, T[64,16]{1,0}) all-reduce(%out, %grad), replica_groups={}, to_apply=%add
  %loss = T[8,16]{1,0} get-tuple-element(%both), index=0
  %reduced = T[64,16]{1,0} get-tuple-element(%both), index=1
  ROOT %t = (T[8,16]{1,0}, T[8,16]{1,0}, T[8,16]{1,0}, T[64,16]{1,0}) tuple(%loss, %renamed, %mosaic, %reduced)
}
"""


def test_library_calls_kernels_and_collectives_of_chips_are_read_from_text():
    found = find_variant_operations(TEXT.replace("T[", "f32["))
    assert {(each.kind, each.count, each.is_forward) for each in found} == {
        ("matmul", 2, True),
        ("kernel", 1, True),
        ("sum across devices", 1, True),
    }
    assert next(each.layer for each in found if each.kind == "kernel") == "own_kernel"
    assert find_variant_operations(TEXT.replace("T[", "s32[")) == []


OWN = """HloModule own

ENTRY %main (a: T[1,128,64], b: T[1,256,64], s: f32[1,128], t: f32[1,256]) -> f32[1,128,256] {
  %a = T[1,128,64]{2,1,0} parameter(0)
  %b = T[1,256,64]{2,1,0} parameter(1)
  %s = f32[1,128]{1,0} parameter(2)
  %t = f32[1,256]{1,0} parameter(3)
  ROOT %o = f32[1,128,256]{2,1,0} custom-call(%a, %b, %s, %t), custom_call_target="TARGET", metadata={op_name="PATH"}
}
"""


@pytest.mark.parametrize("target", ["mosaic_gpu_v2", "tpu_custom_call"])
def test_our_int8_kernel_adds_integers_and_other_kernels_may_not(target):
    def found(dtype: str, path: str = "wo/jaxquant_fp8_einsum/pallas_call") -> int:
        text = OWN.replace("T[", f"{dtype}[").replace("TARGET", target).replace("PATH", path)
        return len(find_variant_operations(text))

    assert found("s8") == 0
    assert found("f8e4m3fn") == found("s8", "wo/other_kernel/pallas_call") == 1


@pytest.mark.parametrize(
    ("target", "count"),
    [("__gpu$TopK", 0), ("__cub$DeviceRadixSort", 0), ("__gpu$xla.gpu.triton", 1), ("__gpu$xla.gpu.ptx", 1)],
)
def test_only_calls_that_move_or_sort_are_not_kernels(target, count):
    assert len(find_variant_operations(OWN.replace("T[", "f32[").replace("TARGET", target))) == count


GATHERED = """HloModule gathered

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main (a: f32[32]) -> f32[128] {
  %a = f32[32]{0} parameter(0)
  %fill = f32[] constant(0)
  %zeros = f32[128]{0} broadcast(%fill), dimensions={}
  %number = u32[] partition-id()
  %size = u32[] constant(32)
  %start = u32[] multiply(%number, %size)
  %own = f32[128]{0} dynamic-update-slice(%zeros, %a, %start)
  ROOT %all = f32[128]{0} all-reduce(%own), replica_groups={{0,1,2,3}}, to_apply=%add
}
"""


@pytest.mark.parametrize(
    ("old", "new", "count"),
    [
        ("", "", 0),
        ("constant(0)", "constant(1)", 1),
        ("multiply(%number", "multiply(%size", 1),
        ("(%own)", "(%zeros)", 1),
    ],
)
def test_a_sum_of_slices_in_zeros_is_a_gather(old, new, count):
    assert len(find_variant_operations(GATHERED.replace(old, new))) == count


MERGED = """HloModule merged

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main (a: f32[8,64]) -> (f32[8], f32[8,64]) {
  %a = f32[8,64]{1,0} parameter(0)
  %zero = f32[] constant(0), metadata={op_name="jit(step)/transpose(jvp())/mul"}
  %abs = f32[8,64]{1,0} abs(%a), metadata={op_name="jit(step)/transpose(jvp())/abs"}
  %exp = f32[8,64]{1,0} exponential(%abs), metadata={op_name="jit(step)/jvp()/exp"}
  %loss = f32[8]{0} reduce(%exp, %zero), dimensions={1}, to_apply=%add
  %grad = f32[8,64]{1,0} tanh(%exp), metadata={op_name="jit(step)/transpose(jvp())/tanh"}
  ROOT %t = (f32[8]{0}, f32[8,64]{1,0}) tuple(%loss, %grad)
}
"""


def test_an_instruction_that_both_passes_share_is_forward_under_either_name():
    found = {each.kind: each.is_forward for each in find_variant_operations(MERGED)}
    assert found == {"sum": True, "exponential": True, "tanh": False}


SMALL = """HloModule small

%product (p0: f32[8], p1: f32[8]) -> f32[8] {
  %p0 = f32[8]{0} parameter(0)
  %p1 = f32[8]{0} parameter(1)
  ROOT %m = f32[8]{0} multiply(%p0, %p1)
}

%sum (p0: f32[8], p1: f32[8]) -> f32[8] {
  %p0 = f32[8]{0} parameter(0)
  %p1 = f32[8]{0} parameter(1)
  ROOT %s = f32[8]{0} add(%p0, %p1)
}

%called (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %p = f32[8]{0} fusion(%a, %a), kind=kLoop, calls=%product
  ROOT %r = f32[8]{0} fusion(%p, %a), kind=kLoop, calls=%sum
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %r = f32[8]{0} call(%a), to_apply=%called, frontend_attributes={xla_cpu_small_call="true"}
}
"""


def test_a_product_of_another_fusion_is_joined_only_in_a_call_that_is_one_function():
    assert [each.kind for each in find_variant_operations(SMALL)] == ["product in a sum"]
    assert find_variant_operations(SMALL.replace("xla_cpu_small_call", "other")) == []


@pytest.mark.aot
@pytest.mark.parametrize("target", ["h200", "v6e"])
def test_the_audit_of_a_norm_for_a_chip_lists_its_sum(target):
    def norm(x: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6), integers(x).sum(-1)

    found = jaxquant.aot.audit(norm, jax.ShapeDtypeStruct((64, 512), jnp.float32), target=target).variant_operations
    assert {each.kind for each in found} == {"sum", "rsqrt"}
    assert all(each.is_forward for each in found)


def exact_step(config: str, overrides: Any, devices: Any) -> Any:
    return jax.jit(lambda x: integers(x).sum(-1)), (jnp.asarray(A),)


def float_step(config: str, overrides: Any, devices: Any) -> Any:
    return jax.jit(lambda x: x.sum(-1)), (jnp.asarray(A),)


def test_the_command_fails_if_a_forward_operation_depends_on_the_batch(tmp_path, capsys):
    words = ["audit", CI_CONFIG, "--invariant", "--target", "cpu", "--out", str(tmp_path)]
    assert main([*words, "--program", "tests.aot.test_invariance:exact_step"]) == 0
    assert main([*words, "--program", "tests.aot.test_invariance:float_step"]) == 1
    assert "exact.sum" in capsys.readouterr().out
    written = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert {name: [row["kind"] for row in rows] for name, rows in written.items()} == {
        "invariant-ci-exact_step-cpu.json": [],
        "invariant-ci-float_step-cpu.json": ["sum"] * len(written["invariant-ci-float_step-cpu.json"]),
    }
    assert main(["audit", CI_CONFIG, "--target", "cpu"]) == 2
    assert "--target cpu requires --invariant" in capsys.readouterr().err
    assert main([*words, "--largest-batch", "8"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [["quantization=int8", "quantize_kvcache=true"], ["quantization=fp8"]])
def test_programs_of_generation_are_built_without_a_checkpoint(overrides):
    for build, tokens in ((audit.prefill, (1,)), (audit.decode, (8,))):
        jitted, shapes = build(CI_CONFIG, overrides, jax.devices())
        chosen, cache = jax.eval_shape(jitted, *shapes)
        assert chosen.shape == tokens
        assert jax.tree.map(lambda x: x.shape, cache) == jax.tree.map(lambda x: x.shape, shapes[1])
