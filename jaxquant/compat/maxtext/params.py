"""Functions, under MaxText's names, that match the quantized kernels of the collection "aqt" with float parameters.

Convert mode keeps the float kernels in "params" and adds the quantized kernels in "aqt", each at the path of its layer.
These functions find the float parameter that each quantized kernel replaces, and remove these parameters.
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
    """Return the float parameter that each quantized tensor replaces.

    A tensor belongs to the layer whose path precedes the op's name (``…/AqtDotGeneral_0/qrhs/frozen``). The tensor
    replaces a parameter of this layer that is not a bias and has the same number of elements. If a layer has several
    tensors (the einsum kernels of an expert block), they are matched in the order of their numbers and names.

    Args:
      aqt_params: collection "aqt" of the AQT backend or the native backend.
      params: collection "params"; arrays may be in boxes with axis names.

    Returns:
      A tree like ``aqt_params``. A quantized tensor is replaced by a key path into ``params`` (``jax.tree_util`` keys),
      and any other leaf by None.

    Raises:
      ValueError: a tensor has no matching parameter, or two tensors match one parameter; the message lists all tensors
        and parameters.
    """
    tensors, structure = jax.tree_util.tree_flatten_with_path(aqt_params, is_leaf=_is_tensor)
    floats = [(path, meta.unbox(value)) for path, value in _leaves(params)]
    order = sorted(range(len(tensors)), key=lambda i: [_sort_key(key) for key in tensors[i][0]])
    found: dict[int, Path] = {}
    for i in order:
        path, tensor = tensors[i]
        if not _is_tensor(tensor):
            continue
        layer = _layer_path(path)
        free = [
            (key, _shape_of(value))
            for key, value in sorted(floats, key=lambda item: [_sort_key(k) for k in item[0]])
            if join_path(key[:-1]) == layer
            and not join_path(key[-1:]).endswith("bias")
            and math.prod(_shape_of(value)) == math.prod(_tensor_shape(tensor))
            and key not in found.values()
        ]
        if not free:
            raise ValueError(_list_both(f"{join_path(path)} has no float parameter of the same size", tensors, floats))
        # Prefer a parameter of equal shape; with tiles or scanned layers, the shapes of tensor and kernel differ.
        found[i] = min(free, key=lambda item: item[1] != _tensor_shape(tensor))[0]
    return jax.tree_util.tree_unflatten(structure, [found.get(i) for i in range(len(tensors))])


def remove_quantized_params(params: Any, aqt_vars: Any) -> Any:
    """Return the parameters with ``{}`` for each float kernel that has a quantized tensor.

    Args:
      params: collection "params".
      aqt_vars: collection "aqt" that convert mode wrote.

    Raises:
      ValueError: see ``match_aqt_and_unquantized_param``.
    """
    matched = match_aqt_and_unquantized_param(aqt_vars, params)
    gone = set(jax.tree.leaves(matched, is_leaf=lambda x: isinstance(x, tuple)))
    kept = [{} if path in gone else value for path, value in _leaves(params)]
    return jax.tree_util.tree_unflatten(jax.tree.structure(params, is_leaf=_is_box), kept)


def _leaves(params: Any) -> list[tuple[Path, Any]]:
    return jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_box)[0]


def _is_box(node: Any) -> bool:
    """Return whether a node is an array with axis names."""
    return isinstance(node, meta.AxisMetadata)


def _is_tensor(node: Any) -> bool:
    return hasattr(node, "qvalue")


def _tensor_shape(tensor: Any) -> tuple[int, ...]:
    return _shape_of(jax.tree.leaves(tensor.qvalue)[0])


def _shape_of(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))  # a Python number is an array without axes


def _sort_key(key: Any) -> list[tuple[int, int | str]]:
    """Return a key that sorts AqtEinsum_10 after AqtEinsum_9."""
    parts = re.split(r"(\d+)", join_path([key]))
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts if part]


def _layer_path(path: Path) -> str:
    ops = [index for index, key in enumerate(path) if _OP.search(join_path([key]))]
    return join_path(path[: ops[0]] if ops else path[:-1])


def _list_both(what: str, tensors: Any, floats: Any) -> str:
    left = "".join(f"\n  {join_path(path)} {_tensor_shape(tensor)}" for path, tensor in tensors if _is_tensor(tensor))
    right = "".join(f"\n  {join_path(path)} {_shape_of(value)}" for path, value in floats)
    return f"{what}.\nquantized:{left}\nparameters:{right}"
