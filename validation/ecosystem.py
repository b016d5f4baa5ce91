"""Run jaxquant with the newest releases of MaxText and Keras, in an environment that also has Tunix and Tokamax.

    python3.12 validation/ecosystem.py [--parts fields,keras,dense,...] [--cases REGEX]

The environment is created in ``build/ecosystem`` if it does not exist. The results are written to
``validation/ecosystem.md``; tables of parts that are not selected stay unchanged. The parts:

- ``fields``: check that the handle has the attributes that MaxText reads, for every string of MaxText's enum, and set
  every quantization field of MaxText's config to a value other than the default.
- ``keras``: train a Keras model through ``stateless_call``.
- ``dense``, ``experts``: train tiny MaxText models on synthetic data with MaxText's pre-training loop, once with
  MaxText's own quantization and once with jaxquant instead of the functions in ``NAMES``.
- ``models``: train other decoders of MaxText with jaxquant's int8.

A row of the last three parts has the loss of the first and of the last step, and the number of matmuls with parameters
that the traced step runs in 8 bits or fewer. A row of ``dense`` or ``experts`` also has the number of amax histories
with an entry for every step.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
REPORT = ROOT / "validation/ecosystem.md"
ENVIRONMENT = ROOT / "build/ecosystem"
STEPS = 3
SHOWN = ("maxtext", "google-tunix", "tokamax", "keras", "jax", "flax", "qwix", "aqtp", "safetensors")
"""Packages whose versions are in the report."""
IMPORTED = """
omegaconf pydantic jinja2 tensorflow-cpu transformers pillow sympy sentencepiece tiktoken datasets grain pathwaysutils
drjax gcsfs google-cloud-storage cloud-tpu-diagnostics ml-goodput-measurement tensorboardX
"""
"""Packages that MaxText imports, although its wheel does not require them."""
NAMES = (
    "configure_kv_quant",
    "configure_quantization",
    "get_qt_provider",
    "get_quant_mode",
    "get_quantization_rule",
    "get_static_scale",
    "in_convert_mode",
    "in_serve_mode",
    "manual_quantize",
    "match_aqt_and_unquantized_param",
    "maybe_quantize_model",
    "remove_quantized_params",
)
"""Functions of MaxText that this script replaces by functions of jaxquant with the same names."""
TINY = {
    "run_name": "tiny",
    "dataset_type": "synthetic",
    "hardware": "cpu",
    "attention": "dot_product",
    "base_emb_dim": 32,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 1,
    "base_mlp_dim": 64,
    "base_num_decoder_layers": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "per_device_batch_size": 2,
    "max_target_length": 24,
    "learning_rate": 0.01,
    "warmup_steps_fraction": 0.0,
    "enable_checkpointing": False,
    "enable_tensorboard": False,
    "skip_jax_distributed_system": True,
    "sharding_tolerance": 1.0,
}
EXPERTS = {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 64}
RAGGED = {"sparse_matmul": True, "megablox": False}
"""Config that selects ``jax.lax.ragged_dot``, because megablox has no kernel for CPUs."""
KINDS: dict[str, dict[str, Any]] = {"dense": {}, "experts": EXPERTS | RAGGED}
STRINGS = ("", "int8", "fp8", "te_fp8_currentscaling")
"""Config strings for every kind of model; the last is MaxText's name for ``fp8_current``."""
SMALL = {"override_model_config": True, "base_moe_mlp_dim": 64, "sliding_window_size": 8, **RAGGED}
FOUR = {"num_experts": 4, "num_experts_per_tok": 2}
DECODERS: dict[str, dict[str, Any]] = {
    "gemma4-26b": {**FOUR, "base_num_decoder_layers": 6, "global_head_dim": 32, "global_num_kv_heads": 1},
    "llama4-17b-16e": {"num_experts": 4, "base_num_decoder_layers": 4, "chunk_attn_window_size": 8},
    "deepseek4-tiny": {
        **FOUR,
        "base_num_decoder_layers": 5,
        "first_num_hash_layers": 1,
        "compress_ratios": "[0,0,4,8,4]",
        "qk_rope_head_dim": 16,
        "indexer_topk": 4,
        "o_groups": 2,
    },
    "gpt-oss-20b": {**FOUR, "routed_bias": True},
    "qwen3-next-80b-a3b": {
        **FOUR,
        "base_num_decoder_layers": 4,
        "gdn_key_head_dim": 16,
        "gdn_value_head_dim": 16,
        "gdn_num_key_heads": 2,
        "gdn_num_value_heads": 2,
        "gdn_chunk_size": 8,
    },
}
"""MaxText's model name -> fields that reduce the model to test size."""
VALUES = {"kv_quant_axis": "dkv", "kv_quant_dtype": "int4", "weight_dtype": "float8_e4m3fn", "weight_block_size": 128}
"""Values that the part ``fields`` sets, for config fields whose type does not determine a value."""
NEEDED = {"kv_quant": "quantize_kvcache", "logits_proj": "quantize_logits_proj"}
"""Beginning of a field's name -> switch without which the field has no effect."""


@dataclasses.dataclass
class Outcome:
    """Results of a run; if the run raised an exception, only ``error`` is set.

    Attributes:
      losses: loss of every step, from MaxText's metrics.
      matmuls: dtypes of every matmul with a parameter in the train step.
      histories: number of amax histories with an entry for every step, and number of all histories.
      error: type and message of the exception.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    matmuls: list[str] = dataclasses.field(default_factory=list)
    histories: tuple[int, int] = (0, 0)
    error: str = ""

    def cells(self) -> list[str]:
        """Return the table cells for loss, matmuls and histories, or for the error."""
        if self.error:
            return [self.error.splitlines()[0][:200].replace("|", "/"), "", ""]
        low = sum(bool(re.search(r"int[48]\b|float[48]|[eE]\dm\d", dtypes)) for dtypes in self.matmuls)
        done, count = self.histories
        losses = f"{self.losses[0]:.4f} → {self.losses[-1]:.4f}"
        return [losses, f"{low} of {len(self.matmuls)}", f"{done} of {count}" if count else ""]


def table(head: str, rows: list[list[str]]) -> str:
    """Return a Markdown table; ``head`` has the cells of the header row, separated by ``|``."""
    lines = [[cell.strip() for cell in head.split("|")]]
    lines += [["---"] * len(lines[0]), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# -- MaxText's training ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def shimmed() -> Iterator[None]:
    """Replace MaxText's functions in ``NAMES`` with jaxquant's functions while the context is active."""
    from maxtext.layers import quantizations

    from jaxquant.compat import maxtext as ours

    own = {name: getattr(quantizations, name) for name in NAMES}
    for name in NAMES:
        setattr(quantizations, name, getattr(ours, name))
    try:
        yield
    finally:
        for name, value in own.items():
            setattr(quantizations, name, value)


class Watched:
    """A jitted train step that records the dtypes of its matmuls when ``train_loop`` lowers it.

    Args:
      jitted: result of ``jit_train_and_eval_step``.
      seen: outcome that receives the dtypes.
    """

    def __init__(self, jitted: Any, seen: Outcome) -> None:
        self.jitted, self.seen = jitted, seen

    def __call__(self, *args: Any) -> Any:
        return self.jitted(*args)

    def lower(self, *args: Any) -> Any:
        """Record the matmuls of the step and lower it, like the ``lower`` method of a jitted function."""
        from jaxquant.audit.coverage import of_trace

        rows = of_trace(self.jitted.trace(*args)).rows
        self.seen.matmuls = [str(row.dtypes) for row in rows if row.has_parameter]
        return self.jitted.lower(*args)


@contextlib.contextmanager
def watched_step(seen: Outcome) -> Iterator[None]:
    """Record the matmuls of ``train_loop``'s train step while the context is active."""
    from maxtext.utils import train_utils

    make = train_utils.jit_train_and_eval_step

    def watched(*args: Any, **kwargs: Any) -> Any:
        train_step, eval_step = make(*args, **kwargs)
        return Watched(train_step, seen), eval_step

    train_utils.jit_train_and_eval_step = watched
    try:
        yield
    finally:
        train_utils.jit_train_and_eval_step = make


def histories(state: Any, steps: int) -> tuple[int, int]:
    """Return the number of amax histories with an entry for every step, and of all; stacked layers count separately."""
    import jax
    import numpy as np

    leaves = jax.tree.leaves_with_path(state)
    found = [leaf for path, leaf in leaves if "amax_history" in jax.tree_util.keystr(path)]
    filled = [((np.asarray(leaf) > 0).sum(-1) == steps).reshape(-1) for leaf in found]
    return sum(int(each.sum()) for each in filled), sum(each.size for each in filled)


def run(fields: dict[str, Any], steps: int) -> Outcome:
    """Train a MaxText model with MaxText's train loop; ``shimmed`` selects whose quantization functions run."""
    import maxtext
    from maxtext.trainers.pre_train import train

    seen = Outcome()
    with tempfile.TemporaryDirectory() as folder:
        metrics = pathlib.Path(folder) / "metrics"
        given = {**TINY, **fields, "steps": steps, "metrics_file": metrics, "base_output_directory": folder}
        base = pathlib.Path(maxtext.__file__).parent / "configs/base.yml"
        argv = ["", str(base), *(f"{name}={value}" for name, value in given.items())]
        try:
            with watched_step(seen):
                state = train.train_loop(*train.initialize(argv))
        except (Exception, SystemExit) as error:  # an error is a result of this script
            traceback.print_exc()
            error = error.__context__ or error if isinstance(error, SystemExit) else error
            return Outcome(error=f"{type(error).__name__}: {error}")
        seen.losses = [json.loads(line)["learning/loss"] for line in metrics.read_text().splitlines()]
    seen.histories = histories(state, steps)
    return seen


def trained(kind: str, asked: argparse.Namespace) -> str:
    """Train one kind of model with every config string, quantized by MaxText and by jaxquant; return the table."""
    rows = []
    for string in STRINGS:
        for by, shim in (("MaxText", contextlib.nullcontext), ("jaxquant", shimmed)):
            needs_gpu = by == "MaxText" and string.startswith("te_")  # TransformerEngine
            if not needs_gpu and (string or by == "MaxText") and re.search(asked.cases, f"{string or 'float'} {by}"):
                with shim():
                    outcome = run(KINDS[kind] | {"quantization": string}, STEPS)
                rows.append([string or "float", by, *outcome.cells()])
                print(rows[-1], flush=True)
    return table("quantization | by | loss, first → last step | in 8 bits or fewer | histories advanced", rows)


def decoders(asked: argparse.Namespace) -> str:
    """Train other decoders with jaxquant's int8; return the table."""
    rows = []
    for name, fields in DECODERS.items():
        if re.search(asked.cases, name):
            with shimmed():
                given = SMALL | fields | {"model_name": name, "quantization": "int8"}
                rows.append([f"`{name}`", *run(given, 2).cells()[:2]])
            print(rows[-1], flush=True)
    return table("decoder | loss, first → last step, or MaxText's error | in 8 bits or fewer", rows)


# -- MaxText's config --------------------------------------------------------------------------------------------------


def verdict(read: Callable[..., Any], name: str, kept: dict[str, Any], value: Any) -> str:
    """Return the effect of setting a field: honoured, refused, named in a warning, or SILENT (no effect)."""
    default = read(**kept)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            config = read(**kept, **{name: value})
        except (NotImplementedError, ValueError, TypeError) as error:
            return f"refused: {str(error)[:110].replace('|', '/')}"
    if any(name in str(each.message) for each in caught):
        return "named in a warning"
    return "honoured" if config != default else "SILENT"


def fields_of_config(asked: argparse.Namespace) -> str:
    """Check the handle of every string, and every config field whose name is about quantization; return the tables."""
    from maxtext.configs import types as theirs
    from maxtext.layers import quantizations

    import jaxquant
    from jaxquant.compat import maxtext as ours

    def program(**fields: Any) -> Any:
        return theirs.MaxTextConfig.model_construct(**{"quantization_local_shard_count": 1} | fields)

    wanted = [name for name in vars(quantizations.Quantization) if not name.startswith("_")]
    rows = []
    for member in theirs.QuantizationType:
        try:
            handle = ours.configure_quantization(program(quantization=member))
        except (NotImplementedError, ValueError) as error:
            rows.append([f"`{member.value}`", f"refused: {str(error)[:110].replace('|', '/')}"])
            continue
        missing = [name for name in wanted if handle is not None and not hasattr(handle, name)]
        answer = "none: the model is quantized whole" if member.value not in ("", "te_no_quant") else "none"
        rows.append([f"`{member.value}`", answer if handle is None else f"lacks {missing}" if missing else "a handle"])
    text = table("string | handle of `configure_quantization`", rows)

    def read(string: str, **fields: Any) -> Any:
        return jaxquant.QuantConfig.from_any(program(quantization=string, **fields))

    rows = []
    about = re.compile(r"quant|fp8|calibration|qtype|^te_|weight_block|weight_dtype|moe_on_fsdp")
    for name, field in sorted(theirs.MaxTextConfig.model_fields.items()):
        if not about.search(name) or name in ("quantization", "use_qwix_quantization"):
            continue
        default = field.get_default(call_default_factory=True)
        value: Any = "fixed,1"
        if isinstance(default, bool):
            value = not default
        elif name in VALUES or isinstance(default, int):
            value = VALUES.get(name, 64)
        kept = {other: True for start, other in NEEDED.items() if name.startswith(start)}
        string = "int8" if name in ("quantization_local_shard_count", "replicate_quant_scale") else "fp8_full"
        rows.append([f"`{name}`", f"`{value!r}`", verdict(functools.partial(read, string), name, kept, value)])
    return f"{text}\n\n{table('field | set to | answer', rows)}"


# -- Keras -------------------------------------------------------------------------------------------------------------


def keras_model(asked: argparse.Namespace) -> str:
    """Quantize and train a Keras model through ``stateless_call``, and count its 8-bit matmuls; return the table."""
    os.environ["KERAS_BACKEND"] = "jax"
    import jax
    import jax.numpy as jnp
    import keras

    import jaxquant

    inputs = keras.Input((16, 32))
    x = keras.layers.Dense(64, activation="relu")(inputs)
    x = x + keras.layers.MultiHeadAttention(2, 16)(x, x)
    x = keras.layers.Dense(32)(keras.layers.LayerNormalization()(x))
    model = keras.Model(inputs, x)
    rest = [variable.value for variable in model.non_trainable_variables]
    batch = jax.random.normal(jax.random.key(0), (8, 16, 32))
    rows = []
    for string in ("", "int8", "fp8", "fp8_current"):
        params = [variable.value for variable in model.trainable_variables]
        call = jaxquant.quantize(lambda params, x: model.stateless_call(params, rest, x)[0], string)
        state = call.init(params, batch)

        @jax.jit
        def step(params: Any, state: Any, call: Any = call) -> Any:
            loss = lambda params, state: jnp.mean((call(params, state, batch) - jnp.sin(batch)) ** 2)  # noqa: E731
            value, (grads, seen) = jax.value_and_grad(loss, argnums=(0, 1))(params, state)
            params = jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)
            return value, params, jaxquant.state.update(state, seen) if state else state

        found = [str(row.dtypes) for row in jaxquant.coverage(step, params, state).rows if row.has_parameter]
        losses = []
        for _ in range(20):
            value, params, state = step(params, state)
            losses.append(float(value))
        rows.append([string or "float", *Outcome(losses, found).cells()[:2]])
    return table("quantization | loss, step 1 → 20 | in 8 bits or fewer", rows)


# -- the environment and the report ------------------------------------------------------------------------------------

PARTS: dict[str, tuple[str, Callable[[argparse.Namespace], str]]] = {
    "fields": ("MaxText's strings and fields", fields_of_config),
    "keras": ("A Keras model through `stateless_call`", keras_model),
    "dense": ("MaxText's dense model", functools.partial(trained, "dense")),
    "experts": ("MaxText's experts", functools.partial(trained, "experts")),
    "models": ("Further decoders under int8", decoders),
}


def make_environment(folder: pathlib.Path) -> pathlib.Path:
    """Return the Python of the environment with the newest releases and this checkout; create it if needed."""
    python = folder / "bin/python"
    if not python.exists():
        if sys.version_info < (3, 12):
            raise SystemExit("MaxText needs Python 3.12 or later: run this script with python3.12")
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        packages = [*(name for name in SHOWN if name != "safetensors"), *IMPORTED.split(), "-e", ROOT]
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--upgrade", *packages], check=True)
    return python


def write_report(name: str, made: str, command: str) -> None:
    """Write one part of the report; keep other parts, and rows of this part that ``--cases`` excludes."""
    text = REPORT.read_text(encoding="utf-8") if REPORT.exists() else ""
    found = dict(re.findall(r"^## (.+)\n\n((?:(?!^## )[\s\S])*)", text, re.MULTILINE))
    versions = ", ".join(f"{each} {importlib.metadata.version(each)}" for each in SHOWN)
    title = PARTS[name][0]
    if name in ("dense", "experts", "models"):
        head, rule, *rows = made.splitlines()
        keep = 1 if name == "models" else 2  # cells that identify a row
        kept = [line for line in found.get(title, "").splitlines() if line.startswith("|")][2:]
        merged = {tuple(line.split("|")[1 : 1 + keep]): line for line in kept + rows}
        made = "\n".join([head, rule, *merged.values()])
    stamp = f"`{command}`, {datetime.date.today():%d %B %Y}, {versions}, Python {platform.python_version()}, CPU."
    found[title] = f"{stamp}\n\n{made}"
    about = (
        "`validation/ecosystem.py` describes each part. Rows of a part may come from several runs with `--cases`; the "
    )
    about += "line above a table names the last one."
    lines = ["# jaxquant with the newest releases", "", about, ""]
    for each, _ in PARTS.values():
        lines += [f"## {each}", "", found[each].strip(), ""] if each in found else []
    REPORT.write_text("\n".join(lines), encoding="utf-8")


def main() -> int:
    """Create the environment, run the parts in it and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--cases", default="", help="regex for the rows of dense, experts and models")
    asked = parser.parse_args()
    python = make_environment(ENVIRONMENT)
    if pathlib.Path(sys.prefix) != ENVIRONMENT:
        return subprocess.run([python, *sys.argv], env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=False).returncode
    import jax

    jax.config.update("jax_disable_most_optimizations", True)  # the run compares losses of a few steps, not times
    for name in asked.parts.split(","):
        write_report(name, PARTS[name][1](asked), " ".join(["python validation/ecosystem.py", *sys.argv[1:]]))
    print(REPORT.read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
