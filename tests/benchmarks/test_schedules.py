"""What is read from a TPU's schedule."""

import pytest

from benchmarks import schedules

BUNDLES = """
= control target key start
LB: loop body
PF: predicated region fallthrough
= control target key end

     0   :  { %s1 = inlined_call_operand.hbm [shape: s8[1024,1024]] }
   0x1   :  { %5 = vsyncpa [#allocation5], 0 } /* Start region 1 */
   0x2 LB: > { %s9 = sadd.s32 4294967295, %s8 } /* Start region 9 */
   0x3   : > { %p2 = scmp.ne.s32.totalorder %s9, 0  ;;  %12 = sbr.rel (%p2) target = $region44 }
   0x4   : > { %13 = vst [vmem:[#allocation2]] %v1 }
   0x5   : > { %14 = vst [vmem:[#allocation2 + $0x8]] %v1 }
   0x6 PF: > { %v2 = vmatmul.mubr.s8 %v3 }
   0x7 LB: >> { %v4 = vld [vmem:[%s3]] } /* Start region 12 */
   0x8   : >> { %p4 = scmp.ge.s32.totalorder %s5, 4 /* loop exit test */  ;;  %15 = sbr.rel (!%p4) target = $region12 }
   0x9   : > { %v6 = vmatmul.mubr.s8 %v3 } /* End region 12 */
   0xa   : > { %p5 = scmp.ge.s32.totalorder %s8, 34 /* loop exit test */ }
   0xb   : > { %16 = sbr.rel (!%p5) target = $region9 }
   0xc   :  { %17 = vsyncpa [#allocation5], 1 } /* End region 1 */
"""
SLOTS = """== CAPACTIY:
MXU, XLU, VLOAD:FILL, VSTORE:SPILL
    2     2     3     2
== UTILIZATION:
""" + "\n".join("2 0 1 0" if n == 6 else "1 1 0 2" if n == 9 else "0 0 0 0" for n in range(13))


@pytest.fixture
def dump(tmp_path):
    (tmp_path / "17-own_kernel.1-72-final_bundles.txt").write_text(BUNDLES)
    (tmp_path / "17-own_kernel.1-71-schedule-analysis_final_bundles.txt").write_text("something else")
    (tmp_path / "17-own_kernel.1-70-final_hlo-static-per-bundle-utilization.txt").write_text(SLOTS)
    return tmp_path


def test_loops_branches_and_slots_of_a_schedule(dump):
    found = schedules.read_schedule(dump, "own_kernel")
    places = [(each.loops, each.guards) for each in found.bundles]
    outside, loop, inner = [(0, 0)], [(1, 0)], [(2, 0)]
    assert places == outside * 2 + loop * 2 + [(1, 1)] * 2 + loop + inner * 2 + loop * 3 + outside
    assert found.turns == (32, 4)  # the outer loop is a pipeline of two stages more
    assert found.cycles == 3 + 32 * 8 + 32 * 4 * 2
    assert (found.count(1), found.count(1, range(1, 9))) == (8, 2)
    assert found.mxu_share == 3 / (2 * 4)
    assert found.fills_and_spills == (1, 2)
