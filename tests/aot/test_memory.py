"""Memory of a step by part, and the search for the largest batch; no compiler is needed."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxquant.aot import memory, report
from jaxquant.cli import main


class State(NamedTuple):
    params: Any
    opt_state: Any


def test_arguments_are_told_by_part_and_dtype_and_a_parameter():
    mesh = AbstractMesh((4,), ("fsdp",))

    def shape(dtype: Any, spec: P, *sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

    params = {"w": shape(jnp.bfloat16, P("fsdp"), 64, 32), "norm": shape(jnp.float32, P(), 32)}
    state = State(params, [shape(jnp.int8, P(None, "fsdp"), 64, 32), shape(jnp.int8, P(), 7)])
    given = (state, {"inputs": shape(jnp.int32, P("fsdp"), 8, 16)})
    names = memory.part_names(lambda state, batch: None, given)
    found = memory.part_rows(names, given, 4)
    assert {(row["part"], row["dtype"]): row["bytes"] for row in found} == {
        ("params", "bfloat16"): 2 * 16 * 32,
        ("params", "float32"): 4 * 32,
        ("opt_state", "int8"): 64 * 8 + 7,
        ("batch", "int32"): 4 * 2 * 16,
    }
    by_part = {(row["part"], row["dtype"]): row["bytes a parameter"] for row in found}
    assert by_part["params", "bfloat16"] == 4 * 1024 / (64 * 32 + 32)
    assert memory.part_names(lambda *arrays: None, (1, 2)) == ["arrays", "argument 2"]


def audit(peak: float, capacity: float) -> Any:
    """Return the fields of an audit that ``largest_batch`` reads."""
    found: Any = report.Audit.__new__(report.Audit)
    found.refusal, found.fits = "", peak <= capacity
    found.memory = {"peak": int(peak), "capacity": int(capacity)}
    return found


@pytest.mark.parametrize(("capacity", "curve"), [(99, lambda n: 100 + n), (117, lambda n: 95 + 5 * (n // 8))])
def test_the_largest_batch_is_the_last_that_fits(capacity: int, curve: Any, capsys: pytest.CaptureFixture[str]):
    asked = []

    def compiled(size: int) -> Any:
        asked.append(size)
        return audit(curve(size), capacity)

    wanted = max((size for size in range(8, 40_000, 8) if curve(size) <= capacity), default=0)
    size, rows = memory.largest_batch(compiled, 8)
    assert size == wanted
    assert [row["batch_size"] for row in rows] == asked
    assert len(set(asked)) == len(asked) <= 20
    assert f"batch_size {asked[-1]}: " in capsys.readouterr().err


def test_a_step_that_has_no_batch_size_and_a_unit_that_is_none_are_errors(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ValueError, match="the step ignores batch_size 16; use batch_size in --program"):
        memory.largest_batch(lambda size: audit(5, 10), 8)
    assert main(["audit", "configs/quickstart.yml", "--largest-batch", "0"]) == 2
    assert "'--largest-batch': 0 is not in the range x>=1" in capsys.readouterr().err
