"""Converted kernels in a traced function: checks, and replay of structural steps; ``kernels.py`` converts them.

    leaf ── steps ──► weight as its op reads it ── quantization of the op ──► QTensor ── steps undone ──► leaf
    leaf (QTensor) ── the same steps, on qvalues and scales ──► contraction, without a float kernel

``analysis.py`` finds the steps and ``structure.py`` runs them. In a trace, a converted kernel is an abstract array of
the float shape and dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxquant.backends import Backend
from jaxquant.backends._weights import check_converted
from jaxquant.core.blocks import BlocksError
from jaxquant.core.paths import layer_name
from jaxquant.core.qtensor import QTensor
from jaxquant.core.recipe import TensorSpec
from jaxquant.trace.analysis import Analysis
from jaxquant.trace.flow import Route
from jaxquant.trace.kernels import as_converted
from jaxquant.trace.plan import Contraction, Key
from jaxquant.trace.structure import dtype_read, steps_of

Array = jax.Array


def abstract_leaf(leaf: Any, path: str = "") -> Any:
    """Return the abstract value of a leaf in a trace; a converted kernel becomes an array of its float shape and dtype.

    Raises:
      TypeError: a ``QTensor`` does not record the float dtype that it replaces; names the path.
    """
    if not isinstance(leaf, QTensor):
        return leaf
    dtype = jnp.dtype(leaf.float_dtype(f"parameter {path!r}"))
    if leaf.codec is not None:
        return jax.ShapeDtypeStruct(leaf.shape, dtype)
    return jax.eval_shape(lambda qvalue: qvalue.astype(dtype), leaf.qvalue)


def check_served(
    analysis: Analysis, leaves: Sequence[Any], backend: Backend, *, must_be_converted: bool = False
) -> frozenset[Key]:
    """Check that each converted kernel is only moved, reshaped or read by its quantized contraction.

    Args:
      analysis: analysis of the function, with decisions.
      leaves: parameters.
      backend: backend that quantizes.
      must_be_converted: whether a quantized layer with a float weight is an error (``checkpoint_is_quantized``).

    Returns:
      Keys of the contractions with a converted kernel, which need no quant state.

    Raises:
      NotImplementedError: another operation reads a converted kernel; names the layer and the operation.
      ValueError: a converted kernel is read in float, a recipe or dtype does not match, or a weight is float with
        ``must_be_converted``.
    """
    converted = {index for index, leaf in enumerate(leaves) if isinstance(leaf, QTensor)}
    if not converted and not must_be_converted:
        return frozenset()
    float_readers = list(analysis.readers.float_readers())
    for leaf, reader in float_readers:
        if leaf in converted and isinstance(reader, Contraction) and reader.recipe is None:
            dtype = leaves[leaf].qvalue.dtype.name
            raise ValueError(
                f"{layer_name(reader.path)} has a converted kernel ({dtype}), but stays in float ({reader.reason}); "
                "use the config of the conversion"
            )
        if leaf in converted and isinstance(reader, str):
            layer = layer_name(analysis.path([leaf]))
            raise NotImplementedError(
                f"{layer} uses a converted kernel in {reader}, but a converted kernel supports only casts, "
                "transposes, reshapes that keep the blocks and slices of a scan before the quantized contraction; "
                "leave the layer in float with a rule"
            )
    served, read_otherwise = set[Key](), {leaf for leaf, _ in float_readers}
    routes = {site: site.route for site in analysis.plan.chosen if isinstance(site.route, Route)}
    for site, route in routes.items():
        if route.leaf in converted:
            served.add(site.key)
            _check_recipe(site, leaves[route.leaf], backend)
            _check_dtype(site, route, leaves[route.leaf])
    for site, route in routes.items() if must_be_converted else ():
        assert site.recipe is not None
        if route.leaf not in read_otherwise and site.key not in served and site.recipe.fwd.rhs is not None:
            raise ValueError(
                f"{layer_name(site.path)} has a float kernel, but checkpoint_is_quantized is true; convert the "
                f"parameters to {site.recipe.name!r} with jaxquant.convert"
            )
    return frozenset(served)


def _check_recipe(site: Contraction, kernel: QTensor, backend: Backend) -> None:
    """Raise if a kernel was converted with another recipe. Kernels with a codec are checked by their own op.

    Raises:
      ValueError: names the layer, the format of its kernel and the format that its recipe requires.
    """
    assert site.recipe is not None
    left, right = site.recipe.fwd.lhs, site.recipe.fwd.rhs
    if isinstance(right, TensorSpec) and right.codec is not None:
        return
    is_scaled = isinstance(left, TensorSpec) and left.scaling in ("delayed", "static")
    has = kernel.qvalue.dtype.name, kernel.input_scale is not None
    wanted = right.dtype if isinstance(right, TensorSpec) else "float", is_scaled
    texts = [f"{dtype} {'with an' if scaled else 'without an'} input_scale" for dtype, scaled in (has, wanted)]
    check_converted(site.path, texts[0], repr(site.recipe.name), texts[1])
    if isinstance(right, TensorSpec) and right.granularity == "per_tensor" and site.weight_axes[1]:
        return  # the op checks whether experts share a scale
    if (made := as_converted(backend, site, abstract_leaf(kernel))) is not None:
        check_converted(site.path, _scales(kernel), repr(site.recipe.name), _scales(made))


def _scales(kernel: QTensor) -> str:
    scale, outer = kernel.scale, kernel.outer_scale
    return f"{scale.dtype.name} scales {tuple(scale.shape)}{'' if outer is None else f', outer scales {outer.shape}'}"


def _check_dtype(site: Contraction, weight: Route, kernel: QTensor) -> None:
    """Raise if a kernel was quantized in another dtype than this call reads it in."""
    dtype = dtype_read(weight.steps, kernel.float_dtype())
    if kernel.read_as not in (None, dtype):
        raise ValueError(
            f"{layer_name(site.path)} was converted with its kernel in {kernel.read_as}, but this call uses the kernel "
            f"in {dtype}; use the same layer and input dtypes as at conversion, or convert the parameters again"
        )


def replay(eqn: Any, kernel: QTensor, evaluate: Any) -> QTensor:
    """Apply a structural equation to a converted kernel.

    Args:
      eqn: equation.
      kernel: operand of the equation.
      evaluate: function (equation, operands) -> results, for arrays.

    Raises:
      NotImplementedError: the equation is not structural, or would split or merge blocks that share a scale.
    """
    name, shape = eqn.primitive.name, kernel.shape
    if name in ("pvary", "pcast"):
        return jax.tree.map(lambda part: evaluate(eqn, [part])[0], kernel)
    if name in ("sharding_constraint", "reshard", "mesh_cast"):
        return dataclasses.replace(kernel, qvalue=evaluate(eqn, [kernel.qvalue])[0])
    if (steps := steps_of(eqn)) is None:
        raise NotImplementedError(f"a converted kernel of shape {shape} does not support {name}; use a float kernel")
    for step in steps:
        try:
            kernel = step(kernel)
        except BlocksError as error:
            raise NotImplementedError(f"a converted kernel of shape {shape} does not support {name}: {error}") from None
    return kernel


def part_specs(leaf: Any, spec: Any) -> Any:
    """Return the partition specs of a kernel's parts from the float kernel's spec; axes of size 1 are not split."""
    if not isinstance(leaf, QTensor):
        return spec

    def fit(part: Array) -> PartitionSpec:
        entries = [*spec, *[None] * (part.ndim - len(spec))]
        return PartitionSpec(*(name if n > 1 else None for name, n in zip(entries, part.shape, strict=False)))

    return jax.tree.map(fit, leaf)


def part_shardings(leaf: Any, sharding: Any) -> Any:
    """Return the shardings of a kernel's parts, from the sharding of the float kernel; see ``part_specs``."""
    if not isinstance(leaf, QTensor) or sharding is None:
        return sharding
    if not isinstance(sharding, NamedSharding):
        return None
    return jax.tree.map(lambda spec: NamedSharding(sharding.mesh, spec), part_specs(leaf, sharding.spec))
