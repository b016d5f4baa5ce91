"""Quantize public models, unedited, with jaxquant.quantize, train each for some steps and print the table.

    python scripts/public_models.py [--models lm1b,...] [--recipes fp8,...] [--steps 50] [--out FILE.md] NAME=FOLDER...

NAME=FOLDER are checkouts: flax, nanodo, big_vision, vmoe, vision_transformer, bonsai; a model without its checkout
is left out. Environments for what models import are made under ``--environments`` (a venv each, from PyPI). Every model
runs in a process of its own; ``--json`` keeps what each of them printed.

What one row says: how many matmuls with parameters are quantized, and why the others are not; the loss after the steps
beside that of the float model, on the same batches; whether every amax history has moved; what ``Coverage.check`` says.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import threading
import venv
from collections import Counter
from collections.abc import Callable
from typing import Any

RECIPES = ("fp8", "int8", "fp8_current", "fp8_full")
ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = {
    "plain": ["dm-haiku", "equinox", "einops", "ml_collections", "clu", "absl-py", "scipy", "tensorflow-cpu", "pillow"],
    "hf": ["transformers==4.46.3"],
}
"""What each environment has beside jaxquant's own requirements."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A model as a function of its parameters, and what it is trained on.

    Attributes:
      params: tree of float arrays.
      loss: of (params, *batch).
      batches: arguments of the loss, in turn.
    """

    params: Any
    loss: Callable[..., Any]
    batches: list[tuple[Any, ...]]


# -- data --------------------------------------------------------------------------------------------------------------


def tokens(vocab: int = 64, rows: int = 8, length: int = 24, count: int = 4) -> list[Any]:
    """Make token batches of a chain in which the next token depends on the last."""
    import numpy as np

    random, steps = np.random.default_rng(0), np.random.default_rng(1).integers(1, vocab, vocab)
    out = np.zeros((count, rows, length), np.int32)
    out[..., 0] = random.integers(1, vocab, (count, rows))
    for i in range(1, length):
        follows = 1 + (out[..., i - 1] + steps[out[..., i - 1]]) % (vocab - 1)
        out[..., i] = np.where(random.random((count, rows)) < 0.9, follows, random.integers(1, vocab, (count, rows)))
    return list(out)


def images(size: int = 16, classes: int = 10, rows: int = 16, count: int = 4) -> list[tuple[Any, Any]]:
    """Make batches of noisy pictures of some classes."""
    import numpy as np

    random = np.random.default_rng(0)
    prototypes = random.normal(size=(classes, size, size, 3))
    labels = random.integers(0, classes, (count, rows))
    noise = random.normal(size=(count, rows, size, size, 3))
    return [(image.astype("float32"), label) for image, label in zip(prototypes[labels] + noise, labels, strict=True)]


def next_token(logits: Any, ids: Any) -> Any:
    """Compute the cross-entropy of the next token."""
    import optax

    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1].astype("float32"), ids[:, 1:]).mean()


def classes(logits: Any, labels: Any) -> Any:
    """Compute the cross-entropy of classes."""
    import optax

    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _linen(model: Any, loss: Callable[..., Any], batches: list[tuple[Any, ...]], *example: Any, **rngs: Any) -> Problem:
    import jax

    variables = jax.jit(lambda: model.init({"params": jax.random.key(0), **rngs}, *example))()
    return Problem(variables["params"], loss, batches)


def _nnx(model: Any, call: Callable[..., Any], loss: Callable[..., Any], batches: list[tuple[Any, ...]]) -> Problem:
    from flax import nnx

    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return Problem(params, lambda params, *batch: loss(call(nnx.merge(graph, params, rest), *batch), *batch), batches)


# -- models ------------------------------------------------------------------------------------------------------------


def lm1b(at: Callable[[str], str]) -> Problem:
    """flax/examples/lm1b: the decoder-only transformer."""
    sys.path.insert(0, at("flax/examples/lm1b"))
    import models

    config = models.TransformerConfig(64, 64, emb_dim=32, num_heads=4, num_layers=2, qkv_dim=32, mlp_dim=64, max_len=32)
    model = models.TransformerLM(config.replace(deterministic=True))
    batches = [(ids,) for ids in tokens()]

    # The model shifts its input right by itself.
    def loss(params: Any, ids: Any) -> Any:
        import optax

        logits = model.apply({"params": params}, ids)
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids).mean()

    return _linen(model, loss, batches, batches[0][0])


def seq2seq(at: Callable[[str], str]) -> Problem:
    """flax/examples/seq2seq: two LSTMs in nn.RNN."""
    sys.path.insert(0, at("flax/examples/seq2seq"))
    import jax
    import models
    import optax

    model = models.Seq2seq(True, 32, 16)
    batches = [(jax.nn.one_hot(ids % 16, 16), jax.nn.one_hot(ids[:, ::-1] % 16, 16)) for ids in tokens(16, length=8)]

    def loss(params: Any, source: Any, target: Any) -> Any:
        logits, _ = model.apply({"params": params}, source, target, rngs={"lstm": jax.random.key(1)})
        return optax.softmax_cross_entropy(logits, target[:, 1:]).mean()

    return _linen(model, loss, batches, *batches[0], lstm=jax.random.key(1))


def nnx_gemma(at: Callable[[str], str]) -> Problem:
    """flax/examples/gemma: Gemma in NNX."""
    sys.path.insert(0, at("flax/examples/gemma"))
    import jax.numpy as jnp
    import transformer
    from flax import nnx
    from transformer_cfg import AttentionType, TransformerConfig

    kinds = (AttentionType.LOCAL_SLIDING, AttentionType.GLOBAL)
    config = TransformerConfig(2, 64, 32, 64, 4, 8, 1, 30.0, True, True, kinds, use_qk_norm=True, sliding_window_size=8)
    model = transformer.Transformer(config, rngs=nnx.Rngs(0, params=0))
    positions, mask = jnp.arange(24)[None].repeat(8, 0), jnp.tril(jnp.ones((8, 24, 24), bool))
    return _nnx(model, lambda m, ids: m(ids, positions, None, mask)[0], next_token, [(ids,) for ids in tokens()])


def nanodo(at: Callable[[str], str]) -> Problem:
    """nanodo: the decoder, its head tied to the embedding."""
    sys.path.insert(0, at("nanodo"))
    from nanodo import model as nanodo_model

    model = nanodo_model.TransformerDo(nanodo_model.DoConfig(32, 4, 24, 2, 64, 64, fsdp_enabled=False, remat=True))
    batches = [(ids,) for ids in tokens()]
    return _linen(model, lambda p, ids: next_token(model.apply({"params": p}, ids), ids), batches, batches[0][0])


def big_vision_vit(at: Callable[[str], str]) -> Problem:
    """big_vision ViT with scan=True, remat and a pooling head."""
    sys.path.insert(0, at("big_vision"))
    from big_vision.models import vit

    model = vit.Model(
        10, width=32, depth=2, mlp_dim=64, num_heads=4, patch_size=(4, 4), scan=True, pool_type="map",
        head_zeroinit=False,
    )  # fmt: skip
    batches = images()
    return _linen(model, lambda p, x, y: classes(model.apply({"params": p}, x)[0], y), batches, batches[0][0])


def big_vision_gemma(at: Callable[[str], str]) -> Problem:
    """big_vision Gemma: einsums on its own parameters, scanned."""
    sys.path.insert(0, at("big_vision"))
    from big_vision.models.ppp import gemma

    model = gemma.Model(
        variant="tiny", width=32, depth=2, mlp_dim=64, num_heads=4, num_kv_heads=1, head_dim=8, norm_eps=1e-6,
        vocab_size=64, scan=True, remat_policy="nothing_saveable",
    )  # fmt: skip
    batches = [(ids,) for ids in tokens()]
    return _linen(model, lambda p, ids: next_token(model.apply({"params": p}, ids)[0], ids), batches, batches[0][0])


def vmoe(at: Callable[[str], str]) -> Problem:
    """vmoe: a vision transformer whose second block has experts under its own lifted vmap."""
    sys.path[:0] = [at("vmoe"), at("vision_transformer")]
    import jax
    from vmoe.nn import vit_moe

    router = {"num_selected_experts": 2, "noise_std": 1e-3, "dispatcher": {
        "name": "einsum", "batch_priority": False, "bfloat16": False, "capacity_factor": 1.5,
        "partition_spec": None}}  # fmt: skip
    encoder = {"num_layers": 2, "mlp_dim": 64, "num_heads": 4, "position_emb": {"name": "sincos2d"}, "moe": {
        "layers": (1,), "num_experts": 4, "group_size": 16, "split_rngs": True, "router": router}}  # fmt: skip
    model = vit_moe.VisionTransformerMoe(
        10, (4, 4), 32, encoder, classifier="gap", deterministic=True, head_kernel_zero_init=False
    )
    batches = images()
    rng = jax.random.key(1)

    def loss(params: Any, x: Any, y: Any) -> Any:
        logits, metrics = model.apply({"params": params}, x, rngs={"gating": rng})
        return classes(logits, y) + 0.01 * metrics["auxiliary_loss"].mean()

    return _linen(model, loss, batches, batches[0][0], gating=rng)


def hf_bert(at: Callable[[str], str]) -> Problem:
    """FlaxBertForMaskedLM of transformers below 5."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    model = transformers.FlaxBertForMaskedLM(config, input_shape=(8, 24))
    return _hugging_face(model, lambda logits, ids: classes(logits, ids))


def hf_gpt2(at: Callable[[str], str]) -> Problem:
    """FlaxGPT2LMHeadModel of transformers below 5: FlaxConv1D, a tied head applied from outside."""
    import transformers

    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    return _hugging_face(transformers.FlaxGPT2LMHeadModel(config, input_shape=(8, 24)), next_token)


def _hugging_face(model: Any, loss: Callable[..., Any]) -> Problem:
    batches = [(ids,) for ids in tokens()]
    return Problem(model.params, lambda p, ids: loss(model(ids, params=p, train=False).logits, ids), batches)


def bonsai_qwen3(at: Callable[[str], str]) -> Problem:
    """bonsai Qwen3: nnx.Einsum and nnx.Linear, a cache that the call writes."""
    sys.path.insert(0, at("bonsai"))
    import jax.numpy as jnp
    from bonsai.models.qwen3 import modeling
    from flax import nnx

    config = modeling.ModelConfig(2, 64, 32, 64, 4, 8, 2, 10000, 1, 10000.0, 1e-6, False)
    model = modeling.Qwen3(config, rngs=nnx.Rngs(0))

    def call(model: Any, ids: Any) -> Any:
        cache = modeling.init_cache(config, *ids.shape, 0, jnp.float32)
        return model(ids, cache=cache, segment_ids=jnp.ones_like(ids))

    return _nnx(model, call, next_token, [(ids,) for ids in tokens()])


def bonsai_vit(at: Callable[[str], str]) -> Problem:
    """bonsai ViT: a head called "classifier", an inner layer called "linear2"."""
    sys.path.insert(0, at("bonsai"))
    from bonsai.models.vit import modeling
    from flax import nnx

    model = modeling.ViTClassificationModel(
        modeling.ModelConfig((16, 16), (4, 4), 3, 32, 0.0, 0.0, 4, 64, 1e-6, 2, 10), rngs=nnx.Rngs(0)
    )
    return _nnx(model, lambda m, x, y: m(x, rngs=None), lambda logits, x, y: classes(logits, y), images())


def haiku_mlp(at: Callable[[str], str]) -> Problem:
    """A Haiku MLP."""
    import haiku
    import jax

    model = haiku.transform(lambda x: haiku.nets.MLP([64, 64, 10])(x.reshape(len(x), -1)))
    batches = images()
    params = model.init(jax.random.key(0), batches[0][0])
    return Problem(params, lambda p, x, y: classes(model.apply(p, None, x), y), batches)


def equinox_mlp(at: Callable[[str], str]) -> Problem:
    """An Equinox MLP, vmapped over rows."""
    import equinox
    import jax

    params, static = equinox.partition(equinox.nn.MLP(768, 10, 64, 2, key=jax.random.key(0)), equinox.is_array)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return classes(jax.vmap(equinox.combine(params, static))(x.reshape(len(x), -1)), y)

    return Problem(params, loss, images())


def qwix_lora(at: Callable[[str], str]) -> Problem:
    """Qwix's LoRA on an NNX model, whose base is quantized: base and adapters are trained together here."""
    import jax.numpy as jnp
    import qwix
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.embed = nnx.Embed(64, 32, rngs=rngs)
            self.wi, self.wo = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)
            self.lm_head = nnx.Linear(32, 64, rngs=rngs)

        def __call__(self, ids: Any) -> Any:
            x = self.embed(ids)
            return self.lm_head(x + self.wo(nnx.relu(self.wi(x))))

    provider = qwix.LoraProvider(module_path="wi|wo", rank=4, alpha=4.0)
    model = qwix.apply_lora_to_model(Model(nnx.Rngs(0)), provider, jnp.zeros((8, 24), jnp.int32), rngs=nnx.Rngs(1))
    return _nnx(model, lambda m, ids: m(ids), next_token, [(ids,) for ids in tokens()])


def mnist(at: Callable[[str], str]) -> Problem:
    """flax/examples/mnist: the CNN, whose module imports TensorFlow's data sets; this builds its class alone."""
    import ast
    from functools import partial

    import jax.numpy as jnp
    from flax import nnx

    tree = ast.parse(pathlib.Path(at("flax/examples/mnist"), "train.py").read_text())
    cnn = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "CNN")
    names: dict[str, Any] = {"nnx": nnx, "partial": partial, "jnp": jnp}
    exec(compile(ast.Module([cnn], []), "train.py", "exec"), names)
    model = names["CNN"](nnx.Rngs(0))
    model.eval()
    batches = [(x.mean(-1, keepdims=True), y) for x, y in images(28)]
    return _nnx(model, lambda m, x, y: m(x, None), lambda logits, x, y: classes(logits, y), batches)


MODELS: dict[str, tuple[Callable[..., Problem], str, tuple[str, ...]]] = {
    "lm1b": (lm1b, "plain", ("flax",)),
    "seq2seq": (seq2seq, "plain", ("flax",)),
    "nnx_gemma": (nnx_gemma, "plain", ("flax",)),
    "mnist": (mnist, "plain", ("flax",)),
    "nanodo": (nanodo, "plain", ("nanodo",)),
    "big_vision_vit": (big_vision_vit, "plain", ("big_vision",)),
    "big_vision_gemma": (big_vision_gemma, "plain", ("big_vision",)),
    "vmoe": (vmoe, "plain", ("vmoe", "vision_transformer")),
    "hf_bert": (hf_bert, "hf", ()),
    "hf_gpt2": (hf_gpt2, "hf", ()),
    "bonsai_qwen3": (bonsai_qwen3, "plain", ("bonsai",)),
    "bonsai_vit": (bonsai_vit, "plain", ("bonsai",)),
    "haiku_mlp": (haiku_mlp, "plain", ()),
    "equinox_mlp": (equinox_mlp, "plain", ()),
    "qwix_lora": (qwix_lora, "plain", ()),
}
"""Model by name, its environment and the checkouts that it needs."""


# -- one model, in a process of its own --------------------------------------------------------------------------------


def train(problem: Problem, recipe: str, steps: int, check: bool) -> dict[str, Any]:
    """Train a model quantized, or in float with recipe ""; return a row of the table."""
    import jax
    import numpy as np
    import optax

    import jaxquant

    params, batches = problem.params, problem.batches
    optimizer = optax.adam(1e-3)
    opt_state = optimizer.init(params)
    row: dict[str, Any] = {"recipe": recipe}
    if recipe:
        config = {"quantization": recipe, "quant_backend": "native"}
        fn = jaxquant.quantize(problem.loss, config)
        state = fn.init(params, *batches[0])
        report = fn.report(params, *batches[0])
        mine = [each for each in report if each.weight is not None or each.is_out_of_reach]
        row |= {
            "quantized": len(report.quantized),
            "all": len(mine),
            "why": [[each.path, each.reason] for each in mine if each.recipe is None],
            "layers": [each.path for each in report.quantized],
            "other": len(report) - len(mine),
        }
    else:
        state, fn = {}, lambda params, state, *batch: problem.loss(params, *batch)

    def step(params: Any, state: Any, opt_state: Any, *batch: Any) -> Any:
        loss, (grads, seen) = jax.value_and_grad(fn, argnums=(0, 1), allow_int=True)(params, state, *batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (
            optax.apply_updates(params, updates),
            jaxquant.state.update(state, seen) if state else state,
            opt_state,
            loss,
        )

    jitted, first, losses = jax.jit(step), state, []
    for i in range(steps):
        params, state, opt_state, loss = jitted(params, state, opt_state, *batches[i % len(batches)])
        losses.append(float(loss))
    row |= {"first": losses[0], "loss": float(np.mean(losses[-len(batches) :]))}
    if not recipe:
        return row
    before, after = (
        {jax.tree_util.keystr(path): value for path, value in jax.tree.leaves_with_path(tree) if _is_history(path)}
        for tree in (first, state)
    )
    row["histories"] = len(before)
    row["advanced"] = sum(bool(np.any(np.asarray(after[key]) != np.asarray(before[key]))) for key in before)
    row |= {"check": "not asked", "served": serve(fn, params, state, batches[0])}
    if not check:
        return row
    try:
        jaxquant.coverage(step, params, state, opt_state, *batches[0], config=config).check()
        row["check"] = "ok"
    except ValueError as error:
        row["check"] = str(error).split("; leave the layer out")[0]
    return row


def _is_history(path: Any) -> bool:
    return str(getattr(path[-1], "key", "")).endswith("amax_history")


def serve(fn: Any, params: Any, state: Any, batch: tuple[Any, ...]) -> str:
    """Say whether converted parameters give the bits of the trained ones; "-" where functions cannot be converted."""
    convert = getattr(fn, "convert", None)
    if convert is None:
        return "-"
    import jax
    import numpy as np

    trained = jax.jit(fn)(params, state, *batch)
    served = jax.jit(fn)(convert(params, state, *batch), {}, *batch)
    return "same bits" if np.array_equal(trained, served) else f"differs by {abs(float(trained) - float(served)):.2g}"


def run_one(name: str, recipes: list[str], steps: int, checkouts: dict[str, str], check: bool) -> None:
    """Train one model with every recipe; print a JSON line for each."""

    def at(path: str) -> str:
        first, _, rest = path.partition("/")
        return str(pathlib.Path(checkouts[first], rest))

    problem = MODELS[name][0](at)
    for recipe in ["", *recipes]:
        try:
            row = train(problem, recipe, steps, check)
        except Exception as error:  # a row of the table is what a failure is worth here
            row = {"recipe": recipe, "error": f"{type(error).__name__}: {error}"[:600]}
        print("ROW " + json.dumps({"model": name, **row}), flush=True)


# -- all models --------------------------------------------------------------------------------------------------------


def python_of(environment: str, folder: pathlib.Path) -> str:
    """Make an environment, once, and return its interpreter."""
    at = folder / environment
    python = at / "bin" / "python"
    if not python.exists():
        venv.create(at, with_pip=True)
        base = [f"{ROOT}[aqt,qwix]", *PACKAGES[environment]]
        subprocess.run([python, "-m", "pip", "install", "-q", *base], check=True)
    return str(python)


def write_table(rows: list[dict[str, Any]]) -> str:
    """Write the rows as Markdown."""
    lines = ["| model | recipe | matmuls quantized | float, and why | loss (float) | state | check() | served |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    floats = {row["model"]: row.get("loss") for row in rows if not row["recipe"]}
    for row in rows:
        if not row["recipe"]:
            if "error" in row:
                lines.append(f"| {row['model']} | | fails without quantization | {row['error']} | | | | |")
            continue
        if "error" in row:
            lines.append(f"| {row['model']} | {row['recipe']} | fails | {row['error']} | | | | |")
            continue
        why = Counter(reason for _, reason in row["why"])
        reasons = "; ".join(f"{count} {reason}" for reason, count in why.items()) or "-"
        state = f"{row['advanced']} of {row['histories']}" if row["histories"] else "none kept"
        base = floats.get(row["model"])
        loss = f"{row['loss']:.3f}" + (f" ({base:.3f})" if base is not None else "")
        quantized = f"{row['quantized']} of {row['all']}"
        lines.append(
            f"| {row['model']} | {row['recipe']} | {quantized} | {reasons} | {loss} | {state} | {row['check']} | "
            f"{row['served']} |"
        )
    return "\n".join(lines).replace("\u2026", "...")


def keep(row: dict[str, Any], file: pathlib.Path | None) -> None:
    """Add a row to the file of rows, as soon as it is there."""
    if file is not None:
        with file.open("a") as rows:
            rows.write(json.dumps(row) + "\n")


def main() -> None:
    """Read the arguments; run the models."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkouts", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--environments", type=pathlib.Path, default=ROOT / ".environments")
    parser.add_argument("--python", default="", help="an interpreter to use for all models instead of environments")
    parser.add_argument("--no-check", action="store_true", help="leave out Coverage.check, which traces once more")
    parser.add_argument("--json", type=pathlib.Path, help="file of rows, one JSON object a line")
    parser.add_argument("--out", type=pathlib.Path, help="file of the table")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    checkouts = {
        name: str(pathlib.Path(folder).resolve()) for name, folder in (c.split("=", 1) for c in options.checkouts)
    }
    if options.one:
        run_one(options.one, options.recipes.split(","), options.steps, checkouts, not options.no_check)
        return
    rows: list[dict[str, Any]] = []
    for name in options.models.split(","):
        _, environment, needs = MODELS[name]
        if missing := [each for each in needs if each not in checkouts]:
            print(f"{name}: left out, no checkout of {missing[0]}")
            continue
        python = options.python or python_of(environment, options.environments)
        errors: list[str] = []
        command = [python, __file__, "--one", name, "--recipes", options.recipes, "--steps", str(options.steps)]
        command += ["--no-check"] * options.no_check
        environ = (
            {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
            | os.environ
            | {"PYTHONPATH": str(ROOT)}
        )
        own = []
        with subprocess.Popen(
            [*command, *options.checkouts], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            threading.Thread(target=errors.extend, args=(process.stderr,), daemon=True).start()
            for line in process.stdout:
                if line.startswith("ROW "):
                    own.append(json.loads(line[4:]))
                    keep(own[-1], options.json)
        if not own:
            told = [line.strip() for line in errors if "Error" in line]
            own = [{"model": name, "recipe": "", "error": "".join(told[-1:])[:600]}]
            keep(own[-1], options.json)
        rows += own
        print(write_table(own), flush=True)
    if options.out:
        options.out.write_text(write_table(rows) + "\n")


if __name__ == "__main__":
    main()
