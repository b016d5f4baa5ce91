"""Training step: loss, gradients, micro-batches and update; a step that is not finite leaves the state unchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxquant
from jaxquant import state as quantization_state
from jaxquant.audit.cost import saved_for_backward
from jaxquant.backends import RANDOM_STREAM
from jaxquant.config.backends import BACKENDS
from jaxquant.config.recipes import lookup
from jaxquant.core.sharding import on_device_of
from jaxquant.trace.report import Row
from jaxquant.training.attention import Kind, choose_attention
from jaxquant.training.config import DecoderOptions, TrainConfig
from jaxquant.training.layers import DecoderConfig
from jaxquant.training.model import Decoder
from jaxquant.training.numerics import Standard
from jaxquant.training.optimizer import learning_rate_schedule, make_optimizer
from jaxquant.training.sharding import BATCH, make_mesh, state_shardings
from jaxquant.training.tokenizer import Tokenizer, open_tokenizer

Batch = Mapping[str, Any]
"""``inputs``, ``targets``, ``segment_ids`` (0 is padding) and ``positions``, int32 [batch, sequence]."""


class TrainState(NamedTuple):
    """Model and optimizer part of a checkpoint; ``step`` is the number of updates made."""

    step: jax.Array
    params: Any
    opt_state: Any
    quant_state: Any


@dataclasses.dataclass(frozen=True)
class Model:
    """A quantized decoder.

    Attributes:
      init: function key -> (params, quant_state), nested dicts by module name.
      apply: function (params, quant_state, inputs, segment_ids, positions, rngs[, cache]) -> logits, or (logits, cache)
        with a cache. With ``targets``, ``apply`` returns the loss of each token, without storing all logits; see
        ``jaxquant.training.model.Decoder``.
      module: Linen module of ``apply``, for reading its intermediates.
      layers: report rows, one for each linear layer.
    """

    init: Callable[[jax.Array], tuple[Any, Any]]
    apply: Callable[..., Any]
    module: nn.Module
    layers: Sequence[Row]


def make_model(config: TrainConfig, shape: DecoderConfig, tokens: jax.Array) -> Model:
    """Build the decoder of a configuration and quantize it.

    With ``checkpoint_is_quantized``, the model uses converted parameters (``jaxquant.convert``) and has no ``init``.

    Args:
      config: configuration of the run.
      shape: shape and numerics of the decoder.
      tokens: example tokens of one micro-batch.

    Raises:
      ValueError, NotImplementedError: the quantization is not valid for the model.
    """
    module = jaxquant.maybe_quantize_model(Decoder(shape), config, tokens)
    layers = jaxquant.describe_layers(Decoder(shape), config, tokens)
    if shape.numerics == "exact":
        _check_batch_invariance(layers)
    backend = config.resolved_backend
    # Without the random stream, the native backend derives its noise from the bits of each gradient.
    streams = (RANDOM_STREAM,) if backend and BACKENDS[backend].needs_random_stream else ()

    def init(key: jax.Array) -> tuple[Any, Any]:
        return quantization_state.split(module.init({"params": key, RANDOM_STREAM: key}, tokens))

    def apply(params: Any, quant_state: Any, *inputs: jax.Array, rngs: Mapping[str, jax.Array], **given: Any) -> Any:
        variables = quantization_state.merge(params, quant_state)
        return module.apply(variables, *inputs, rngs={name: rngs[name] for name in streams}, **given)

    return Model(init, apply, module, layers)


def _check_batch_invariance(layers: Sequence[Row]) -> None:
    """Raise for a layer whose recipe is not batch invariant on the native backend."""
    for row in layers:
        if not row.is_float_matmul:  # the head or a router, by exact.dot
            continue
        if row.backend != "native" or not (recipe := lookup(row.recipe or "").recipe) or not recipe.is_batch_invariant:
            used = f"{row.recipe} on backend {row.backend}" if row.recipe else "no recipe"
            raise ValueError(
                f"numerics 'exact' requires a batch-invariant recipe for every layer, but {row.path} has {used}; use "
                "quantization int8 with quant_backend native, or numerics 'standard'"
            )


@dataclasses.dataclass(frozen=True)
class Program:
    """A model with its jitted functions.

    Attributes:
      config: configuration of the run, after ``with_global_shards``.
      init: function () -> TrainState.
      step: function (state, batch, healthy) -> (state, metrics) that donates the state. If ``healthy`` is False, or the
        loss or gradient norm of this step is not finite, the step returns the state unchanged, and
        ``metrics["healthy"]`` is False. If the update overflows, ``metrics["healthy"]`` is also False, but the returned
        state is not finite; later steps leave this state unchanged.
      evaluate: function (state, batch) -> (sum of the token losses, number of tokens).
      loss: function (params, quant_state, batch, key) -> mean loss; not jitted, for inspection.
    """

    config: TrainConfig
    mesh: Mesh
    model: Model
    abstract_state: TrainState
    init: Any
    step: Any
    evaluate: Any
    loss: Any

    @property
    def replicated(self) -> NamedSharding:
        """Sharding of fully replicated arrays."""
        return NamedSharding(self.mesh, PartitionSpec())


def model_config(config: TrainConfig, vocab_size: int, mesh: Mesh | None = None) -> DecoderConfig:
    """Return the decoder's shape from a training configuration.

    Raises:
      ValueError: ``vocab_size`` is set and smaller than the tokenizer's vocabulary.
    """
    rows = config.vocab_size or -(-vocab_size // 64) * 64
    if rows < vocab_size:
        fix = "use 0 for a new model, or the tokenizer of the imported model"
        raise ValueError(f"vocab_size {rows} is smaller than the tokenizer's {vocab_size} tokens; {fix}")
    sharding = NamedSharding(mesh, BATCH) if mesh is not None and mesh.size > 1 else None
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(DecoderOptions)}
    attention: Kind = "xla"
    if mesh is not None:
        platform = mesh.devices.flat[0].platform
        requested = "xla" if config.numerics == "exact" else config.attention
        attention = choose_attention(requested, platform, config, config.sequence_length, config.dtype)
    return DecoderConfig(**values | {"vocab_size": rows, "attention": attention}, activation_sharding=sharding)


def decoder_of(config: TrainConfig) -> tuple[Tokenizer, DecoderConfig, jax.Array]:
    """Return the tokenizer and the decoder's shape of a run, and one sequence of example tokens."""
    tokenizer = open_tokenizer(config.tokenizer_path)
    tokens = jnp.zeros((1, config.sequence_length), jnp.int32)
    return tokenizer, model_config(config, tokenizer.vocab_size), tokens


def sum_losses(losses: jax.Array, batch: Batch, math: Standard) -> tuple[jax.Array, jax.Array]:
    """Return the sum of the losses of all non-padding targets, and the number of these targets."""
    is_target = batch["segment_ids"] != 0
    weighted = losses * is_target.astype(jnp.float32)
    return math.sum(weighted.reshape(-1), 0), is_target.sum().astype(jnp.float32)


def _is_finite(tree: Any) -> jax.Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def _micro_batches(batch: Batch, k: int) -> dict[str, jax.Array]:
    """Split a batch into k micro-batches. The split is strided, so the batch axis keeps its sharding."""
    return {name: x.reshape(-1, k, *x.shape[1:]).swapaxes(0, 1) for name, x in batch.items()}


def example_inputs(config: TrainConfig) -> jax.Array:
    """Return example tokens with the shape of one micro-batch."""
    return jnp.zeros((config.batch_size // config.gradient_accumulation_steps, config.sequence_length), jnp.int32)


def build(config: TrainConfig, vocab_size: int, devices: Sequence[Any] | None = None) -> Program:
    """Build the model, quantization, optimizer and mesh of a run on ``devices``, or on all devices.

    Raises:
      ValueError: the mesh does not match the devices, ``vocab_size`` is smaller than the tokenizer's, or the
        quantization is not valid for the model.
      NotImplementedError: the backend does not support the model or an option.
    """
    mesh = make_mesh(config, devices)
    config = with_global_shards(config, mesh)
    tokens = example_inputs(config)
    decoder = model_config(config, vocab_size, mesh)
    model = make_model(config, decoder, tokens)
    optimizer = make_optimizer(config, mesh)
    schedule = learning_rate_schedule(config)
    key = jax.random.key(config.seed)

    def init() -> TrainState:
        params, quant_state = model.init(key)
        opt_state, params = optimizer.init(params), optax.tree.cast(params, config.weight_dtype)
        return TrainState(jnp.zeros((), jnp.int32), params, opt_state, quant_state)

    def total_loss(params: Any, quant_state: Any, batch: Batch, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        inputs = (batch["inputs"], batch["segment_ids"], batch["positions"])
        losses = model.apply(params, quant_state, *inputs, rngs={"quant": key}, targets=batch["targets"])
        return sum_losses(losses, batch, decoder.math)

    def loss(params: Any, quant_state: Any, batch: Batch, key: jax.Array) -> jax.Array:
        total, count = total_loss(params, quant_state, batch, key)
        return total / jnp.maximum(count, 1)

    def gradients(state: TrainState, batch: Batch, key: jax.Array) -> tuple[jax.Array, tuple[Any, Any]]:
        """Return the mean loss of the batch's tokens and its gradient, independent of the number of micro-batches."""
        k = config.gradient_accumulation_steps
        if k == 1:
            return jax.value_and_grad(loss, argnums=(0, 1))(state.params, state.quant_state, batch, key)
        count = jnp.maximum((batch["segment_ids"] != 0).sum().astype(jnp.float32), 1)

        def share(params: Any, quant_state: Any, micro_batch: Batch, key: jax.Array) -> jax.Array:
            return total_loss(params, quant_state, micro_batch, key)[0] / count

        def add(carry: Any, item: Any) -> tuple[Any, None]:
            (total, total_grads, total_observation), (micro_batch, index) = carry, item
            value, (grads, observation) = jax.value_and_grad(share, argnums=(0, 1))(
                state.params, state.quant_state, micro_batch, jax.random.fold_in(key, index)
            )
            grads = jax.tree.map(jnp.add, total_grads, grads)
            return (total + value, grads, quantization_state.accumulate(total_observation, observation)), None

        no_observation = quantization_state.no_observation(state.quant_state)
        start = (jnp.zeros(()), optax.tree.zeros_like(state.params, dtype=jnp.float32), no_observation)
        (value, grads, observation), _ = jax.lax.scan(add, start, (_micro_batches(batch, k), jnp.arange(k)))
        return value, (grads, observation)

    def step(state: TrainState, batch: Batch, healthy: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        value, (grads, state_grads) = gradients(state, batch, jax.random.fold_in(key, state.step))
        grads = optax.tree.cast(grads, jnp.float32)
        norm = optax.tree.norm(grads)
        changes = healthy & jnp.isfinite(value) & jnp.isfinite(norm)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        quant_state = quantization_state.update(state.quant_state, state_grads)
        updated = TrainState(state.step + 1, params, opt_state, quant_state)
        metrics = {
            "loss": value,
            "grad_norm": norm,
            "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
            "tokens": (batch["segment_ids"] != 0).sum(),
            # A non-finite update is reported, but does not select the old state, which would then have to stay in
            # memory. Moments need no check: they are finite if the gradients and their norm are.
            "healthy": changes & _is_finite((updated.params, updated.quant_state)),
        }
        chosen = (jnp.where(changes, *each) for each in zip(*map(jax.tree.leaves, (updated, state)), strict=True))
        # Not set by ``out_shardings``, whose tree would match only a state before ``state.warm``.
        placed = map(jax.lax.with_sharding_constraint, chosen, jax.tree.leaves(shardings))
        return jax.tree.unflatten(jax.tree.structure(state), [*placed]), metrics

    def evaluate(state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array]:
        # Evaluation also runs in micro-batches, so that evaluation fits in memory if training does.
        of_part = lambda micro: total_loss(state.params, state.quant_state, micro, key)  # noqa: E731
        parts = _micro_batches(batch, config.gradient_accumulation_steps)
        return jax.tree.map(jnp.sum, jax.lax.map(of_part, parts))

    batch_sharding, replicated = NamedSharding(mesh, BATCH), NamedSharding(mesh, PartitionSpec())
    with on_device_of(jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)):  # sets the axis of moments
        shapes: TrainState = jax.eval_shape(init)
    shardings = state_shardings(mesh, shapes)
    abstract = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    jitted_init = jax.jit(init, out_shardings=shardings)
    jitted_step = jax.jit(step, donate_argnums=0, in_shardings=(None, batch_sharding, replicated))
    jitted_evaluate = jax.jit(evaluate, in_shardings=(None, batch_sharding), out_shardings=replicated)
    return Program(config, mesh, model, abstract, jitted_init, jitted_step, jitted_evaluate, loss)


def with_global_shards(config: TrainConfig, mesh: Mesh) -> TrainConfig:
    """Resolve ``quantization_local_shard_count: -1`` from the mesh; its devices may belong to several processes.

    Each block of the weight gradient's contraction must be on one device, because integer sums must not be added across
    devices. The number of blocks is therefore the number of devices over which the batch is sharded. Qwix splits the
    sequence instead of the batch; for Qwix, -1 remains the size of the mesh.
    """
    reads = any("quantization_local_shard_count" in lookup(string).fields for string in config.strings)
    backend = config.resolved_backend
    if config.quantization_local_shard_count != -1 or not reads or not (backend and BACKENDS[backend].shards_batch):
        return config
    return dataclasses.replace(config, quantization_local_shard_count=mesh.shape["data"] * mesh.shape["fsdp"])


def check_step(program: Program, batch: Mapping[str, np.ndarray]) -> jax.stages.Traced:
    """Trace a training step without running the step, so that errors appear before the run folder is modified.

    The training steps reuse this trace from jax's cache.

    Raises:
      ValueError, NotImplementedError: raised by the quantized operations, forward or backward.
    """
    healthy = jax.ShapeDtypeStruct((), jnp.bool_, sharding=program.replicated)
    return program.step.trace(program.abstract_state, dict(batch), healthy)


def saved_activation_bytes(program: Program, batch: Mapping[str, np.ndarray]) -> int:
    """Return the bytes that the forward pass saves for the backward pass of one micro-batch, without parameters."""
    k = program.config.gradient_accumulation_steps
    small = {name: x[: x.shape[0] // k] for name, x in batch.items()}
    state = program.abstract_state
    key = jax.random.key(0)
    kept = saved_for_backward(lambda p, q: program.loss(p, q, small, key), state.params, state.quant_state)
    return sum(kept.values())
