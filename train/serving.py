"""Open what a training run left, to generate with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jaxquant.config.loader import build, load_yaml
from jaxquant.config.quant_config import QuantConfig
from jaxquant.serving.kv_cache import quantization_of
from train.config import TrainConfig
from train.frameworks import Model, make_model
from train.generate import Engine, Prompt, Sampling
from train.model import DecoderConfig
from train.step import model_config
from train.tokenizer import Tokenizer, open_tokenizer

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
    """Open the newest checkpoint of a run's folder, and change nothing in it.

    Only parameters and quant state are read, onto the first device.

    Args:
      directory: the folder of a run.
      overrides: config fields laid over the run's ``config.yml``, such as ``quantize_kvcache``.

    Raises:
      FileNotFoundError: the folder is not there.
      ValueError, TypeError: it is no run, has no checkpoint or one that does not fit, or an override that does not.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise FileNotFoundError(f"{directory} does not exist; give the folder of a run that `python -m train` wrote")
    if not (folder / "config.yml").is_file():
        raise ValueError(f"{directory} has no config.yml; give the folder of a run that `python -m train` wrote")
    config: TrainConfig = build(TrainConfig, load_yaml(folder / "config.yml") | dict(overrides or {}))
    tokenizer = open_tokenizer(config.tokenizer_path)
    shape = model_config(config, tokenizer.vocab_size)
    defaults = {field.name: field.default for field in dataclasses.fields(QuantConfig) if field.name in SERVING_FIELDS}
    example = jnp.zeros((1, config.sequence_length), jnp.int32)
    model = make_model(dataclasses.replace(config, **defaults), shape, example)
    params, quant_state = jax.eval_shape(model.init, jax.random.key(0))
    step, found = _read_newest(folder / "checkpoints", {"params": params, "quant_state": quant_state})
    return Served(model, found["params"], found["quant_state"], tokenizer, config, shape, step)


def _read_newest(folder: Path, abstract: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Read the newest checkpoint's part that ``abstract`` describes, onto the first device."""
    steps = ocp.utils.checkpoint_steps(folder.absolute()) if folder.is_dir() else []
    if not steps:
        raise ValueError(f"{folder.parent} has no checkpoint; let the run reach its first one (checkpoint_every)")
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    item = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), abstract)
    path = folder.absolute() / str(max(steps)) / "state"
    arguments = ocp.checkpoint_utils.construct_restore_args(item)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        try:
            found = reader.restore(
                path, args=ocp.args.PyTreeRestore(item=item, restore_args=arguments, partial_restore=True)
            )
        except (ValueError, KeyError, TypeError, OSError) as error:
            first = (str(error).strip().splitlines() or [""])[0][:200]
            raise ValueError(
                f"checkpoint {path.parent} does not load ({type(error).__name__}: {first}); resume the run, which "
                "passes over a damaged checkpoint, or remove it"
            ) from None
    # What the checkpoint lacks comes back as it was asked for.
    missing = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in jax.tree_util.tree_leaves_with_path(found)
        if not isinstance(leaf, jax.Array)
    ]
    if missing:
        raise ValueError(f"checkpoint {path.parent} has no {', '.join(missing)}; it is not one of the run's config.yml")
    return max(steps), found
