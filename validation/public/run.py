"""Train and serve one public model with every recipe, and print a line of JSON for each recipe.

    python -m validation.public.run NAME NAME=FOLDER...

validation/public_models.py starts it in the environment that the model needs.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jaxquant
from validation.public import models
from validation.public.problem import Batch, Loop, Problem, functional

RECIPES = ("float", "fp8", "int8", "fp8_current", "fp8_full")
STEPS = 50


def train(loop: Loop, batches: list[Batch]) -> tuple[Any, list[float]]:
    """Run a training loop that cycles through the batches; return the last carry and the losses."""
    step, carry, losses = jax.jit(loop.step), loop.carry, []
    for i in range(STEPS):
        carry, loss = step(carry, *batches[i % len(batches)])
        losses.append(float(loss))
    return carry, losses


def row_of_float(problem: Problem) -> dict[str, Any]:
    """Train the float model and return its final loss."""
    loop = functional(lambda params, state, *batch: problem.loss(params, *batch), problem.params, {})
    return {"loss": _last(train(loop, problem.batches)[1], problem.batches)}


def row_of_function(problem: Problem, recipe: str) -> dict[str, Any]:
    """Train the result of ``jaxquant.quantize``; return matmuls, losses, state changes, and served bits."""
    params, batches = problem.params, problem.batches
    config = {"quantization": recipe, "quant_backend": "native"}
    fn = jaxquant.quantize(problem.loss, config)
    state = fn.init(params, *batches[0])
    report = fn.report(params, *batches[0])
    mine = [each for each in report if each.weight is not None or each.is_out_of_reach]
    loop = functional(fn, params, state)
    row = {
        "quantized": len(report.quantized),
        "all": len(mine),
        "why": [[each.path, each.reason] for each in mine if each.recipe is None],
        "layers": [each.path for each in report.quantized],
        **check(loop, batches[0], config),
    }
    (trained, state_after, _), losses = train(loop, batches)
    before, after = (_histories(tree) for tree in (state, state_after))
    return row | {
        "first": losses[0],
        "loss": _last(losses, batches),
        "histories": len(before),
        "advanced": sum(bool(np.any(after[key] != before[key])) for key in before),
        "served": serve(fn, trained, state_after, batches),
    }


def row_of_face(problem: Problem, recipe: str) -> dict[str, Any]:
    """Train the result of ``maybe_quantize_model`` in its framework's own training loop."""
    assert problem.face is not None
    config = {"quantization": recipe, "quant_backend": "native"}
    loop = problem.face(config)
    rows = jaxquant.coverage(loop.step, loop.carry, *problem.batches[0]).rows
    forward = [row for row in rows if row.matmul == "fwd" and row.has_parameter and not row.is_recomputed]
    return {
        "quantized": sum(row.is_low for row in forward),
        "all": len(forward),
        "float": sorted({row.path for row in forward if not row.is_low}),
        **check(loop, problem.batches[0], config),
        "loss": _last(train(loop, problem.batches)[1], problem.batches),
    }


def check(loop: Loop, batch: Batch, config: dict[str, Any]) -> dict[str, Any]:
    """Return the message of ``Coverage.check`` for a step, or "ok", and the share of its FLOPs in 8 bits."""
    found = jaxquant.coverage(loop.step, loop.carry, *batch, config=config)
    try:
        found.check()
    except ValueError as error:
        return {"check": str(error).split("; exclude the layer")[0], "share": found.share()}
    return {"check": "ok", "share": found.share()}


def serve(fn: Any, params: Any, state: Any, batches: list[Batch]) -> str:
    """Return whether converted parameters compute the same losses, and any warnings about layers that stay in float."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        converted = fn.convert(params, state, *batches[0])
    left = [str(each.message) for each in caught if "convert leaves the weights" in str(each.message)]
    run = jax.jit(fn)
    kept = state if left else {}  # quant state of unconverted layers
    pairs = [(float(run(params, state, *batch)), float(run(converted, kept, *batch))) for batch in batches]
    worst = max(abs(trained - served) for trained, served in pairs)
    return "; ".join(["same bits" if worst == 0 else f"differs by {worst:.2g}", *left])


def _histories(tree: Any) -> dict[str, Any]:
    rows = jaxquant.state.rows_of(tree).items()
    return {name: np.asarray(fields["amax_history"]) for name, fields in rows if "amax_history" in fields}


def _last(losses: list[float], batches: list[Batch]) -> float:
    return float(np.mean(losses[-len(batches) :]))


def _try(make: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    try:
        return make(*args)
    except Exception as error:  # a failure is a result in the table
        return {"error": f"{type(error).__name__}: {error}"[:600]}


def main(name: str, *checkouts: str) -> None:
    """Train one model with every recipe, as a function and as a model of its framework."""
    folders = dict(each.split("=", 1) for each in checkouts)

    def at(path: str) -> str:
        first, _, rest = path.partition("/")
        return str(pathlib.Path(folders[first], rest))

    problem = getattr(models, name)(at)

    for recipe in RECIPES:
        row = _try(row_of_float, problem) if recipe == "float" else _try(row_of_function, problem, recipe)
        if problem.face is not None and recipe != "float":
            row["face"] = _try(row_of_face, problem, recipe)
        row = {"model": name, "recipe": recipe, "seconds": round(time.process_time())} | row
        print("ROW " + json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
