"""``configure_quantization`` and its handle, for models such as MaxText's that pass quantization to each layer."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax

from jaxquant.backends import load
from jaxquant.compat.maxtext.layer_op import LayerOp
from jaxquant.compat.maxtext.stored import Op, forward_config, inner_op_name, op_name
from jaxquant.config.backends import BACKENDS
from jaxquant.config.mixed_precision import DEFAULT
from jaxquant.config.quant_config import QuantConfig, is_program_config
from jaxquant.config.rules import Resolver
from jaxquant.core.paths import at_layer, join_path
from jaxquant.core.recipe import Recipe
from jaxquant.inject.faces import traced_face
from jaxquant.ops.einsum import contract_einsum
from jaxquant.state.watch import STATELESS, require_manual


class QuantMode(enum.Enum):
    """Purpose of a model: training, writing quantized parameters, or running on quantized parameters."""

    TRAIN = "train"
    CONVERT = "convert"
    SERVE = "serve"

    def __eq__(self, other: Any) -> bool:
        """Compare by name with another mode, which may be a member of AQT's enum."""
        is_mode = isinstance(other, enum.Enum) and type(other).__name__ == "QuantMode"
        return self.name == getattr(other, "name", "") if is_mode else NotImplemented

    __hash__ = enum.Enum.__hash__


def get_quant_mode(quant_mode_str: str | enum.Enum = "train") -> QuantMode:
    """Convert a string, or a member of another enum, to a mode.

    Args:
      quant_mode_str: "train", "convert" or "serve"; or a member of an enum with these names, such as AQT's enum.

    Raises:
      ValueError: the string is not the name of a mode.
    """
    if isinstance(quant_mode_str, enum.Enum):
        quant_mode_str = quant_mode_str.name.lower()
    try:
        return QuantMode(quant_mode_str)
    except ValueError:
        known = ", ".join(repr(mode.value) for mode in QuantMode)
        raise ValueError(f"quant_mode_str {quant_mode_str!r} is not a mode; use one of {known}") from None


@dataclasses.dataclass(unsafe_hash=True)
class Quantization:
    """Handle of a config for one backend and mode; only the mode can be set.

    Attributes:
      backend: key of ``BACKENDS``; the backend must have ops for layers.
      quant_mode: mode of the model. MaxText's engine sets the mode between loading, converting and serving. After the
        mode is set, functions must be jitted again.
      replicate_scale: whether the stored scales of a sharded kernel are replicated.
      resolver: resolver that returns the recipe of each layer by its path.
      base: recipe of the layers that no rule matches, or None if only a file or rules select recipes.
      layer_paths: paths of the layers that have run or been traced with this handle.
      init_operands: operands of the last initialization of an op without a path.
    """

    backend: str
    quant_mode: QuantMode
    replicate_scale: bool
    resolver: Resolver
    base: Recipe | None = None
    layer_paths: set[str] = dataclasses.field(default_factory=set, init=False, compare=False, repr=False)
    init_operands: list[Any] = dataclasses.field(default_factory=list, init=False, compare=False, repr=False)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "quant_mode":
            value = get_quant_mode(value)
        elif name in self.__dict__:
            raise dataclasses.FrozenInstanceError(f"Quantization.{name} cannot be set; only quant_mode can be set")
        object.__setattr__(self, name, value)

    @property
    def needs_apply_rngs(self) -> bool:
        """Whether ops draw random numbers when they are applied; if not, MaxText's layers omit their RNG streams."""
        return any(recipe.is_stochastic for recipe in self.resolver.recipes)

    @property
    def quant_dg(self) -> Any:
        """Config of the matmuls in AQT's layout, from which MaxText's experts read the dtypes of their grouped matmul.

        With rules or ``intmp``, a dictionary from regexes to pairs of config and tile size. The key ``"__default__"``
        has the pair of all other layers.
        """
        if self.base is not None and self.base.name != "intmp" and not self.resolver.patterns:
            return forward_config(self.backend, self.base)
        entries = {DEFAULT: self.base, **dict(self.resolver.patterns)}
        return {
            pattern: (None if recipe is None else forward_config(self.backend, recipe), _tile_size(recipe))
            for pattern, recipe in entries.items()
        }

    def check_used(self) -> None:
        """Raise if a rule matched no layer. Call this method once, after ``model.init`` or the first trace.

        Before that, the layers are unknown, because the handle records a layer only when the layer runs.

        Raises:
          ValueError: see ``Resolver.check_used``.
        """
        self.resolver.check_used(sorted(self.layer_paths))

    def dot_general_cls(self, mesh_axes: tuple[str | None, ...] = ()) -> Callable[[], nn.Module]:
        """Return the argument ``dot_general_cls`` of a Linen layer; its module uses the recipe of the layer's path.

        Args:
          mesh_axes: logical axis names of the kernel, which the stored qvalue and scale get in serve mode.
        """
        kind = self._op_class("dot_general", _DotGeneral)
        return lambda: kind(self, tuple(mesh_axes))

    def einsum(self, mesh_axes: tuple[str | None, ...] = ()) -> Callable[..., jax.Array]:
        """Return an einsum module, called as ``module(equation, activation, weight)``. Call this inside a layer."""
        if self.is_left_to_the_trace:
            return jax.numpy.einsum
        return self._op_class("einsum", _Einsum)(self, tuple(mesh_axes))

    @property
    def is_left_to_the_trace(self) -> bool:
        """Whether ops stay in float, because ``maybe_quantize_model`` is tracing a model with the same config."""
        if self.quant_mode is not QuantMode.TRAIN:
            return False
        engine = None if traced_face.value is None else traced_face.value.engine
        return engine is not None and (engine.resolver, engine.backend.name) == (self.resolver, self.backend)

    def _op_class(self, op: Op, kind: type[_PathOp]) -> type[_PathOp]:
        """Return a class with the name of the backend's op, because Linen names modules and state after the class."""
        return _rename_class(kind, op_name(self.backend, op, self.base))


@functools.cache
def _rename_class(kind: type, name: str) -> Any:
    """Return a Linen class under another name. The class is cached, because jit's cache is keyed by class."""
    return types.new_class(name, (kind,), {}, lambda body: body.update(__module__=__name__, __doc__=kind.__doc__))


class _PathOp(nn.Module):
    """Op that runs the resolver's recipe for the path of its layer, or stays in float."""

    quantization: Quantization
    mesh_axes: tuple[str | None, ...] = ()

    def _make_op(self, out_features: int, *operands: jax.Array, name: str = "") -> LayerOp | None:
        if self.quantization.is_left_to_the_trace:
            return None
        path = join_path(self.path[:-1])
        if not self.path and self.quantization.resolver.patterns:
            if self._is_constructing(operands):
                return None  # the rules may be applied when the model is traced
            raise NotImplementedError(  # the op is in an NNX layer, which Linen cannot see
                f"rule {self.quantization.resolver.patterns[0][0]!r} is not supported by "
                "jaxquant.compat.maxtext.configure_quantization in an NNX layer, because NNX does not pass the path of "
                "the layer; call jaxquant.maybe_quantize_model(model, config) instead"
            )
        self.quantization.layer_paths.add(path)
        recipe = self.quantization.resolver(path, out_features).recipe
        if recipe is None:
            return None
        if recipe.shares_experts:
            raise NotImplementedError(
                f"quantization_share_expert_scales true at {at_layer(path)} is not supported by "
                "jaxquant.compat.maxtext.configure_quantization, which quantizes each expert separately; call "
                "jaxquant.maybe_quantize_model"
            )
        op = LayerOp(self.quantization, recipe, path, self.mesh_axes, name=name or None)
        if not name:
            nn.share_scope(self, op)  # stores the op's variables in this module's scope
        return op

    def _is_constructing(self, operands: tuple[jax.Array, ...]) -> bool:
        """Return whether the layer is being constructed.

        The constructor of MaxText's ``DenseGeneral`` initializes the op, and then calls it once with the same arrays.
        """
        init_operands = self.quantization.init_operands
        if self.is_initializing():
            init_operands[:] = operands
            return True
        is_same = bool(init_operands) and all(a is b for a, b in zip(init_operands, operands, strict=True))
        init_operands.clear()
        return is_same

    def _guard_state(self, op: LayerOp | None, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """Return the operands unchanged; raise in training if the quant state of the op would never be updated."""
        is_training = self.quantization.quant_mode is QuantMode.TRAIN
        is_hidden = is_training and not self.path and op is not None and op.recipe.is_stateful
        return require_manual(_NOT_UPDATED, operands) if is_hidden else operands


_NOT_UPDATED = (
    "an NNX layer has quant state from jaxquant.compat.maxtext.configure_quantization, but only the "
    f"pre-training of MaxText 0.2.5 or later updates this state; {STATELESS}, or use jaxquant.maybe_quantize_model and "
    "value_and_grad"
)


class _DotGeneral(_PathOp):
    """``dot_general`` with the recipe of the layer's path."""

    @nn.compact
    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, precision: Any = None, *args: Any, **kwargs: Any
    ) -> jax.Array:
        (_, contracting), (_, batch) = dimension_numbers
        kept = [size for axis, size in enumerate(rhs.shape) if axis not in (*contracting, *batch)]
        op = self._make_op(math.prod(kept), lhs, rhs)
        compute: Any = op or jax.lax.dot_general
        return compute(*self._guard_state(op, lhs, rhs), dimension_numbers, precision, *args, **kwargs)


class _Einsum(_PathOp):
    """Einsum with the recipe of the layer's path."""

    @nn.compact
    def __call__(self, equation: str, lhs: jax.Array, rhs: jax.Array, **options: Any) -> jax.Array:
        out_features = _einsum_out_features(equation, rhs.shape)
        op = self._make_op(out_features, lhs, rhs, name=inner_op_name(self.quantization.backend))
        if op is None:
            return jax.numpy.einsum(equation, lhs, rhs, **options)
        lhs, rhs = self._guard_state(op, lhs, rhs)
        dot = lambda lhs, rhs, numbers, _: op(lhs, rhs, numbers, **options)  # noqa: E731
        is_converted = self.quantization.quant_mode is not QuantMode.TRAIN
        return contract_einsum(equation, (lhs, rhs), dot, is_converted=is_converted, **options)


def _einsum_out_features(equation: str, shape: Sequence[int]) -> int:
    """Return the number of outputs of an einsum: the product of the weight's axes that only the result shares.

    Args:
      equation: einsum equation, with the weight second.
      shape: shape of the weight.
    """
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    left, _, right = inputs.partition(",")
    before, _, after = right.partition("...")
    labels = [*before, *["..."] * (len(shape) - len(before) - len(after)), *after]
    kept = [label not in left and (label in out or not arrow) for label in labels]
    return math.prod(size for size, is_kept in zip(shape, kept, strict=False) if is_kept)


def _tile_size(recipe: Recipe | None) -> int:
    """Return the tile size of a recipe's weight, or -1 if it has no tiles."""
    weight = None if recipe is None else recipe.resolve("fwd", "rhs")
    return -1 if weight is None or weight.tile_size is None else weight.tile_size


def configure_quantization(config: Any, quant_mode_str: str = "train") -> Quantization | None:
    """Return the handle of a config, for models that pass quantization to each layer explicitly.

    MaxText calls both this function and ``maybe_quantize_model`` for every config. For the config object of a program
    such as MaxText, this function returns None if ``maybe_quantize_model`` handles the config.

    Args:
      config: any value that ``QuantConfig.from_any`` accepts.
      quant_mode_str: "train", "convert" or "serve".

    Returns:
      The handle, or None if the config quantizes nothing, or if it is MaxText's config and selects Qwix. Call
      ``check_used`` of the handle after ``model.init``; it raises an error for a rule that matches no layer.

    Raises:
      ValueError: the mode is unknown, or the backend quantizes only complete models (Qwix).
      TypeError, ValueError, NotImplementedError: the config is invalid; see ``QuantConfig.from_any``.
    """
    mode = get_quant_mode(quant_mode_str)
    program, is_program = config, is_program_config(config)
    asks_for_qwix = is_program and getattr(program, "use_qwix_quantization", False)
    config = QuantConfig.from_any(program)
    resolver, backend = config.resolver(), config.resolved_backend
    if resolver is None or backend is None or asks_for_qwix:
        return None
    if not BACKENDS[backend].has_layer_ops:
        if is_program:
            return None
        raise ValueError(
            f"quantization {config.quantization!r} runs on quant_backend {backend!r}, which quantizes whole models, "
            "not single layers; call jaxquant.maybe_quantize_model(model, config, *example_inputs)"
        )
    resolver.check_no_float_blocks()
    for recipe in resolver.recipes:
        load(backend).check(recipe)
    if is_program:
        refuse_accumulation(program, resolver)
    return Quantization(backend, mode, config.replicate_quant_scale, resolver, config.recipe())


def refuse_accumulation(program: Any, resolver: Resolver) -> None:
    """Raise if a recipe has quant state and MaxText accumulates gradients, because MaxText would average the state.

    Raises:
      ValueError: a MaxText config has more than one micro-batch, and a recipe has quant state.
    """
    steps = getattr(program, "gradient_accumulation_steps", 1)
    stateful = [recipe.name for recipe in resolver.recipes if recipe.is_stateful]
    if hasattr(program, "micro_batch_size_to_train_on") and steps > 1 and stateful:
        raise ValueError(
            f"gradient_accumulation_steps {steps} with recipe {stateful[0]!r}: MaxText averages the quant state over "
            "the micro-batches like a gradient; set gradient_accumulation_steps to 1, or use a recipe without "
            "state, such as 'fp8_full' or 'te_fp8_currentscaling'"
        )


def in_convert_mode(quant: Quantization | None) -> bool:
    """Return whether the model writes quantized parameters."""
    return quant is not None and quant.quant_mode is QuantMode.CONVERT


def in_serve_mode(quant: Quantization | None) -> bool:
    """Return whether the model runs on quantized parameters."""
    return quant is not None and quant.quant_mode is QuantMode.SERVE
