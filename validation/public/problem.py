"""Description of a public model: its parameters, loss, training data and training loop."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jaxquant

Batch = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A model and its training.

    Attributes:
      params: tree of float arrays.
      loss: function of (params, *batch).
      batches: batches that training cycles through; each is a tuple of arguments of the loss.
      face: function from a config to a training loop of the model that ``maybe_quantize_model`` returns, or None if
        ``maybe_quantize_model`` does not support the model.
    """

    params: Any
    loss: Callable[..., Any]
    batches: list[Batch]
    face: Callable[[dict[str, Any]], Loop] | None = None


@dataclasses.dataclass(frozen=True)
class Loop:
    """A training loop.

    Attributes:
      step: function of (carry, *batch) that returns (carry, loss).
      carry: initial carry, a tree of arrays.
    """

    step: Callable[..., tuple[Any, Any]]
    carry: Any


def functional(fn: Callable[..., Any], params: Any, state: Any) -> Loop:
    """Return the training loop of a function of (params, quant_state, *batch), with Adam.

    Args:
      fn: loss function.
      params: parameters of the model.
      state: quant state, or {}.
    """
    optimizer = optax.adam(1e-3)

    def step(carry: Any, *batch: Any) -> Any:
        params, state, opt_state = carry
        loss, (grads, seen) = jax.value_and_grad(fn, argnums=(0, 1), allow_int=True)(params, state, *batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        state = jaxquant.state.update(state, seen) if state else state
        return (optax.apply_updates(params, updates), state, opt_state), loss

    return Loop(step, (params, state, optimizer.init(params)))


def of_linen(
    model: Any, loss: Callable[..., Any], batches: list[Batch], *example: Any, params: Any = None, **rngs: Any
) -> Problem:
    """Return the problem of a Linen model.

    Args:
      model: Linen module.
      loss: function of (apply, *batch), where apply is the module's ``apply`` method with the variables bound.
      batches: arguments of the loss.
      example: arguments of the module's call.
      params: initial parameters, or None to create them.
      rngs: random streams of ``init``.
    """
    if params is None:
        params = jax.jit(lambda: model.init({"params": jax.random.key(0), **rngs}, *example))()["params"]

    def of_variables(model: Any, params: Any, state: Any, *batch: Any) -> Any:
        return loss(functools.partial(model.apply, jaxquant.state.merge(params, state)), *batch)

    def face(config: dict[str, Any]) -> Loop:
        quantized = jaxquant.maybe_quantize_model(model, config, *example)
        variables = jax.jit(lambda: quantized.init({"params": jax.random.key(0), **rngs}, *example))()
        _, state = jaxquant.state.split(variables)
        return functional(functools.partial(of_variables, quantized), params, state)

    return Problem(params, lambda params, *batch: of_variables(model, params, {}, *batch), batches, face)


def of_nnx(
    model: Any, call: Callable[..., Any], loss: Callable[..., Any], batches: list[Batch], *example: Any, **options: Any
) -> Problem:
    """Return the problem of an NNX model.

    Args:
      model: NNX module.
      call: function of (model, *batch).
      loss: function of (result, *batch).
      batches: arguments of both functions.
      example, options: arguments of the module's call.
    """
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def face(config: dict[str, Any]) -> Loop:
        quantized = jaxquant.maybe_quantize_model(nnx.merge(graph, params, rest), config, *example, **options)
        return of_nnx_model(quantized, lambda model, *batch: loss(call(model, *batch), *batch))

    return Problem(
        params, lambda params, *batch: loss(call(nnx.merge(graph, params, rest), *batch), *batch), batches, face
    )


def of_nnx_model(model: Any, loss: Callable[..., Any], wrt: Any = nnx.Param) -> Loop:
    """Return the training loop of a quantized NNX model, with ``nnx.Optimizer``.

    Args:
      model: result of ``maybe_quantize_model``.
      loss: function of (model, *batch).
      wrt: filter of the trained variables.
    """
    graph, carry = nnx.split((model, nnx.Optimizer(model, optax.adam(1e-3), wrt=wrt)))

    def step(carry: Any, *batch: Any) -> Any:
        model, optimizer = nnx.merge(graph, carry)
        value, grads = jaxquant.state.value_and_grad(lambda model: loss(model, *batch))(model)
        jaxquant.state.apply_gradients(model, optimizer, grads)
        return nnx.split((model, optimizer))[1], value

    return Loop(step, carry)


# -- data --------------------------------------------------------------------------------------------------------------


def tokens(vocab: int = 64, rows: int = 8, length: int = 24, count: int = 4) -> list[Any]:
    """Return batches of token sequences in which each token mostly determines the next token."""
    random, steps = np.random.default_rng(0), np.random.default_rng(1).integers(1, vocab, vocab)
    out = np.zeros((count, rows, length), np.int32)
    out[..., 0] = random.integers(1, vocab, (count, rows))
    for i in range(1, length):
        follows = 1 + (out[..., i - 1] + steps[out[..., i - 1]]) % (vocab - 1)
        out[..., i] = np.where(random.random((count, rows)) < 0.9, follows, random.integers(1, vocab, (count, rows)))
    return list(out)


def images(size: int = 16, classes: int = 10, rows: int = 16, count: int = 4) -> list[tuple[Any, Any]]:
    """Return batches of noisy images and their class labels."""
    random = np.random.default_rng(0)
    prototypes = random.normal(size=(classes, size, size, 3))
    labels = random.integers(0, classes, (count, rows))
    noise = random.normal(size=(count, rows, size, size, 3))
    return [(image.astype("float32"), label) for image, label in zip(prototypes[labels] + noise, labels, strict=True)]


def next_token(logits: Any, ids: Any) -> Any:
    """Return the mean cross-entropy of next-token predictions."""
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1].astype("float32"), ids[:, 1:]).mean()


def classes(logits: Any, labels: Any) -> Any:
    """Return the mean cross-entropy of class predictions."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
