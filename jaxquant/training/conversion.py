"""Conversion of a run's checkpoint into a quantized checkpoint for serving, reading one array at a time.

The optimizer state is not read. During a conversion, memory holds one float layer at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from jaxquant import serving
from jaxquant import state as quantization_state
from jaxquant.config.quant_config import NO_KV_QUANT, QuantConfig
from jaxquant.core.paths import leaves_by_path, map_by_path, tree_bytes
from jaxquant.core.qtensor import QTensor, is_tensor
from jaxquant.core.typed import build, to_mapping
from jaxquant.export.vocabulary import read_files
from jaxquant.inject.model import choose_recipes
from jaxquant.serving.leaves import unflatten
from jaxquant.serving.placement import first_line
from jaxquant.trace.kernels import LayerKernel
from jaxquant.training.checkpoint import list_arrays, open_array
from jaxquant.training.config import TrainConfig
from jaxquant.training.data import make_iterators
from jaxquant.training.layers import DecoderConfig
from jaxquant.training.model import Decoder
from jaxquant.training.step import decoder_of, make_model
from jaxquant.training.sums import check_checkpoint_sums, check_config_file, config_of, sums_of_files

Say = Callable[[str], None]
CALIBRATION_BATCHES = 8
"""Number of held-out batches for calibrating a recipe that needs static scales and was not used in training."""


KINDS = ("params", "quant_state")
"""Fields of the training state that a conversion reads."""


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Parameters and quant state in a checkpoint of a run.

    Attributes:
      step: step of the checkpoint.
      config: configuration of the run, with ``remat_policy`` "none".
      shapes: trees "params" and "quant_state" of the training state, with a shape and dtype for each array.
      stores: opened arrays by path, "params/..." or "quant_state/..."; they are not in memory.
    """

    step: int
    config: TrainConfig
    shapes: dict[str, Any]
    stores: dict[str, ts.TensorStore] = dataclasses.field(repr=False)
    _folder: Path = dataclasses.field(repr=False)

    def variables(self, shape: DecoderConfig, tokens: jax.Array) -> dict[str, Any]:
        """Return the variables of the decoder, with shapes for the parameters and arrays for the quant state."""
        _, state = quantization_state.split(jax.eval_shape(lambda: initial_variables(self.config, shape, tokens)))
        state = map_by_path(lambda path, _: jnp.asarray(self.read(f"quant_state/{path}")), state)
        return quantization_state.merge(self.shapes["params"], state)

    def read(self, path: str, *index: int) -> np.ndarray:
        """Read one array, or a slice at an index of its leading axes. Weights are float32, as in ``shapes``.

        Raises:
          ValueError: the files cannot be read.
        """
        try:
            array = np.asarray(self.stores[path][index].read().result())
        except (ValueError, OSError) as error:
            raise ValueError(
                f"{path} in {self._folder} cannot be read ({first_line(error)}); use another step"
            ) from error
        return array.astype(_read_dtype(path, array.dtype), copy=False)


def open_parameters(run_dir: str | Path, step: int | None = None, say: Callable[[str], Any] = print) -> Parameters:
    """Open the parameters and quant state of a run, after comparing the whole checkpoint with its checksums.

    The folder is not changed, so the run may still be training.

    Args:
      run_dir: folder of the run.
      step: step of the checkpoint; None selects the newest checkpoint that opens.
      say: function that prints checkpoints that do not open and are skipped.

    Raises:
      FileNotFoundError: the folder does not exist.
      ValueError: the run has no checkpoint, no checkpoint of this step, or no checkpoint that opens.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise FileNotFoundError(f"run folder {run_dir} does not exist; pass a folder that `jaxquant train` wrote")
    folder = run_dir.resolve() / "checkpoints"
    steps = sorted(ocp.utils.checkpoint_steps(folder)) if folder.is_dir() else []
    if not steps:
        raise ValueError(f"{run_dir} has no checkpoint of `jaxquant train`; let it save one, or choose another run")
    if step not in (None, *steps):
        raise ValueError(f"run {run_dir} has no checkpoint of step {step}; use one of {', '.join(map(str, steps))}")
    for number in reversed(steps) if step is None else [step]:
        try:
            shapes, stores = _open(folder, number)
        except ValueError as error:
            if step is not None:
                raise
            say(f"{error}; trying the previous one")
        else:
            config = config_of(folder / str(number))
            check_config_file(run_dir, number, config)
            config = dataclasses.replace(config, remat_policy="none")  # the policy "quantized" needs a quantized run
            return Parameters(number, config, shapes, stores, folder / str(number) / "state")
    raise ValueError(f"none of the checkpoints {steps} in {folder} opens; choose another run, or train this run again")


def _open(folder: Path, step: int) -> tuple[dict[str, Any], dict[str, ts.TensorStore]]:
    state = folder / str(step) / "state"
    try:
        check_checkpoint_sums(folder / str(step))
        # Read the index first: Orbax opens all arrays concurrently, and does not clean up if one fails.
        if not list_arrays(state):
            raise ValueError(f"there are no arrays in {state}")
        tree: Any = ocp.PyTreeCheckpointHandler().metadata(epath.Path(state)).tree
        trees = {kind: tree[kind] for kind in KINDS}
        stores = {path: open_array(state, node.name) for path, node in leaves_by_path(trees).items()}
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(f"checkpoint {step} in {folder} does not open ({first_line(error)})") from error

    def describe(path: str, _: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(stores[path].shape, _read_dtype(path, stores[path].dtype.numpy_dtype))

    return map_by_path(describe, trees), stores


def _read_dtype(path: str, dtype: Any) -> np.dtype[Any]:
    """Return the dtype in which an array is read: float32 for bfloat16 weights, which is exact."""
    is_narrow = path.startswith("params/") and np.dtype(dtype) == ml_dtypes.bfloat16
    return np.dtype(np.float32 if is_narrow else dtype)


@dataclasses.dataclass(frozen=True)
class Conversion:
    """Result of a conversion.

    Attributes:
      config: configuration of the run, with the quantization for serving.
      step: step of the converted checkpoint.
      bytes_bf16: size of the parameters in bfloat16.
      bytes_quantized: size after the conversion, including scales.
      layers: recipe of each converted kernel, by the path of its layer.
    """

    config: TrainConfig
    step: int
    bytes_bf16: int
    bytes_quantized: int
    layers: dict[str, str]


def served_config(config: TrainConfig, changes: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration for serving a run.

    Args:
      config: configuration of the run.
      changes: fields of ``QuantConfig``. If they include ``quantization``, they replace all of the run's quantization
        fields; otherwise they override single fields.

    Raises:
      ValueError, TypeError: a name is not a field of ``QuantConfig``, or a value is invalid.
    """
    fields = quant_fields(QuantConfig())
    unknown = sorted(set(changes) - set(fields))
    if unknown:
        raise ValueError(f"{unknown[0]} is not a quantization field; a conversion can change {', '.join(fields)}")
    for name in ("checkpoint_is_quantized", "save_quantized_params_path"):
        if name in changes:
            raise ValueError(f"{name} is set by the conversion; leave it out")
    return build(TrainConfig, to_mapping(config) | (fields if "quantization" in changes else {}) | dict(changes))


def layer_config(config: TrainConfig, **changes: Any) -> TrainConfig:
    """Return a config with the fields reset that linear layers do not read, and with the given changes."""
    return dataclasses.replace(config, save_quantized_params_path="", **NO_KV_QUANT, **changes)


def _as_trained(config: TrainConfig) -> TrainConfig:
    return layer_config(config, checkpoint_is_quantized=False)


def quant_fields(config: QuantConfig) -> dict[str, Any]:
    """Return the fields of ``QuantConfig`` in a training configuration, as a mapping."""
    every = to_mapping(config)
    return {field.name: every[field.name] for field in dataclasses.fields(QuantConfig) if field.init}


def convert_run(
    run: str | Path,
    out: str | Path,
    changes: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    say: Say = print,
) -> Conversion:
    """Convert a checkpoint of a run and write it as a quantized checkpoint.

    Embeddings and other kernels that stay in float are written in the dtype in which the decoder reads them, which does
    not change the decoder's results.

    Args:
      run: folder of the run.
      out: folder to write; it must not exist.
      changes: changes for ``served_config``; empty keeps the quantization of the run.
      step: step of the checkpoint; None selects the newest.
      say: function that prints the progress.

    Raises:
      FileNotFoundError, FileExistsError: the run does not exist, or ``out`` exists.
      ValueError: the run is not quantized and ``changes`` has no quantization, no checkpoint opens, or the quantization
        is not valid for the model.
    """
    out, stored = require_new(out), open_parameters(run, step, say)
    trained = stored.config
    config = served_config(trained, changes or {})
    layers = _as_trained(config)
    if not config.strings:
        raise ValueError(f"run {run} is not quantized; pass a quantization, such as quantization=int8")
    defaults, own, asked = quant_fields(QuantConfig()), quant_fields(trained), changes or {}
    if names := [name for name in own if "quantization" in asked and name not in asked and own[name] != defaults[name]]:
        replaced = f"quantization {config.quantization!r} replaces the run's options, including {', '.join(names)}"
        say(f"{replaced}; to keep a field, pass it as key=value")
    _, shape, tokens = decoder_of(config)
    shapes = stored.variables(shape, tokens)
    wanted, had = (choose_recipes(Decoder(shape), each, tokens) for each in (layers, _as_trained(trained)))
    # Quant state of layers that were not trained with this recipe is calibrated on held-out text.
    if any(recipe.delayed is not None and had.get(path) != recipe for path, recipe in wanted.items()):
        found = calibrate_run(stored, layers, shape, say)
        shapes = quantization_state.merge(shapes["params"], found)
    sites = serving.find_kernels(Decoder(shape), shapes, layers, tokens)

    def read(path: tuple[str, ...], index: tuple[Any, ...]) -> np.ndarray:
        return stored.read("/".join(path), *index)

    count, done = len(jax.tree.leaves(shapes["params"])), itertools.count(1)
    note = lambda name: say(f"converted {next(done)} of {count}: {name}")  # noqa: E731
    found = (("/".join(path), leaf) for path, leaf in serving.convert_each(sites, read, shapes, note))
    tree = unflatten({path: cast_as_read(path, leaf, shape) for path, leaf in found})
    served = save_served(out, tree, config, stored.step)
    floats = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes["params"]))
    recipes = {path: site.recipe.name for path, site in sites.items()}
    return Conversion(served, stored.step, 2 * floats, tree_bytes(tree), recipes)


def require_new(path: str | Path) -> Path:
    """Return the path of a folder to write, which must not exist.

    Raises:
      FileExistsError: the folder exists.
    """
    if Path(path).exists():
        raise FileExistsError(f"{path} exists; choose another name or remove it")
    return Path(path)


def save_served(
    out: Path, tree: Any, config: TrainConfig, step: int, files: Mapping[str, str] | None = None, read: Any = None
) -> TrainConfig:
    """Write converted parameters as a checkpoint with their step and configuration; returns the configuration.

    The tokenizer is copied: ``files``, or the file ``tokenizer_path`` and the files next to it. ``tree`` and ``read``
    are arguments of ``serving.save``.
    """
    config = dataclasses.replace(config, checkpoint_is_quantized=True)
    if config.tokenizer_path:
        path = Path(config.tokenizer_path)
        files = files or {"tokenizer.json": path.read_text("utf-8"), **read_files(path)}
        config = dataclasses.replace(config, tokenizer_path=str(out.absolute() / "tokenizer.json"))
    extra = {"train": to_mapping(config), "step": step, "files": sums_of_files(config)}
    serving.save(out, tree, quant_fields(config), extra=extra, files=files, read=read)
    return config


def trained_kernels(stored: Parameters, shape: DecoderConfig) -> dict[str, Callable[[tuple[int, ...]], QTensor]]:
    """Return, for each layer that a run quantizes, a function from the index in the stack to the converted kernel.

    Args:
      stored: checkpoint of the run.
      shape: shape of the decoder.
    """
    config = _as_trained(stored.config)
    tokens = decoder_of(config)[2]
    sites = serving.find_kernels(Decoder(shape), stored.variables(shape, tokens), config, tokens)

    def convert(layer: LayerKernel, index: tuple[int, ...]) -> QTensor:
        kernel = jnp.asarray(stored.read("/".join(("params", *layer.name)), *index))
        return jax.tree.map(np.asarray, layer.convert(kernel, index))

    return {path: functools.partial(convert, layer) for path, layer in sites.items()}


def converted_shapes(config: TrainConfig, shape: DecoderConfig, tokens: jax.Array) -> Any:
    """Return the parameter tree of a converted decoder, as shapes.

    Args:
      config: configuration of the run.
      shape: shape of the decoder.
      tokens: example input.
    """

    def make() -> Any:
        variables = initial_variables(config, shape, tokens)
        found = serving.convert(Decoder(shape), variables, _as_trained(config), tokens)["params"]
        return map_by_path(lambda path, leaf: cast_as_read(path, leaf, shape), found, is_tensor)

    return jax.eval_shape(make)


def initial_variables(config: TrainConfig, shape: DecoderConfig, tokens: jax.Array) -> dict[str, Any]:
    """Return the decoder's initial variables as a Linen variable dict; see ``converted_shapes`` for the arguments."""
    model = make_model(_as_trained(config), shape, tokens)
    return quantization_state.merge(*model.init(jax.random.key(0)))


def cast_as_read(path: str, leaf: Any, shape: DecoderConfig) -> Any:
    """Cast embeddings and float kernels to the dtype in which the decoder reads them; routers stay in float32."""
    is_router = path.endswith("gate/kernel")
    if isinstance(leaf, QTensor) or path.rpartition("/")[2] not in ("embedding", "kernel") or is_router:
        return leaf
    return leaf.astype(ml_dtypes.bfloat16 if shape.dtype == "bfloat16" else shape.dtype)


def calibrate_run(stored: Parameters, config: TrainConfig, shape: DecoderConfig, say: Say) -> Any:
    """Calibrate the quant state of a run on held-out text; all float parameters are in memory at once."""
    batches = CALIBRATION_BATCHES
    params = map_by_path(lambda path, _: jnp.asarray(stored.read(f"params/{path}")), stored.shapes["params"])
    data = make_iterators(dataclasses.replace(config, eval_batches=batches), config.batch_size)

    def inputs() -> Iterator[tuple[Any, ...]]:
        for number, batch in enumerate(data.held_out(), start=1):
            say(f"calibrating {config.quantization}: held-out batch {number} of at most {batches}")
            yield tuple(jnp.asarray(batch[name]) for name in ("inputs", "segment_ids", "positions"))

    variables = serving.calibrate(Decoder(shape), {"params": params}, config, inputs())
    return quantization_state.split(variables)[1]
