"""Paths of layers and of leaves in a tree, as users write them in rules and as errors name them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax


def join_path(keys: Iterable[Any]) -> str:
    """Return the "/"-joined path of names, indices or keys of a jax tree."""
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


def layer_name(path: str) -> str:
    """Return how an error names a layer: ``layer 'a/b'``, or ``the root layer`` where a model is a layer itself."""
    return f"layer {path!r}" if path else at_layer(path)


def at_layer(path: str) -> str:
    """Return how an error names the place of a layer: ``'a/b'``, or ``the root layer``."""
    return repr(path) if path else "the root layer"
