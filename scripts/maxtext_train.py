"""Train MaxText's own model with its own train loop, with jaxquant in the place of its quantization module.

    python scripts/maxtext_train.py CHECKOUT [--paths nnx,linen] [--cases REGEX] [--steps 10] [--out FILE] [--json FILE]

Every case is a config of MaxText at tiny shapes on synthetic data, trained twice by ``train_loop``: by MaxText as it is
and with the names of ``maxtext_tests.NAMES`` replaced. The checkout stays as it is. Where jaxquant's error names a line
of MaxText's train_step to change, the case is run once more with a copy of that function in which the line is changed.

What a row says: the loss of the last step, of MaxText and of jaxquant, beside the float model's; how many of the
matmuls with parameters of the traced train step are in low precision; how many amax histories have an entry for every
step; or the error. It needs what ``maxtext_tests.py`` needs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import json
import os
import pathlib
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator
from typing import Any

from maxtext_tests import NAMES

from jaxquant import terminal

STRINGS = (
    "int8",
    "int4",
    "intmp",
    "fp4",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_full",
    "fp8_gpu",
    "fp8_nanoo",
    "nanoo_fp8",
    "te_fp8_delayedscaling",
    "te_fp8_currentscaling",
    "te_mxfp8",
)
"""MaxText's enum but for ``te_nvfp4*``."""
PATHS = {
    "nnx": {},
    "linen": {"enable_nnx": False, "pure_nnx": False, "pure_nnx_decoder": False},
}
"""What MaxText's two models are called here, and the switches that choose them; NNX is its default."""
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
KINDS: dict[str, dict[str, Any]] = {
    "dense experts": {**EXPERTS, "sparse_matmul": False, "megablox": False},
    "ragged experts": {**EXPERTS, "sparse_matmul": True, "megablox": False},
    "accumulation": {"gradient_accumulation_steps": 2},
}
"""Models and loops beside the plain one; ``sparse_matmul`` without megablox is ``jax.lax.ragged_dot``."""
SPLIT = {
    "use_batch_split_schedule": True,
    "attention_type": "mla",
    **EXPERTS,
    "decoder_block": "deepseek",
    "base_num_kv_heads": 2,
    "base_num_decoder_layers": 5,
    "first_num_dense_layers": 1,
    "shared_experts": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "routed_bias": True,
}
"""The batch split schedule, and what its decoder and attention take."""
IN_KINDS = (("", False), ("int8", False), ("int8", True), ("fp8", False), ("fp8_full", True), ("fp8_gpu", True))
"""The (string, use_qwix_quantization) that each of them is run under."""
RULES = [{"path": ".*/wo", "recipe": None}, {"path": ".*/query", "recipe": "aqt_fp8"}]
"""What ``rules`` of jaxquant's config say in the cases "rules"; MaxText's own config has no such field."""
STALE = "nnx.State.merge(custom_grads, non_param_rest)"
FRESH = "nnx.State.merge(non_param_rest, custom_grads)"


@dataclasses.dataclass(frozen=True)
class Case:
    """A config of MaxText.

    Attributes:
      path: key of ``PATHS``.
      kind: key of ``KINDS``, "" for the plain model, "rules" for it under ``RULES``.
      quantization: the string.
      qwix: ``use_qwix_quantization``.
      more: further fields.
    """

    path: str
    kind: str
    quantization: str
    qwix: bool = False
    more: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        parts = [self.path, self.kind or "plain", self.quantization or "float", "qwix" if self.qwix else ""]
        return " ".join([*filter(None, parts), *(f"{name}={value}" for name, value in self.more)])

    def fields(self, checkout: pathlib.Path) -> dict[str, Any]:
        """Return the fields of the config that differ from MaxText's base."""
        own = {"quantization": self.quantization, "use_qwix_quantization": self.qwix}
        if self.quantization == "intmp":
            own["quant_cfg_path"] = str(checkout / "src/maxtext/configs/quantization/dense_llm_weight_only_scale.json")
        return {**TINY, **PATHS[self.path], **KINDS.get(self.kind, {}), **own, **dict(self.more)}


def cases() -> Iterator[Case]:
    """List every case, the float models first."""
    for path in PATHS:
        yield Case(path, "", "")
        for string in STRINGS:
            yield from (Case(path, "", string, qwix) for qwix in (False, True))
        for kind in KINDS:
            yield from (Case(path, kind, string, qwix) for string, qwix in IN_KINDS)
        yield Case(path, "rules", "int8")
        for more in (SPLIT, SPLIT | {"use_manual_quantization": True}):
            yield Case(path, "", "fp8_full", True, tuple(more.items()))


@dataclasses.dataclass
class Outcome:
    """What a run gave; ``error`` alone where it raised.

    Attributes:
      losses: of every step, as MaxText's metrics have them.
      matmuls: path, name ("fwd", "dlhs", "drhs") and dtypes of every matmul with a parameter in the train step.
      histories: how many amax histories have an entry for every step, and how many there are.
      error: its type and message.
      changed: whether the line of train_step that jaxquant's error names was changed.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    matmuls: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    histories: tuple[int, int] = (0, 0)
    error: str = ""
    changed: bool = False

    @property
    def low(self) -> int:
        """How many of the matmuls have an operand in 8 bits or less."""
        return sum(bool(re.search(r"int[48]\b|float[48]|[eE]\dm\d", dtypes)) for _, _, dtypes in self.matmuls)


# -- running -----------------------------------------------------------------------------------------------------------


class Ruled:
    """MaxText's config with the field that it lacks."""

    rules = RULES

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


@contextlib.contextmanager
def shimmed(has_rules: bool = False) -> Iterator[None]:
    """Set jaxquant's functions in the place of MaxText's, for the length of a context."""
    from maxtext.layers import quantizations

    import jaxquant

    own = {name: getattr(quantizations, name) for name in NAMES}
    for name in NAMES:
        setattr(quantizations, name, getattr(jaxquant, name))
    if has_rules:
        quantizations.configure_quantization = lambda config, **mode: jaxquant.configure_quantization(
            Ruled(config), **mode
        )
        quantizations.maybe_quantize_model = lambda model, config: jaxquant.maybe_quantize_model(model, Ruled(config))
    try:
        yield
    finally:
        for name, value in own.items():
            setattr(quantizations, name, value)


class Watched:
    """A jitted train step that notes its matmuls when ``train_loop`` lowers it.

    Args:
      jitted: what ``jit_train_and_eval_step`` made.
      seen: where they are noted.
    """

    def __init__(self, jitted: Any, seen: Outcome) -> None:
        self.jitted, self.seen = jitted, seen

    def __call__(self, *args: Any) -> Any:
        return self.jitted(*args)

    def lower(self, *args: Any) -> Any:
        """Lower the step, as a jitted function does."""
        from jaxquant.audit.coverage import of_trace

        rows = of_trace(self.jitted.trace(*args)).rows
        self.seen.matmuls = [(row.path, row.matmul, str(row.dtypes)) for row in rows if row.has_parameter]
        return self.jitted.lower(*args)


@contextlib.contextmanager
def watched_step(seen: Outcome, is_changed: bool) -> Iterator[None]:
    """Watch the train step of ``train_loop``; with the line changed that jaxquant's error names."""
    from maxtext.trainers.pre_train import train
    from maxtext.utils import train_utils

    own, make = train.train_step, train_utils.jit_train_and_eval_step
    if is_changed:
        source = inspect.getsource(own)
        assert source.count(STALE) == 1, "MaxText's train_step has another line now"
        namespace = dict(vars(train))
        exec(source.replace(STALE, FRESH), namespace)
        train.train_step = namespace["train_step"]

    def watched(*args: Any, **kwargs: Any) -> Any:
        train_step, eval_step = make(*args, **kwargs)
        return Watched(train_step, seen), eval_step

    train_utils.jit_train_and_eval_step = watched
    try:
        yield
    finally:
        train.train_step, train_utils.jit_train_and_eval_step = own, make


def histories(state: Any, steps: int) -> tuple[int, int]:
    """Count the amax histories with an entry for every step, and all of them; stacked layers count one by one."""
    import jax
    import numpy as np

    leaves = jax.tree.leaves_with_path(state)
    found = [leaf for path, leaf in leaves if "amax_history" in jax.tree_util.keystr(path)]
    filled = [((np.asarray(leaf) > 0).sum(-1) == steps).reshape(-1) for leaf in found]
    return sum(int(each.sum()) for each in filled), sum(each.size for each in filled)


def run(fields: dict[str, Any], checkout: pathlib.Path, steps: int, is_changed: bool = False) -> Outcome:
    """Train MaxText's model by its train loop, with whatever its module of quantization has."""
    from maxtext.trainers.pre_train import train

    import jaxquant

    seen = Outcome(changed=is_changed)
    with tempfile.TemporaryDirectory() as folder:
        metrics = pathlib.Path(folder) / "metrics"
        given = {**fields, "steps": steps, "metrics_file": metrics, "base_output_directory": folder}
        base = checkout / "src/maxtext/configs/base.yml"
        argv = ["", str(base), *(f"{name}={value}" for name, value in given.items())]
        try:
            with watched_step(seen, is_changed), jaxquant.state.by_hand() if is_changed else contextlib.nullcontext():
                state = train.train_loop(*train.initialize(argv))
        except Exception as error:  # a report of what is refused, and of what breaks, is what this is for
            traceback.print_exc()
            return Outcome(error=f"{type(error).__name__}: {error}", changed=is_changed)
        seen.losses = [json.loads(line)["learning/loss"] for line in metrics.read_text().splitlines()]
    seen.histories = histories(state, steps)
    return seen


def compare(case: Case, checkout: pathlib.Path, steps: int, with_maxtext: bool = True) -> dict[str, Outcome]:
    """Run a case by MaxText alone, if asked, and with jaxquant."""
    fields = case.fields(checkout)
    result: dict[str, Outcome] = {}
    if (with_maxtext and case.kind != "rules") or not case.quantization:
        result["maxtext"] = run(fields, checkout, steps)
    if not case.quantization:
        return result
    with shimmed(has_rules=case.kind == "rules"):
        result["jaxquant"] = run(fields, checkout, steps)
        if FRESH in result["jaxquant"].error:
            result["jaxquant, line changed"] = run(fields, checkout, steps, is_changed=True)
    return result


# -- the report --------------------------------------------------------------------------------------------------------


def cells(outcome: Outcome) -> list[str]:
    """Return loss, matmuls and histories of a run, or its error."""
    if outcome.error:
        return [outcome.error.splitlines()[0][:160].replace("|", "/"), "", ""]
    done, count = outcome.histories
    return [
        f"{outcome.losses[0]:.4f} → {outcome.losses[-1]:.4f}",
        f"{outcome.low} of {len(outcome.matmuls)}",
        f"{done} of {count}" if count else "",
    ]


def table(results: dict[str, dict[str, Outcome]]) -> str:
    """Format the results in Markdown, a row for each run."""
    head = ["case", "by", "loss, first → last step", "matmuls in ≤ 8 bits", "histories advanced"]
    lines = [head, ["---"] * len(head)]
    for case, outcomes in results.items():
        lines += [[case if i == 0 else "", by, *cells(outcome)] for i, (by, outcome) in enumerate(outcomes.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def main() -> int:
    """Run the cases that were asked for, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=pathlib.Path)
    parser.add_argument("--paths", default=",".join(PATHS))
    parser.add_argument("--cases", default="", help="regex that a case's name must have")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--jaxquant-alone", action="store_true", help="leave out MaxText's own runs")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    terminal.accept_all_characters()
    checkout = asked.checkout.resolve()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.path[:0] = [str(checkout / "src"), str(checkout)]
    import jax

    jax.config.update("jax_disable_most_optimizations", True)  # losses of a few steps, not times, are compared
    results: dict[str, dict[str, Outcome]] = {}
    for case in cases():
        if case.path not in asked.paths.split(",") or not re.search(asked.cases, str(case)):
            continue
        results[str(case)] = compare(case, checkout, asked.steps, not asked.jaxquant_alone)
        print(table({str(case): results[str(case)]}), flush=True)
        if asked.json:
            kept = {name: {by: dataclasses.asdict(each) for by, each in row.items()} for name, row in results.items()}
            asked.json.write_text(json.dumps(kept, indent=1))
    text = table(results)
    print(text)
    if asked.out:
        asked.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
