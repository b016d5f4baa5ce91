"""Qwix: translate a recipe to Qwix rules and quantize a model with them. The only place that imports Qwix.

What Qwix does in its own way, under every recipe:

- It divides by the scale, so ``TensorSpec.reciprocal`` True differs in the last bit of a qvalue. Scales have the dtype
  of the tensor (bfloat16 in a bfloat16 model).
- ``MatmulSpec.shards`` cuts the **last** contraction axis of the weight gradient (of a batch of sequences: the
  sequence), where the other backends cut the first, and blocks of fewer than 128 elements are dequantized before the
  matmul.
- Both backward matmuls round with the same noise.
- ``precision`` and ``preferred_element_type`` of the replaced operations are dropped; ``maybe_quantize_model`` refuses
  layers that have one.
- An operand counts as the weight when it is a parameter of the module, derived from one by unary operations, or **of
  the same shape as one**. An activation of the kernel's shape stops with Qwix's ``AssertionError: lhs and rhs cannot be
  both weights.``; ``maybe_quantize_model`` refuses it by name where the example has that shape. The other backends take
  the roles from the call and do not mind.

Qwix replaces functions of jax while a model runs, so a matmul inside a jitted function (``jnp.matmul``, ``x @ w``) can
come out of jax's cache quantized or not, as whoever traced it first had it. The layers that are quantized here do not
take that way: ``nn.Dense`` and ``nn.DenseGeneral``, and their NNX twins, call ``jax.lax.dot_general``; ``nn.Einsum``
and ``nnx.Einsum`` call ``jnp.einsum``, which Qwix runs without jit.

Tested with the series in ``jaxquant.config.backends``; everything imported is public there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from jaxquant.backends._linen import kind_of, layers_apart
from jaxquant.backends._versions import require
from jaxquant.backends.base import RANDOM_STREAM
from jaxquant.backends.honours import Asked, Honours, Lack, any_value, check_honoured, only, refuse
from jaxquant.config.backends import BACKENDS
from jaxquant.core.calibration import Calibration
from jaxquant.core.dtypes import element
from jaxquant.core.paths import join_path, layer_name
from jaxquant.core.recipe import FORWARD, MatmulSpec, Recipe, TensorSpec
from jaxquant.core.rounding import content_key

require(BACKENDS["qwix"].package, BACKENDS["qwix"].series)

import qwix  # noqa: E402

_QWIX_STREAM = "stochastic_rounding"
_ALL_AXES = tuple(range(16))


_refuse = functools.partial(refuse, "Qwix")


# -- what Qwix honours, field by field ---------------------------------------------------------------------------------


def _granularity(asked: Asked) -> Lack | None:
    return Lack("tiles along every contraction axis") if asked.value == "per_tile" else only("per_tensor")(asked)


def _calibration(asked: Asked) -> Lack | None:
    method = asked.spec.calibration
    if method.method == "fixed" and asked.spec.granularity != "per_tensor":
        return Lack("fixed range per channel")
    if not method.is_symmetric and (not asked.place.startswith("fwd") or _has_quantized_backward(asked.recipe)):
        return Lack(f"asymmetric calibration {method} beside a quantized backward matmul")
    return only("minmax", "rms", "fixed")(asked)


def _scaling(asked: Asked) -> Lack | None:
    return Lack("delayed scaling") if asked.value == "delayed" else Lack()


def _rounding(asked: Asked) -> Lack | None:
    if not asked.is_gradient:
        return Lack("stochastic rounding of other than gradients")
    if element(asked.spec.dtype).kind == "float":
        return Lack(f"stochastic rounding to {asked.spec.dtype}")
    return only("stochastic")(asked)


def _accumulator(asked: Asked) -> Lack | None:
    specs = [_source(asked.recipe, asked.place, side) for side in ("lhs", "rhs")]
    integers = all(spec is not None and element(spec.dtype).kind == "int" for spec in specs)
    if asked.value == "int32" and integers:
        return None
    return Lack(f"choice of the accumulator (asked {asked.value})", place=f"{asked.place}_lhs")


def _shards(asked: Asked) -> Lack | None:
    return None if asked.place == "drhs" else Lack("shards outside the weight gradient", place=f"{asked.place}_lhs")


_FP8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
HONOURS: Honours = {
    Recipe: {
        "name": any_value,
        # Its mask ignores the schedule and groups along the output axis.
        "sparsity": lambda asked: Lack("scheduled N:M sparsity along the contraction axis", place="fwd_rhs"),
    },
    MatmulSpec: {"lhs": only(FORWARD), "rhs": only(FORWARD), "accumulator": _accumulator, "shards": _shards},
    TensorSpec: {
        "dtype": only("int8", "int4", "float4_e2m1fn", *_FP8),
        "granularity": _granularity,
        "scaling": _scaling,
        "rounding": _rounding,
        "reciprocal": any_value,
    },
    Calibration: {"method": _calibration, "factor": any_value, "minimum": any_value, "maximum": any_value},
}
"""The fields of a recipe that Qwix honours, alone. ``to_qwix`` refuses what does not go together."""


def _has_quantized_backward(recipe: Recipe) -> bool:
    return any((recipe.dlhs.lhs, recipe.dlhs.rhs, recipe.drhs.lhs, recipe.drhs.rhs))


def _source(recipe: Recipe, name: str, side: str) -> TensorSpec | None:
    """Return the spec behind an operand, through FORWARD."""
    spec = getattr(getattr(recipe, name), side)
    if spec == FORWARD:
        return recipe.fwd.rhs if name == "dlhs" else recipe.fwd.lhs  # pyright: ignore[reportReturnType]
    return spec


def _dtype(spec: TensorSpec | None) -> Any:
    return None if spec is None else getattr(jnp, spec.dtype)


def to_qwix(recipe: Recipe) -> dict[str, Any]:
    """Translate a recipe to keyword arguments of ``qwix.QtRule``.

    Args:
      recipe: the numbers.

    Raises:
      NotImplementedError: Qwix cannot do, or would ignore, what an operand asks; names the recipe, the operand and what
        would do.

    Source: ``QtRule`` and the fields of its ``additional_qt_config``.
    """
    check_honoured("Qwix", HONOURS, recipe)
    if recipe.fwd.rhs is None:
        raise _refuse(recipe, "fwd_rhs", "recipe with a float weight")
    act, weight = recipe.fwd.lhs, recipe.fwd.rhs
    assert isinstance(weight, TensorSpec)
    assert act is None or isinstance(act, TensorSpec)
    rule: dict[str, Any] = {"weight_qtype": _dtype(weight), "weight_calibration_method": str(weight.calibration)}
    # QtRule has one switch for the scales of all operands; the config beneath has one each.
    extra: dict[str, Any] = {"rhs_disable_channelwise_axes": weight.granularity == "per_tensor"}
    if act is not None:
        rule |= {"act_qtype": _dtype(act), "act_calibration_method": str(act.calibration)}
        extra["lhs_disable_channelwise_axes"] = act.granularity == "per_tensor"
    if not _has_quantized_backward(recipe):
        return rule | {"additional_qt_config": extra}

    residuals = {"dlhs": recipe.dlhs.rhs, "drhs": recipe.drhs.lhs}
    reuses = {name: spec == FORWARD for name, spec in residuals.items()}
    if len(set(reuses.values())) != 1:
        place = "drhs_lhs" if reuses["dlhs"] else "dlhs_rhs"
        raise _refuse(recipe, place, "backward matmul that reuses the forward's tensor beside one that does not")
    grads = {"dlhs": recipe.dlhs.lhs, "drhs": recipe.drhs.rhs}
    for name, grad in grads.items():
        if not isinstance(grad, TensorSpec) and residuals[name] is not None:
            raise _refuse(
                recipe, f"{name}_{'lhs' if name == 'dlhs' else 'rhs'}", "float gradient by a quantized tensor"
            )
    first = next(grad for grad in grads.values() if isinstance(grad, TensorSpec))
    rule["bwd_qtype"] = _dtype(first)
    extra["use_original_residuals"] = not reuses["dlhs"]
    for name, grad in grads.items():
        residual = residuals[name]
        if isinstance(grad, TensorSpec):
            extra |= {
                f"{name}_grad_qtype": _dtype(grad),
                f"{name}_grad_calibration_method": str(grad.calibration),
                f"{name}_grad_disable_channelwise_axes": grad.granularity == "per_tensor",
            }
        else:
            extra[f"{name}_grad_qtype"] = None
        if isinstance(residual, TensorSpec):
            extra |= {
                f"{name}_residual_qtype": _dtype(residual),
                f"{name}_residual_calibration_method": str(residual.calibration),
                f"{name}_residual_disable_channelwise_axes": residual.granularity == "per_tensor",
            }
    if recipe.drhs.shards != 1:
        rule["bwd_weight_grad_tile_size"] = _Share(recipe.drhs.shards, recipe.name)
    if recipe.is_stochastic:
        # One noise element for each element of the gradient; by default Qwix draws one for a whole row.
        rule |= {"bwd_stochastic_rounding": "uniform", "channelwise_noise_axes": _ALL_AXES}
        for name, grad in grads.items():
            if isinstance(grad, TensorSpec) and grad.rounding == "nearest":
                extra[f"{name}_stochastic_rounding_noise_fn"] = None
    return rule | {"additional_qt_config": extra}


class _Share(float):
    """The share ``1 / count`` of an axis that a tile has, with an error where the axis does not divide.

    Qwix rounds the size that it computes from the share, and so would cut 8 rows in 4 blocks for a count of 5.
    """

    def __new__(cls, count: int, recipe_name: str) -> _Share:
        share = super().__new__(cls, 1 / count)
        share.count, share.recipe_name = count, recipe_name
        return share

    count: int
    recipe_name: str

    def __rmul__(self, size: Any) -> float:
        if size % self.count:
            raise ValueError(
                f"quantization_local_shard_count {self.count} of {self.recipe_name!r} does not divide the last "
                f"contraction axis of the weight gradient, which has size {size}; use a divisor of it, or 1"
            )
        return size / self.count


def _rules(recipes: Mapping[str, Recipe]) -> list[qwix.QtRule]:
    """Make one rule a recipe, matching exactly the paths that have it."""
    groups: dict[Recipe, list[str]] = {}
    for path, recipe in recipes.items():
        groups.setdefault(recipe, []).append(path)
    return [
        qwix.QtRule(
            module_path="|".join(re.escape(path) for path in paths),
            op_names=("dot_general", "einsum"),
            **to_qwix(recipe),
        )
        for recipe, paths in groups.items()
    ]


def _with_streams(paths: frozenset[str], next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Hand the random stream ``quant`` to Qwix under the name that it asks for, while one of ``paths`` runs.

    While parameters are initialized there is no gradient to round, and "params" stands in; Linen counts draws for each
    name, so the parameters do not change.
    """
    scope, path = context.module.scope, join_path(context.module.path)
    if scope is not None and path in paths and _QWIX_STREAM not in scope.rngs:
        source = RANDOM_STREAM if RANDOM_STREAM in scope.rngs else "params"
        if source not in scope.rngs or (source == "params" and not context.module.is_initializing()):
            raise ValueError(
                f"the recipe of {layer_name(path)} rounds stochastically and the model was applied without the random "
                f"stream {RANDOM_STREAM!r}; pass rngs={{{RANDOM_STREAM!r}: key}} to apply, and list it in split_rngs "
                "of nn.scan"
            )
        scope.rngs[_QWIX_STREAM] = scope.rngs[source]
        scope.rng_counters[_QWIX_STREAM] = 0
    return next_fun(*args, **kwargs)


def _only_known(paths: frozenset[str], next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Refuse a linear layer that no rule was made for; Qwix would leave it in float without a word."""
    if kind_of(context.module) is not None and context.method_name == "__call__":
        path = join_path(context.module.path)
        if path not in paths:
            raise ValueError(
                f"{layer_name(path)} is not one that the example call ran ({', '.join(sorted(paths))}), so Qwix has no "
                "rule for it; quantize the outermost model with a __call__ that runs every layer, or use quant_backend "
                "'native'"
            )
    return next_fun(*args, **kwargs)


def quantize_linen(
    model: nn.Module,
    recipes: Mapping[str, Recipe],
    methods: Sequence[str] = ("__call__",),
    layers: Iterable[str] | None = None,
) -> nn.Module:
    """Quantize the linear layers of a Linen model with Qwix.

    Args:
      model: the model; it stays as it is.
      recipes: "/"-joined path of each linear layer to quantize, and its recipe. No other module is touched.
      methods: methods of the model that run quantized.
      layers: paths of all its linear layers; another one that runs is refused.

    Raises:
      NotImplementedError: see ``to_qwix``.
      ValueError: while applying: a recipe rounds stochastically and the stream ``quant`` is missing, or a linear layer
        runs that is none of ``layers``.
    """
    if not recipes:
        return model
    quantized = qwix.quantize_model(model, qwix.QtProvider(_rules(recipes)), methods=methods)
    quantized = _apart(quantized, frozenset(recipes.items()), methods)
    noisy = frozenset(path for path, recipe in recipes.items() if recipe.is_stochastic)
    if noisy:
        quantized = _intercepted(quantized, functools.partial(_with_streams, noisy), methods)
    if layers is not None:
        quantized = _intercepted(quantized, functools.partial(_only_known, frozenset(layers)), methods)
    return quantized


# jit caches by function and shapes. This is part of their key: what a jitted function inside a model has in its cache
# from other recipes, or from a call outside the model, is not taken.
_active_recipes = jax.make_user_context(None)


class _NnxProvider(qwix.QtProvider):
    """Round stochastically with noise from a layer's own operands.

    Qwix would draw it from an ``nnx.Rngs`` hung on every module, whose counters change in the middle of a forward pass:
    nnx.scan with broadcast variables and nnx.remat refuse that.
    """

    def _create_dot_general_qt_config(self, rule: qwix.QtRule, op_id: str, lhs: Any, rhs: Any) -> Any:
        if rule.bwd_stochastic_rounding is None:
            return super()._create_dot_general_qt_config(rule, op_id, lhs, rhs)
        plain = dataclasses.replace(rule, bwd_stochastic_rounding=None)
        config = super()._create_dot_general_qt_config(plain, op_id, lhs, rhs)
        lhs_bits, rhs_key = jax.random.bits(_key_of(lhs)), _key_of(rhs)
        noise = _Noise(jax.random.fold_in(rhs_key, lhs_bits))
        chosen = rule.additional_qt_config or {}
        fields = ("dlhs_stochastic_rounding_noise_fn", "drhs_stochastic_rounding_noise_fn")
        return dataclasses.replace(config, **{name: chosen.get(name, noise) for name in fields})


def _key_of(x: Any) -> Any:
    return content_key(jax.lax.stop_gradient(x))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Noise:
    """Uniform noise in [-0.5, 0.5) of a shape; a pytree, as Qwix hands it through its custom derivative."""

    key: Any

    def __call__(self, shape: tuple[int, ...]) -> Any:
        return jax.random.uniform(self.key, shape, jnp.float32, -0.5, 0.5)


def quantize_nnx(model: nnx.Module, recipes: Mapping[str, Recipe], methods: Sequence[str] = ("__call__",)) -> Any:
    """Quantize linear layers of an NNX model with Qwix.

    They run quantized in calls of the model's methods, ``methods`` that is; a layer called by itself is float.

    Args:
      model: the model; it stays as it is.
      recipes: "/"-joined path of each linear layer to quantize, and its recipe. No other module is touched.
      methods: methods of the model that run quantized.

    Raises:
      NotImplementedError: see ``to_qwix``.
    """
    # Qwix runs a model once to make statistics, of which training with dynamic scales has none.
    # It quantizes one method of a copy; one provider for all copies, and a method may call another.
    provider, chosen = _NnxProvider(_rules(recipes)), frozenset(recipes.items())
    copies: Any = [qwix.quantize_model(model, provider, methods=(name,), skip_nnx_init=True) for name in methods]

    def wrap(method: Any) -> Any:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _active_recipes(chosen):
                return method(self, *args, **kwargs)

        return call

    fields = {name: wrap(getattr(type(copy), name)) for name, copy in zip(methods, copies, strict=True)}
    quantized, kind = copies[0], type(copies[0])
    # plain_class: what the model was, for converting it.
    fields |= {"__module__": kind.__module__, "plain_class": type(model)}
    quantized.__class__ = type(kind.__name__, (kind,), fields)
    return quantized


def _apart(model: nn.Module, recipes: Hashable, methods: Sequence[str]) -> nn.Module:
    """Return a copy of the model that shares no trace with other recipes, nor a layer with another."""

    @contextlib.contextmanager
    def alone() -> Iterator[None]:
        with _active_recipes(recipes), layers_apart():
            yield

    return _within(model, alone, methods)


def _intercepted(model: nn.Module, interceptor: Any, methods: Sequence[str]) -> nn.Module:
    """Return a copy of the model whose methods run with an interceptor."""
    return _within(model, lambda: nn.intercept_methods(interceptor), methods)


def _within(
    model: nn.Module, context: Callable[[], contextlib.AbstractContextManager[Any]], methods: Sequence[str]
) -> nn.Module:
    """Return a copy of the model whose methods run in a context."""
    kind = type(model)

    def wrap(name: str) -> Any:
        method = getattr(kind, name)

        @functools.wraps(method)
        def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with context():
                return method(self, *args, **kwargs)

        return run

    shared = model.copy()
    shared.__class__ = type(kind.__name__, (kind,), {name: wrap(name) for name in methods})
    return shared
