"""Open what a training run left, to generate with it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxquant import serving
from jaxquant import state as quantization_state
from jaxquant.core.trees import map_by_path
from jaxquant.core.typed import build, to_mapping
from jaxquant.serving.kv_cache import quantization_of
from train.config import TrainConfig
from train.conversion import converted_shapes, of_layers
from train.frameworks import Model, make_model
from train.generate import Engine, Prompt, Sampling
from train.model import DecoderConfig
from train.origin import check_files
from train.parameters import Parameters, open_parameters
from train.step import decoder_of
from train.tokenizer import Tokenizer

SERVING_FIELDS = ("quantize_kvcache", "checkpoint_is_quantized", "save_quantized_params_path")
"""Fields of a config that say how a model is served, and that its layers do not read."""


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
        return Engine(
            self.model,
            self.params,
            self.quant_state,
            self.shape,
            max_length=max_length or self.config.sequence_length,
            sampling=sampling,
            end_token=self.tokenizer.eos,
            **quantization_of(self.config),
            **options,
        )

    def prompts(self, texts: Sequence[str], names: Sequence[str]) -> list[Prompt]:
        """Encode texts; each gets the random stream of its place."""
        return [
            Prompt(self.tokenizer.encode_prompt(text), name, number)
            for number, (text, name) in enumerate(zip(texts, names, strict=True))
        ]


def open_served(directory: str | Path, overrides: Mapping[str, Any] | None = None) -> Served:
    """Open the newest checkpoint of a run's folder, or a converted one, and change nothing in it.

    Only parameters and quant state are read, onto the default device.

    Args:
      directory: the folder of a run, or one that ``scripts/convert.py`` wrote.
      overrides: config fields laid over the run's ``config.yml``, such as ``quantize_kvcache``; of a converted
        checkpoint those of the KV cache alone.

    Raises:
      FileNotFoundError: the folder is not there.
      ValueError, TypeError: it is no run, has no checkpoint or one that does not fit, or an override that does not.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{directory} does not exist; give the folder of a run, or one that scripts/convert.py wrote"
        )
    if not (folder / "config.yml").is_file():
        if (folder / "jaxquant.json").exists() or (folder / "params").exists():
            return _open_converted(folder, overrides or {})
        raise ValueError(
            f"{directory} has neither config.yml nor jaxquant.json; give the folder of a run, or one that "
            "scripts/convert.py wrote"
        )
    opened = open_parameters(folder, say=lambda text: print(text, file=sys.stderr))
    # What the backward pass keeps is of no matter here, and one policy is for quantized runs alone.
    fields = to_mapping(opened.config) | {"remat_policy": "none"} | dict(overrides or {})
    config: TrainConfig = build(TrainConfig, fields)
    tokenizer, shape, example = decoder_of(config)
    model = make_model(of_layers(config), shape, example)
    params, quant_state = jax.eval_shape(model.init, jax.random.key(0))
    stored = {"params": params, "quant_state": quantization_state.strip_bins(quant_state)}
    found = _read_run(folder, opened, stored)
    quant_state = quantization_state.with_bins(found["quant_state"], quant_state)
    return Served(model, found["params"], quant_state, tokenizer, config, shape, opened.step)


def _open_converted(folder: Path, overrides: Mapping[str, Any]) -> Served:
    """Open a folder that ``scripts/convert.py`` wrote; nothing but how it is served can be overridden."""
    others = sorted(set(overrides) - set(SERVING_FIELDS) - {"kv_quant_dtype", "kv_quant_axis"})
    if others:
        raise ValueError(f"{others[0]} cannot be changed in the converted checkpoint {folder}; convert the run anew")
    manifest = serving.read_manifest(folder)
    if "train" not in manifest.extra:
        raise ValueError(f"{folder} holds no decoder of a training run; load it with jaxquant.serving.load")
    step, train = manifest.extra.get("step"), manifest.extra["train"]
    if type(step) is not int or not isinstance(train, Mapping):
        raise ValueError(f"{folder} holds no step and config of a training run; convert the run anew")
    config: TrainConfig = build(TrainConfig, {**train, **(overrides or {})})
    check_files(folder, train, manifest.extra.get("files", {}))
    tokenizer, shape, example = decoder_of(config)
    plain = of_layers(config)
    found = serving.load(folder, like=converted_shapes(plain, shape, example))
    model = make_model(plain, shape, example)
    return Served(model, found.params, {}, tokenizer, config, shape, step)


def _read_run(folder: Path, stored: Parameters, abstract: dict[str, Any]) -> dict[str, Any]:
    """Read a checkpoint's part that ``abstract`` describes, onto the default device."""

    def load(path: str, wanted: jax.ShapeDtypeStruct) -> jax.Array:
        found = stored.stores.get(path)
        if found is None or found.shape != wanted.shape:
            what = "none" if found is None else f"shape {found.shape}"
            raise ValueError(
                f"checkpoint {stored.step} of {folder} has no {path} of shape {wanted.shape}, got {what}; it is not "
                "one of the run's config.yml"
            )
        return jnp.asarray(stored.read(path))

    return map_by_path(load, abstract)
