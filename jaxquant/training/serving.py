"""Opening of runs and converted checkpoints for generation, and evaluation of converted models against their source."""

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
from jaxquant.training.conversion import converted_shapes, layer_config, open_parameters, quant_fields
from jaxquant.training.data import make_iterators
from jaxquant.training.generate import Engine, Prompt, Sampling
from jaxquant.training.layers import DecoderConfig
from jaxquant.training.step import Model, decoder_of, make_model, sum_losses
from jaxquant.training.sums import check_files, use_own_tokenizer
from jaxquant.training.tokenizer import Tokenizer

KV_CACHES = ("none", *KV_ELEMENTS)
"""Values of ``--kv-cache``; ``none`` keeps the cache in float."""


@dataclasses.dataclass(frozen=True)
class Served:
    """A model that is ready for inference.

    Attributes:
      model: decoder.
      params, quant_state: parameters and quant state of the model.
      tokenizer: tokenizer of the model.
      config: configuration of the run, with the overrides.
      shape: shape of the decoder.
      step: step of the checkpoint.
    """

    model: Model
    params: Any
    quant_state: Any
    tokenizer: Tokenizer
    config: TrainConfig
    shape: DecoderConfig
    step: int

    def engine(self, *, sampling: Sampling | None = None, max_length: int = 0, **options: Any) -> Engine:
        """Create an engine with the config's KV cache; ``max_length`` 0 selects the sequence length of training."""
        length, options = max_length or self.config.sequence_length, options | cache_of(self.config)
        options |= {"sampling": sampling, "end_tokens": self.tokenizer.ends}
        return Engine(self.model, self.params, self.quant_state, self.shape, max_length=length, **options)

    def prompts(self, texts: Sequence[str], names: Sequence[str]) -> list[Prompt]:
        """Encode texts; the index of a text selects its random stream."""
        pairs = enumerate(zip(texts, names, strict=True))
        return [Prompt(self.tokenizer.encode_prompt(text), name, number) for number, (text, name) in pairs]


def open_served(directory: str | Path, overrides: Mapping[str, Any] | None = None) -> Served:
    """Open the newest checkpoint of a run, or a converted checkpoint, without changing the folder.

    Only parameters and quant state are read, onto the default device.

    Args:
      directory: folder of a run or of a converted checkpoint.
      overrides: config fields that override the checkpoint's configuration, such as ``quantize_kvcache``; for a
        converted checkpoint, only fields of the KV cache.

    Raises:
      FileNotFoundError: the folder does not exist.
      ValueError, TypeError: the folder is not a run, no checkpoint matches its config, or an override is invalid.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise FileNotFoundError(f"{directory} is not a folder; pass the folder of a run or a converted checkpoint")
    if not (folder / "config.yml").is_file():
        if (folder / "jaxquant.json").exists() or (folder / "model.safetensors").exists():
            return _open_converted(folder, overrides or {})
        raise ValueError(f"{directory} has no config.yml or jaxquant.json; pass a run or a converted checkpoint")
    stored = open_parameters(folder, say=lambda text: print(text, file=sys.stderr))
    config: TrainConfig = build(TrainConfig, to_mapping(stored.config) | dict(overrides or {}))
    tokenizer, shape, example = decoder_of(config)
    model = make_model(layer_config(config), shape, example)
    params, quant_state = jax.eval_shape(model.init, jax.random.key(0))

    def load(path: str, wanted: jax.ShapeDtypeStruct) -> jax.Array:
        array = stored.stores.get(path)
        if array is None or array.shape != wanted.shape:
            actual = "none" if array is None else f"shape {array.shape}"
            problem = f"has no {path} of shape {wanted.shape}, got {actual}"
            overridden = f" with {', '.join(overrides)}" if overrides else ""
            raise ValueError(
                f"checkpoint {stored.step} of {folder} {problem}; its configuration requires this array{overridden}"
            )
        return jnp.asarray(stored.read(path))

    loaded = map_by_path(load, {"params": params, "quant_state": quant_state})
    return Served(model, loaded["params"], loaded["quant_state"], tokenizer, config, shape, stored.step)


def _open_converted(folder: Path, overrides: Mapping[str, Any]) -> Served:
    """Open a folder that ``jaxquant convert`` wrote; only fields of the KV cache can be overridden."""
    others = sorted(set(overrides) - {*NO_KV_QUANT, "checkpoint_is_quantized", "save_quantized_params_path"})
    if others:
        raise ValueError(f"{others[0]} cannot be changed in the converted checkpoint {folder}; convert the run again")
    manifest = serving.read_manifest(folder)
    if "train" not in manifest.extra:
        raise ValueError(f"{folder} has no decoder of a training run; load the folder with jaxquant.serving.load")
    step, train = manifest.extra.get("step"), manifest.extra["train"]
    if type(step) is not int or not isinstance(train, Mapping):
        raise ValueError(f"{folder} has no step and config of a training run; convert the run again")
    train = use_own_tokenizer(train, folder)
    config: TrainConfig = build(TrainConfig, {**train, **overrides})
    check_files(folder, train, manifest.extra.get("files", {}))
    tokenizer, shape, example = decoder_of(config)
    plain = layer_config(config)
    found = serving.load(folder, like=converted_shapes(plain, shape, example))
    model = make_model(plain, shape, example)
    return Served(model, found.params, {}, tokenizer, config, shape, step)


def open_contenders(run: str | Path, converted: Sequence[str | Path]) -> dict[str, Served]:
    """Open a run twice, in float and with its quantization, and open checkpoints that were converted from runs.

    Args:
      run: folder of the run.
      converted: folders of the converted checkpoints.

    Raises:
      FileNotFoundError, ValueError, TypeError: raised by ``open_served``, or ``run`` is a converted checkpoint.
    """
    trained = open_served(run)
    if trained.config.checkpoint_is_quantized:
        raise ValueError(f"{run} is a converted checkpoint; pass its run first, then the checkpoint")
    found = {"float": open_served(run, quant_fields(QuantConfig()))}
    if trained.config.strings:
        found["trained"] = trained
    return found | {f"served: {folder}": open_served(folder) for folder in converted}


def evaluate(models: Mapping[str, Served], *, batches: int | None = None) -> list[dict[str, Any]]:
    """Measure models on the held-out text of the first model's configuration.

    Args:
      models: models by name; all others are compared with the first model.
      batches: number of batches; None selects ``eval_batches`` of the configuration.

    Returns:
      A row per model: held-out loss in nats per token, its excess over the first model's loss,
        the share of positions at which the most likely next token is that of the first model, the largest logit
        difference from the first and from the previous model, and the bytes of the parameters.

    Raises:
      ValueError: the models have different vocabularies.
    """
    config = next(iter(models.values())).config
    sizes = {name: each.shape.vocab_size for name, each in models.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the models have different vocabularies: {', '.join(f'{n} {s}' for n, s in sizes.items())}")
    config = dataclasses.replace(config, eval_batches=batches or config.eval_batches)
    totals = [np.zeros(5) for _ in models]  # loss, tokens, positions in agreement, largest differences
    runs = [_jit_forward(each) for each in models.values()]
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
                total[place] = np.maximum(total[place], float(difference))  # propagates NaN
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


def _jit_forward(served: Served) -> Any:
    @jax.jit
    def run(params: Any, quant_state: Any, batch: Any) -> Any:
        inputs = (batch["inputs"], batch["segment_ids"], batch["positions"])
        logits = served.model.apply(params, quant_state, *inputs, rngs={"quant": jax.random.key(0)})
        math = served.shape.math
        return *sum_losses(math.token_losses(logits, batch["targets"]), batch, math), logits

    return run
