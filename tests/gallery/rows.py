"""The gallery: every string on every backend, in Linen, NNX and a plain function: two steps, converted, served.

A row has the results: digests of their bits (losses, gradients, quant state, converted leaves, served output), and the
losses as numbers, for machines on which the bits differ. A step without the matmuls of its string is an error. Except
for ``of_trace``, only public functions of jaxquant are called, so that a row can also be computed at another commit
(``python -m tests.gallery --against COMMIT``).

Digests that were changed on purpose since 8e3721d:

- ``int8w``, ``int4w`` and ``intmp`` on native: the scales of a weight-only recipe multiply the product. Before, they
  multiplied the weight.
- The plain function with strings that have tiles: its ragged matmul is quantized. Before, it stayed in float.
- ``int8`` and ``int8_delayed`` everywhere, from the first gradient on: stochastic rounding uses another hash.
- The plain function with ``int4`` and ``fp4`` on Qwix: it has digests, because it compiles now.
- The plain function on Qwix: its ragged matmul is float there. The bits are those of a rule that excludes this matmul.

Every row names its backend. ``quant_backend: auto`` therefore has no row: it selects the native backend, or AQT for
``aqt_fp8`` and ``aqt_fp8_full``. Until 8a9d4c7 it selected AQT for ``int8`` and ``intmp``, and Qwix for ``int4``,
``fp4``, ``fp8_full``, ``fp8_e4m3`` and ``fp8_e5m2``.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxquant
from jaxquant import state
from jaxquant.audit.coverage import of_trace
from tests.gallery import models
from tests.states import nested

FACES = ("linen", "nnx", "function")
STEPS, RATE = 2, 2.0**-6
Row = dict[str, Any]
DIGESTS = Path(__file__).with_name("digests.json")
_FILE = str(Path(__file__).parents[2] / "configs/intmp/int8_weight_only.json")


def schemes() -> Iterator[tuple[str, str]]:
    """Yield every (string, backend); of the strings that share a row of the table, only one."""
    seen: set[int] = set()
    for string, row in jaxquant.RECIPES.items():
        if string and id(row) not in seen:
            seen.add(id(row))
            yield from ((string, backend) for backend in ("aqt", "qwix", "native") if backend in row.backends)


def names() -> list[str]:
    """Return the name of every row: string, backend, face."""
    return [f"{string} {backend} {face}" for string, backend in schemes() for face in FACES]


LIBRARIES = ("int8 aqt", "int8 qwix", "fp8_e4m3 qwix", "fp4 qwix", "aqt_fp8 aqt", "aqt_fp8_full aqt")
"""Rows of AQT and Qwix that the suite runs: integers, floats, 4 bits, and the strings named after AQT."""


def suite() -> list[str]:
    """Return the rows that the suite runs: each string with one of the three frameworks, in turn.

    A string runs on the native backend, unless it is named after AQT; ``LIBRARIES`` are in addition.
    """
    kept = []
    for place, name in enumerate(names()):
        string, backend, _ = name.split()
        is_native = backend == "native" and not string.startswith("aqt")
        if place % 3 == place // 3 % 3 and (is_native or f"{string} {backend}" in LIBRARIES):
            kept.append(name)
    return kept


def environment() -> str:
    """Return the name of the environment on which bits depend: jax's version and the CPU's vector instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line.split(":")[1].split() for line in lines if line.startswith(("flags", "Features"))), [])
    vector = "+".join(sorted(flag for flag in flags if flag.startswith(("avx", "fma", "amx", "sve", "asimd"))))
    return f"jax {jax.__version__} {platform.machine()} {hashlib.sha256(vector.encode()).hexdigest()[:8]}"


def row(name: str) -> Row:
    """Compute a row."""
    string, backend, face = name.split()
    config = {"quantization": string, "quant_backend": backend}
    if string == "intmp":
        config["quant_cfg_path"] = _FILE
    return _RUN[face](config)


def attempt(name: str) -> Row:
    """Compute a row. If a backend or XLA does not support it, the row is the text of the error."""
    try:
        return row(name)
    except (NotImplementedError, ValueError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    except jax.errors.JaxRuntimeError as error:
        if "custom element sizes" not in str(error):
            raise
        return {"refused": "XLA has no product of 4-bit matrices on CPUs"}


def committed() -> dict[str, Row] | None:
    """Return the committed rows of this environment, or None if it has no rows."""
    return every_environment().get(environment())


def every_environment() -> dict[str, dict[str, Row]]:
    """Return the committed rows by environment."""
    return json.loads(DIGESTS.read_text())


def write(found: dict[str, Row]) -> None:
    """Write the rows of this environment."""
    known = every_environment()
    known[environment()] = {**known.get(environment(), {}), **found}
    DIGESTS.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")


def _linen(config: Any) -> Row:
    model = jaxquant.maybe_quantize_model(models.Linen(), config, X)
    shapes, quant = state.split(jax.eval_shape(model.init, KEYS, X))
    params, quant = filled(shapes), unseen(quant)

    def apply(params: Any, quant: Any, key: Any) -> jax.Array:
        return model.apply(state.merge(params, quant), X, rngs={"quant": key})

    found, params, quant = _train(apply, params, quant)
    trained = jax.jit(apply)(params, quant, LAST)
    converted = jaxquant.convert(models.Linen(), state.merge(params, quant), config, X)
    serving = jaxquant.maybe_quantize_model(models.Linen(), {**config, "checkpoint_is_quantized": True}, X)
    served = jax.jit(lambda v: serving.apply(v, X, rngs={"quant": LAST}))(converted)
    return found | _served(converted["params"], served, trained)


def _nnx(config: Any) -> Row:
    model = nnx.eval_shape(lambda: models.Nnx(nnx.Rngs(0)))
    nnx.update(model, filled(nnx.to_pure_dict(nnx.state(model, nnx.Param))))
    model = jaxquant.maybe_quantize_model(model, config, X)
    graph, params, quant, rest = nnx.split(model, nnx.Param, state.QuantState, ...)

    def apply(params: Any, quant: Any, _: Any) -> jax.Array:
        with state.by_hand():
            return nnx.merge(graph, params, quant, rest)(X)

    found, params, quant = _train(apply, params, quant)
    trained = jax.jit(apply)(params, quant, None)
    nnx.update(model, params, quant)
    converted = jaxquant.convert(model, config, X)
    served = nnx.jit(lambda model: model(X))(converted)
    return found | _served(jaxquant.serving.nnx_params(converted), served, trained)


def _function(config: Any) -> Row:
    fn = jaxquant.quantize(models.function, config)
    params = filled(models.function_params())
    quant = fn.init(params, X)

    def apply(params: Any, quant: Any, key: Any) -> jax.Array:
        return fn(params, quant, X, key=key)

    found, params, quant = _train(apply, params, quant)
    trained = jax.jit(apply)(params, quant, LAST)
    converted = fn.convert(params, quant, X)
    return found | _served(converted, jax.jit(apply)(converted, {}, LAST), trained)


_RUN: dict[str, Callable[[Any], Row]] = {"linen": _linen, "nnx": _nnx, "function": _function}
X = jax.random.normal(jax.random.key(0), (models.ROWS, models.LENGTH, models.D), models.LOW)
KEYS = {"params": jax.random.key(1), "quant": jax.random.key(2)}
LAST = jax.random.key(9)


def _train(apply: Any, params: Any, quant: Any) -> tuple[Row, Any, Any]:
    """Check the coverage of a training step and run it; return the row so far, parameters and quant state."""

    @jax.jit
    def step(params: Any, quant: Any, key: jax.Array) -> Any:
        def loss(params: Any, quant: Any) -> jax.Array:
            return jnp.mean(jnp.square(apply(params, quant, key).astype(jnp.float32) - 1))

        value, (grads, seen) = jax.value_and_grad(loss, argnums=(0, 1))(params, quant)
        old, seen = (nnx.to_pure_dict(t) if isinstance(t, nnx.State) else t for t in (quant, seen))
        new = state.update(old, seen) if old else old
        if isinstance(quant, nnx.State):
            nnx.replace_by_pure_dict(quant, new)
            new = quant
        return value, grads, jax.tree.map(lambda p, g: p - RATE * g, params, grads), new

    traced = step.trace(params, quant, LAST)  # once for coverage and the compiler: tracing is a third of a row's time
    _check(of_trace(traced))
    step = traced.lower().compile()
    losses, gradients = [], []
    for i in range(STEPS):
        value, grads, params, quant = step(params, quant, jax.random.key(i))
        losses.append(float(value))
        gradients.append(digest(grads))
    return {"losses": losses, "gradients": gradients, "state": digest(nested(quant))}, params, quant


def _check(found: Any) -> None:
    assert any(row.expected or row.dtypes.rhs.is_quantized for row in found.rows)
    try:
        found.check()
    except ValueError as error:
        raise AssertionError(str(error)) from error  # no row that is an error


def _served(converted: Any, served: jax.Array, trained: jax.Array) -> Row:
    same = bool(np.array_equal(np.asarray(served, np.float32), np.asarray(trained, np.float32)))
    return {"converted": digest(converted), "served": digest(served), "served as trained": same}


def filled(shapes: Any) -> Any:
    """Return random normal parameters of these shapes, different for each leaf and the same on every machine."""
    leaves, tree = jax.tree.flatten(shapes)
    rng = np.random.default_rng(0)
    made = [jnp.asarray(rng.normal(size=leaf.shape) / np.sqrt(models.D), leaf.dtype) for leaf in leaves]
    return jax.tree.unflatten(tree, made)


def unseen(quant: Any) -> Any:
    """Return quant state without observations, like ``init``, but without compiling ``init``."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.full(leaf.shape, path[-1].key == "scale", leaf.dtype), quant
    )


def digest(tree: Any) -> str:
    """Return sixteen hexadecimal digits of the SHA-256 of the paths, dtypes, shapes and bits of a tree's arrays."""
    found = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(tree):
        array = np.asarray(leaf)
        spelled = "/".join(str(getattr(part, "key", getattr(part, "name", part))) for part in path)
        found.update(f"{spelled} {array.dtype.name} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]
