"""Trees of models that pass quantization to their layers by hand: parameters beside the collection "aqt".

The names are MaxText's. Convert mode leaves the float kernels where they are and adds, for each, a quantized tensor at
the layer's path; these functions say which parameter each of them replaces, and take those out.
"""

from __future__ import annotations

import math
import re
from typing import Any

import jax
from flax.core import meta

from jaxquant.core.paths import join_path

Path = tuple[Any, ...]
_OP = re.compile(r"(Aqt)?(DotGeneral|Einsum|Fp8DirectDotGeneralOp|NANOOFp8DotGeneralOp|Fp8Einsum)_\d+$")


def match_aqt_and_unquantized_param(aqt_params: Any, params: Any) -> Any:
    """Return which float parameter each quantized tensor replaces.

    A tensor belongs to the layer whose path comes before the op's name (``…/AqtDotGeneral_0/qrhs/frozen``). Of that
    layer's own parameters, biases apart, it takes one with as many elements, and the several of one layer (an expert
    block's einsum kernels) go in the order of their numbers and names.

    Args:
      aqt_params: the collection "aqt", of the AQT or the native backend.
      params: the collection "params"; boxes with names of axes count as what is in them.

    Returns:
      A tree like ``aqt_params`` with a key path into ``params`` (``jax.tree_util`` keys) in the place of each tensor,
      and None in the place of anything else.

    Raises:
      ValueError: a tensor has no parameter, or two have one; lists both sides.
    """
    tensors, structure = jax.tree_util.tree_flatten_with_path(aqt_params, is_leaf=_is_tensor)
    floats = [(path, meta.unbox(value)) for path, value in _leaves(params)]
    order = sorted(range(len(tensors)), key=lambda i: [_natural(key) for key in tensors[i][0]])
    found: dict[int, Path] = {}
    for i in order:
        path, tensor = tensors[i]
        if not _is_tensor(tensor):
            continue
        layer = _layer(path)
        free = [
            (key, _shape_of(value))
            for key, value in sorted(floats, key=lambda item: [_natural(k) for k in item[0]])
            if join_path(key[:-1]) == layer
            and not join_path(key[-1:]).endswith("bias")
            and math.prod(_shape_of(value)) == math.prod(_shape(tensor))
            and key not in found.values()
        ]
        if not free:
            raise ValueError(_both_sides(f"{join_path(path)} has no float parameter", tensors, floats))
        # Tiles and scanned layers give the tensor another shape than its kernel has.
        found[i] = min(free, key=lambda item: item[1] != _shape(tensor))[0]
    return jax.tree_util.tree_unflatten(structure, [found.get(i) for i in range(len(tensors))])


def remove_quantized_params(params: Any, aqt_vars: Any) -> Any:
    """Return the parameters without the float kernels that have a quantized tensor: ``{}`` in their place.

    Args:
      params: the collection "params".
      aqt_vars: the collection "aqt" that convert mode wrote.

    Raises:
      ValueError: as ``match_aqt_and_unquantized_param``.
    """
    matched = match_aqt_and_unquantized_param(aqt_vars, params)
    gone = set(jax.tree.leaves(matched, is_leaf=lambda x: isinstance(x, tuple)))
    kept = [{} if path in gone else value for path, value in _leaves(params)]
    return jax.tree_util.tree_unflatten(jax.tree.structure(params, is_leaf=_is_box), kept)


def _leaves(params: Any) -> list[tuple[Path, Any]]:
    return jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_box)[0]


def _is_box(node: Any) -> bool:
    """Return whether it is an array with names of its axes."""
    return isinstance(node, meta.AxisMetadata)


def _is_tensor(node: Any) -> bool:
    return hasattr(node, "qvalue")


def _shape(tensor: Any) -> tuple[int, ...]:
    return _shape_of(jax.tree.leaves(tensor.qvalue)[0])


def _shape_of(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))  # a number stands for an array without axes


def _natural(key: Any) -> list[tuple[int, int | str]]:
    """Sort AqtEinsum_10 after AqtEinsum_9."""
    parts = re.split(r"(\d+)", join_path([key]))
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts if part]


def _layer(path: Path) -> str:
    ops = [index for index, key in enumerate(path) if _OP.search(join_path([key]))]
    return join_path(path[: ops[0]] if ops else path[:-1])


def _both_sides(what: str, tensors: Any, floats: Any) -> str:
    left = "".join(f"\n  {join_path(path)} {_shape(tensor)}" for path, tensor in tensors if _is_tensor(tensor))
    right = "".join(f"\n  {join_path(path)} {_shape_of(value)}" for path, value in floats)
    return f"{what}.\nquantized:{left}\nparameters:{right}"
