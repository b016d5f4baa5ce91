"""Reinforcement learning with GRPO: a decoder learns to count, and its sampler is refitted at every step.

Every step compares the log-probabilities of the sampler and of the trainer, which run in different batch shapes.

python examples/grpo.py --log exact.jsonl
python examples/grpo.py --log standard.jsonl --numerics standard
python examples/grpo.py --log peers.jsonl --numerics standard --dtype bfloat16 --quantization "" --sampler fp8_e4m3
python examples/grpo.py --log untrained.jsonl --learning_rate 0
python examples/grpo.py --plot exact.jsonl standard.jsonl peers.jsonl
"""

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxquant
from jaxquant.bench.curves import Panel, draw
from jaxquant.training.config import TrainConfig
from jaxquant.training.generate import Sampling
from jaxquant.training.model import Decoder
from jaxquant.training.rollout import make_rollout, pad_prompts
from jaxquant.training.step import make_model, model_config

VOCAB, PROMPT, NEW, PROMPTS, GROUP = 10, 6, 8, 16, 8
SIZES = {"emb_dim": 64, "mlp_dim": 128, "num_layers": 2, "num_query_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def reward(tokens, is_new, lengths):
    """Return the share of new tokens that continue the prompt's count, modulo ten, before the first wrong one."""
    last = np.take_along_axis(tokens, lengths[:, None] - 1, axis=1)
    is_wrong = tokens != (last + 1 + np.arange(tokens.shape[1]) - lengths[:, None]) % VOCAB
    return (is_new & (np.cumsum(is_wrong & is_new, axis=1) == 0)).sum(1) / is_new.sum(1)


def train(steps, seed, numerics, dtype, quantization, sampler, learning_rate):
    """Yield a row of figures for each step; ``sampler`` is the config string of the sampler."""
    fields = {"vocab_size": VOCAB, "sequence_length": PROMPT + NEW, "numerics": numerics, "dtype": dtype, **SIZES}
    trained, served = (TrainConfig(quantization=string, **fields) for string in (quantization, sampler))
    converted = TrainConfig(quantization=sampler, checkpoint_is_quantized=bool(sampler), **fields)
    shape, example = model_config(trained, VOCAB), jnp.zeros((1, PROMPT + NEW), jnp.int32)
    model, optimizer = make_model(trained, shape, example), optax.adam(learning_rate)
    params, quant_state = jax.jit(model.init)(jax.random.key(seed))
    opt_state = optimizer.init(params)
    options = {"new_tokens": NEW, "sampling": Sampling(temperature=1.0, seed=seed), "end_tokens": ()}
    sample = make_rollout(make_model(converted, shape, example), shape, **options)

    @jax.jit
    def refit(params):  # quantizes the weights in the dtype of training, without a file
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        return jaxquant.convert(Decoder(shape), {"params": params}, served, example)["params"] if sampler else params

    def loss(params, texts, advantages):
        inputs, targets, is_new = texts.tokens[:, :-1], texts.tokens[:, 1:], texts.is_new[:, 1:]
        is_text = (jnp.arange(inputs.shape[1]) < texts.lengths[:, None]).astype(jnp.int32)
        rngs = {"quant": jax.random.key(0)}
        log_probs = -model.apply(params, quant_state, inputs, is_text, None, rngs=rngs, targets=targets)
        difference = log_probs - texts.log_probs[:, 1:]
        ratio = jnp.exp(difference)
        gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
        return -gain.mean(where=is_new), jnp.where(is_new, jnp.abs(difference), 0)

    @jax.jit
    def update(params, opt_state, texts, advantages):
        grads, difference = jax.grad(loss, has_aux=True)(params, texts, advantages)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, difference

    rng = np.random.default_rng(seed)
    for step in range(steps):
        start, weights = time.perf_counter(), refit(params)
        prompts = [rng.integers(VOCAB, size=rng.integers(1, PROMPT + 1)) for _ in range(PROMPTS)]
        padded, lengths = pad_prompts([prompt for prompt in prompts for _ in range(GROUP)], PROMPT)
        numbers = step * len(padded) + np.arange(len(padded), dtype=np.int32)
        # The sampler runs half of the trainer's batch at a time, without the trainer's two columns of padding.
        halves = np.split(np.arange(len(padded)), 2)
        parts = [sample(weights, {}, padded[half], lengths[half], numbers[half]) for half in halves]
        texts = jax.tree.map(lambda *parts: np.concatenate(parts), *parts)
        rewards = reward(texts.tokens, texts.is_new, lengths).reshape(PROMPTS, GROUP)
        advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-3)
        texts = jax.tree.map(lambda x: np.pad(x, ((0, 0), (0, 2))) if x.ndim == 2 else x, texts)
        params, opt_state, difference = update(params, opt_state, texts, advantages.reshape(-1, 1))
        figures = {"step": step, "reward": float(rewards.mean()), "max_difference": float(difference.max())}
        figures |= {"tokens_that_differ": int((difference != 0).sum()), "tokens": int(texts.is_new.sum())}
        yield figures | {"seconds": time.perf_counter() - start}


def main(
    log, steps=200, seed=0, numerics="exact", dtype="float32", quantization="int8", sampler=None, learning_rate=2e-3
):
    """Train, and write a line of figures per step to ``log``."""
    sampler = quantization if sampler is None else sampler
    rows = train(steps, seed, numerics, dtype, quantization, sampler, learning_rate)
    with Path(log).open("w") as file:
        for row in rows:
            print(json.dumps(row), file=file, flush=True)
            if row["step"] % 20 == 0 or row["step"] == steps - 1:
                print(", ".join(f"{name} {value:.3g}" for name, value in row.items()), flush=True)


def plot(logs, path):
    """Draw the rewards and the largest differences of several logs as SVG."""
    name = (lambda log: Path(log).stem) if len({Path(log).stem for log in logs}) == len(logs) else str
    rows = {name(log): [json.loads(line) for line in Path(log).read_text().splitlines()] for log in logs}
    panels = {"reward": "mean reward", "max_difference": "max |Δ log-probability|"}
    curves = {
        key: {name: [(row["step"] + 1, row[key]) for row in some] for name, some in rows.items()} for key in panels
    }
    drawn = [Panel(title, "step", curves[key], is_log=key != "reward") for key, title in panels.items()]
    Path(path).write_text(draw(drawn), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", nargs="+", metavar="LOG", help="draw logs to grpo.svg instead of training")
    parser.add_argument("--log", default="grpo.jsonl")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--numerics", default="exact", choices=("exact", "standard"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--quantization", default="int8", help="config string of the trainer, without delayed scaling")
    parser.add_argument("--sampler", help="config string of the sampler; by default, the trainer's")
    parser.add_argument("--learning_rate", type=float, default=2e-3, help="0 measures the untrained model")
    arguments = vars(parser.parse_args())
    logs = arguments.pop("plot")
    plot(logs, "grpo.svg") if logs else main(**arguments)
