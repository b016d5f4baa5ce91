"""Linear layers: which a Linen model has, and what a config makes of each layer of any model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax.core import meta

from jaxquant.backends._linen import kind_of, layers_apart
from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.matmul_dtypes import MatmulDtypes
from jaxquant.core.paths import join_path
from jaxquant.core.recipe import Matmul, Recipe, Side
from jaxquant.inject.faces import STREAMS
from jaxquant.ops.einsum import plan_einsum


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """One linear layer.

    Attributes:
      path: "/"-joined module path, relative to the model.
      kind: "dense", "dense_general" or "einsum".
      kernel_shape: shape of its kernel, without layers that nn.scan stacks.
      out_features: number of outputs.
      parameter_shapes: shapes of all its parameters by name, without layers that nn.scan stacks.
      input_shapes: shape of its input in each of its calls.
      precision, preferred_element_type: as the module has them.
    """

    path: str
    kind: str
    kernel_shape: tuple[int, ...]
    out_features: int
    parameter_shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    input_shapes: tuple[tuple[int, ...], ...] = ()
    precision: Any = None
    preferred_element_type: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class LayerReport:
    """What a config makes of one linear layer.

    Attributes:
      path, kernel_shape: as in ``Layer``.
      recipe: its config string, None where the layer stays float.
      backend: "aqt", "qwix" or "native", None for float.
      dtypes: operand dtypes of the three matmuls, by "fwd", "dlhs" and "drhs", which are also properties with their
        text, such as "int8 × int8"; "float (int8 dequantized)" is a float matmul on values that were rounded to int8.
      reason: which rule or default decided.
    """

    path: str
    recipe: str | None
    backend: str | None
    kernel_shape: tuple[int, ...]
    dtypes: dict[str, MatmulDtypes]
    reason: str

    @property
    def fwd(self) -> str:
        return str(self.dtypes["fwd"])

    @property
    def dlhs(self) -> str:
        return str(self.dtypes["dlhs"])

    @property
    def drhs(self) -> str:
        return str(self.dtypes["drhs"])


def out_features(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Count the outputs of a linear layer from its attributes and call."""
    if kind_of(module) == "einsum":
        inputs = args[0] if args else kwargs["inputs"]
        return einsum_out_features(einsum_equation(module, args, kwargs), inputs.ndim, module.shape)  # pyright: ignore[reportAttributeAccessIssue]
    features = module.features  # pyright: ignore[reportAttributeAccessIssue]
    return math.prod(features) if isinstance(features, (tuple, list)) else int(features)


def einsum_out_features(equation: str, lhs_ndim: int, rhs_shape: Sequence[int]) -> int:
    """Count the outputs of an einsum with a weight: the product of the weight's axes that the activation has not."""
    plan = plan_einsum(equation, lhs_ndim, len(rhs_shape))
    (_, contract), (_, batch) = plan.dimension_numbers
    kept = [size for axis, size in enumerate(rhs_shape) if axis not in plan.rhs_sum]
    return math.prod(size for axis, size in enumerate(kept) if axis not in (*contract, *batch))


def einsum_equation(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Find the equation of an nn.Einsum, given to the module or to the call."""
    called = args[1] if len(args) > 1 else kwargs.get("einsum_str")
    return nn.merge_param("einsum_str", module.einsum_str, called)


def relative_path(module: nn.Module, root: tuple[str, ...]) -> str:
    """Spell a bound module's path as users write it in rules."""
    return join_path(module.path[len(root) :])


def linen_layers(model: nn.Module, *example_inputs: Any, **example_kwargs: Any) -> list[Layer]:
    """List the linear layers that a call of a model runs, in order, without computing anything.

    Args:
      model: an unbound Linen module.
      example_inputs, example_kwargs: arguments of its ``__call__``; arrays may be ``jax.ShapeDtypeStruct``.
    """
    layers: dict[str, Layer] = {}

    def record(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        module, kind = context.module, kind_of(context.module)
        out = next_fun(*args, **kwargs)
        if kind is not None and context.method_name == "__call__":
            path = relative_path(module, ())
            parameters = meta.unbox(module.variables["params"])
            shapes = {name: tuple(value.shape) for name, value in parameters.items()}
            before = layers[path].input_shapes if path in layers else ()
            layers[path] = Layer(
                path,
                kind,
                shapes["kernel"],
                out_features(module, args, kwargs),
                tuple(shapes.items()),
                (*before, tuple((args[0] if args else kwargs["inputs"]).shape)),
                module.precision,  # pyright: ignore[reportAttributeAccessIssue]
                getattr(module, "preferred_element_type", None),
            )
        return out

    with layers_apart(owner=object()), nn.intercept_methods(record):
        trace_init(model, *example_inputs, **example_kwargs)
    return list(layers.values())


def split_arrays(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Part a tree into its arrays and a function that puts arrays back among the rest."""
    leaves, structure = jax.tree.flatten(tree)
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def rebuild(arrays: list[Any]) -> Any:
        given: Iterator[Any] = iter(arrays)
        filled = [next(given) if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]
        return jax.tree.unflatten(structure, filled)

    return [leaf for leaf, array in zip(leaves, is_array, strict=True) if array], rebuild


def trace_init(model: nn.Module, *example_inputs: Any, **example_kwargs: Any) -> Any:
    """Trace a model's initialization and return the shapes of its variables."""
    arrays, rebuild = split_arrays((example_inputs, example_kwargs))

    def initialize(key: jax.Array, arrays: list[Any]) -> Any:
        args, kwargs = rebuild(arrays)
        rngs = dict.fromkeys(STREAMS, key)
        return model.init(rngs, *args, **kwargs)

    return jax.eval_shape(initialize, jax.random.key(0), arrays)


def matmul_dtypes(recipe: Recipe | None) -> dict[str, MatmulDtypes]:
    """Return the operand dtypes that a recipe asks for, by "fwd", "dlhs" and "drhs"; None is a float layer."""
    if recipe is None:
        return {name: MatmulDtypes() for name in ("fwd", "dlhs", "drhs")}

    def dtype(matmul: Matmul, side: Side) -> str | None:
        spec = recipe.resolve(matmul, side)
        return None if spec is None else spec.codec or spec.dtype

    return {name: MatmulDtypes.of_specs(dtype(name, "lhs"), dtype(name, "rhs")) for name in ("fwd", "dlhs", "drhs")}


def refuse_nothing(config: QuantConfig, reasons: dict[str, str], found: bool) -> None:
    """Refuse a model in which a config quantizes nothing: that is never what was asked."""
    if found:
        return
    what = "; ".join(f"{path}: {reason}" for path, reason in reasons.items()) or "it has no linear layer"
    raise ValueError(f"quantization {config.quantization!r} would quantize no layer of this model ({what})")
