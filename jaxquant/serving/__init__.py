"""Serving: what a trained model needs to answer."""

from jaxquant.serving.kv_cache import KVCache

__all__ = ["KVCache"]
