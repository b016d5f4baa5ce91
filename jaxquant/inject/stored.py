"""Converted kernels in trees that are stored: a ``QTensor`` in the parameter's place, the input's scale beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict

from jaxquant.core.qtensor import INPUT_SCALE, ConvertedKernel, is_tensor
from jaxquant.trace.paths import Name


def scale_path(path: Name) -> Name:
    """Return the path of the static scale of the activation that meets the converted parameter at a path."""
    *module, leaf = path
    return (*module, INPUT_SCALE if leaf == "kernel" else f"{leaf}_{INPUT_SCALE}")


def store_kernels(params: Mapping[Any, Any]) -> dict[str, Any]:
    """Take each ``ConvertedKernel`` of nested dicts apart: the tensor in its place, the static scale beside it."""
    stored: dict[Name, Any] = {}
    for keys, leaf in flatten_dict(params, keep_empty_nodes=True).items():
        path = tuple(map(str, keys))
        stored[path] = leaf.tensor if isinstance(leaf, ConvertedKernel) else leaf
        if isinstance(leaf, ConvertedKernel) and leaf.input_scale is not None:
            stored[scale_path(path)] = leaf.input_scale
    return unflatten_dict(stored)


def read_kernels(params: Mapping[str, Any], dtype: Callable[[Name], str]) -> dict[str, Any]:
    """Undo ``store_kernels``; ``dtype`` names the float dtype for which the kernel at a path stands."""
    leaves: dict[Name, Any] = flatten_dict(params, keep_empty_nodes=True)
    for path in [path for path, leaf in leaves.items() if is_tensor(leaf)]:
        leaves[path] = ConvertedKernel(leaves[path], dtype(path), leaves.pop(scale_path(path), None))
    return unflatten_dict(leaves)
