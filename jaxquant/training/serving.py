"""Open what a training run left, to generate with it, and measure how well it serves beside what it was made of."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant import serving
from jaxquant.config.quant_config import KV_ELEMENTS, NO_KV_QUANT, QuantConfig
from jaxquant.core.paths import map_by_path, tree_bytes
from jaxquant.core.typed import build, to_mapping
from jaxquant.serving.kv_cache import quantization_of as cache_of
from jaxquant.training.config import TrainConfig
from jaxquant.training.conversion import converted_shapes, of_layers, open_parameters, quantization_of
from jaxquant.training.data import make_iterators
from jaxquant.training.generate import Engine, Prompt, Sampling
from jaxquant.training.model import DecoderConfig
from jaxquant.training.step import Model, decoder_of, make_model, token_losses
from jaxquant.training.sums import check_files
from jaxquant.training.tokenizer import Tokenizer

KV_CACHES = ("none", *KV_ELEMENTS)
"""Values of ``--kv-cache``; ``none`` keeps the cache in float."""


@dataclasses.dataclass(frozen=True)
class Served:
    """A model that is ready to be asked.

    Attributes:
      model: the decoder.
      params, quant_state: its parameters and quant state; what their leaves are is the model's business.
      tokenizer: of its texts.
      config: of the run, with the overrides.
      shape: of the decoder.
      step: of the checkpoint.
    """

    model: Model
    params: Any
    quant_state: Any
    tokenizer: Tokenizer
    config: TrainConfig
    shape: DecoderConfig
    step: int

    def engine(self, *, sampling: Sampling | None = None, max_length: int = 0, **options: Any) -> Engine:
        """Make an engine with the config's KV cache, of texts as long as in training if ``max_length`` is 0."""
        length, options = max_length or self.config.sequence_length, options | cache_of(self.config)
        options |= {"sampling": sampling, "end_token": self.tokenizer.eos}
        return Engine(self.model, self.params, self.quant_state, self.shape, max_length=length, **options)

    def prompts(self, texts: Sequence[str], names: Sequence[str]) -> list[Prompt]:
        """Encode texts; each gets the random stream of its place."""
        pairs = enumerate(zip(texts, names, strict=True))
        return [Prompt(self.tokenizer.encode_prompt(text), name, number) for number, (text, name) in pairs]


def open_served(directory: str | Path, overrides: Mapping[str, Any] | None = None) -> Served:
    """Open the newest checkpoint of a run's folder, or a converted one, and change nothing in it.

    Only parameters and quant state are read, onto the default device.

    Args:
      directory: the folder of a run, or one that ``python -m train convert`` wrote.
      overrides: config fields laid over the configuration of the checkpoint, such as ``quantize_kvcache``; of a
        converted checkpoint those of the KV cache alone.

    Raises:
      FileNotFoundError: the folder is not there.
      ValueError, TypeError: it is no run, has no checkpoint or one that does not fit, or an override that does not.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise FileNotFoundError(f"{directory} does not exist; give the folder of a run or a converted one")
    if not (folder / "config.yml").is_file():
        if (folder / "jaxquant.json").exists() or (folder / "model.safetensors").exists():
            return _open_converted(folder, overrides or {})
        raise ValueError(
            f"{directory} has neither config.yml nor jaxquant.json; give the folder of a run or a converted one"
        )
    stored = open_parameters(folder, say=lambda text: print(text, file=sys.stderr))
    config: TrainConfig = build(TrainConfig, to_mapping(stored.config) | dict(overrides or {}))
    tokenizer, shape, example = decoder_of(config)
    model = make_model(of_layers(config), shape, example)
    params, quant_state = jax.eval_shape(model.init, jax.random.key(0))

    def load(path: str, wanted: jax.ShapeDtypeStruct) -> jax.Array:
        found = stored.stores.get(path)
        if found is None or found.shape != wanted.shape:
            what = "none" if found is None else f"shape {found.shape}"
            lack = f"has no {path} of shape {wanted.shape}, got {what}"
            asked = f" with {', '.join(overrides)}" if overrides else ""
            raise ValueError(
                f"checkpoint {stored.step} of {folder} {lack}; that does not fit its own configuration{asked}"
            )
        return jnp.asarray(stored.read(path))

    found = map_by_path(load, {"params": params, "quant_state": quant_state})
    return Served(model, found["params"], found["quant_state"], tokenizer, config, shape, stored.step)


def _open_converted(folder: Path, overrides: Mapping[str, Any]) -> Served:
    """Open a folder that ``python -m train convert`` wrote; nothing but how it is served can be overridden."""
    others = sorted(set(overrides) - {*NO_KV_QUANT, "checkpoint_is_quantized", "save_quantized_params_path"})
    if others:
        raise ValueError(f"{others[0]} cannot be changed in the converted checkpoint {folder}; convert the run anew")
    manifest = serving.read_manifest(folder)
    if "train" not in manifest.extra:
        raise ValueError(f"{folder} holds no decoder of a training run; load it with jaxquant.serving.load")
    step, train = manifest.extra.get("step"), manifest.extra["train"]
    if type(step) is not int or not isinstance(train, Mapping):
        raise ValueError(f"{folder} holds no step and config of a training run; convert the run anew")
    if (folder / "tokenizer.json").is_file():
        train = {**train, "tokenizer_path": str(folder / "tokenizer.json")}
    config: TrainConfig = build(TrainConfig, {**train, **overrides})
    check_files(folder, train, manifest.extra.get("files", {}))
    tokenizer, shape, example = decoder_of(config)
    plain = of_layers(config)
    found = serving.load(folder, like=converted_shapes(plain, shape, example))
    model = make_model(plain, shape, example)
    return Served(model, found.params, {}, tokenizer, config, shape, step)


def contenders(run: str | Path, converted: Sequence[str | Path]) -> dict[str, Served]:
    """Open a run's checkpoint in float and as it was trained, and checkpoints that were converted from runs.

    Args:
      run: folder of the run.
      converted: folders of the checkpoints.

    Raises:
      FileNotFoundError, ValueError, TypeError: from ``open_served``; ``run`` is no run.
    """
    trained = open_served(run)
    if trained.config.checkpoint_is_quantized:
        raise ValueError(f"{run} is a converted checkpoint; give the run that it was made of first, and it after that")
    found = {"float": open_served(run, quantization_of(QuantConfig()))}
    if trained.config.strings:
        found["trained"] = trained
    return found | {f"served: {folder}": open_served(folder) for folder in converted}


def evaluate(models: Mapping[str, Served], *, batches: int | None = None) -> list[dict[str, Any]]:
    """Measure models on the held-out text of the first one's configuration.

    Args:
      models: by name; the first is the one that the others are compared with.
      batches: how many batches; None is the configuration's ``eval_batches``.

    Returns:
      A row a model: held-out loss in nats a token, its relative excess over the first's, the share of positions at
      which its likeliest next token is the first's, the largest difference of a logit from the first's and from the
      model before it, and the bytes of its parameters.

    Raises:
      ValueError: models of different vocabularies.
    """
    config = next(iter(models.values())).config
    sizes = {name: each.shape.vocab_size for name, each in models.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the models have different vocabularies: {', '.join(f'{n} {s}' for n, s in sizes.items())}")
    config = dataclasses.replace(config, eval_batches=batches or config.eval_batches)
    totals = [np.zeros(5) for _ in models]  # loss, tokens, positions in agreement, largest differences
    runs = [_program(each) for each in models.values()]
    for batch in make_iterators(config, config.batch_size).held_out():
        first = before = None
        for total, run, each in zip(totals, runs, models.values(), strict=True):
            loss, count, logits = run(each.params, each.quant_state, dict(batch))
            first = logits if first is None else first
            before = logits if before is None else before
            real = jnp.asarray(batch["segment_ids"] > 0)
            same = (logits.argmax(-1) == first.argmax(-1)) & real
            total[:3] += [float(loss), float(count), float(same.sum())]
            for place, other in ((3, first), (4, before)):
                difference = jnp.abs(jnp.where(real[..., None], logits - other, 0)).max()
                total[place] = np.maximum(total[place], float(difference))  # NaN stays NaN
            before = logits
    base = totals[0][0] / totals[0][1]
    return [
        {
            "model": name,
            "quantization": each.config.quantization or "none",
            "backend": each.config.resolved_backend or "–",
            "held-out loss": round(total[0] / total[1], 4),
            "gap": f"{100 * (total[0] / total[1] / base - 1):+.2f}%",
            "agreement": f"{100 * total[2] / total[1]:.2f}%",
            "max |Δ logit| to first": float(f"{total[3]:.3g}"),
            "to the one before": float(f"{total[4]:.3g}"),
            "MB": round(tree_bytes(each.params) / 1e6, 3),
        }
        for (name, each), total in zip(models.items(), totals, strict=True)
    ]


def _program(served: Served) -> Any:
    @jax.jit
    def run(params: Any, quant_state: Any, batch: Any) -> Any:
        inputs = (batch["inputs"], batch["segment_ids"], batch["positions"])
        logits = served.model.apply(params, quant_state, *inputs, rngs={"quant": jax.random.key(0)})
        return *token_losses(logits, batch), logits

    return run
