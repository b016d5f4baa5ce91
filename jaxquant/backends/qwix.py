"""Qwix: quantize a model with the rules of ``qwix_config``. The only place that imports Qwix.

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
from jaxquant.backends.qwix_config import to_qwix
from jaxquant.config.backends import BACKENDS
from jaxquant.core.paths import join_path, layer_name
from jaxquant.core.recipe import Recipe
from jaxquant.core.rounding import content_key

require(BACKENDS["qwix"].package, BACKENDS["qwix"].series)

import qwix  # noqa: E402

_QWIX_STREAM = "stochastic_rounding"


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
