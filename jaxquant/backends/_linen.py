"""Linen's linear layers, and modules that jit themselves: layers that look alike share their trace, and must not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import flax.linen as nn
import jax

LINEAR: dict[type[nn.Module], str] = {nn.Dense: "dense", nn.DenseGeneral: "dense_general", nn.Einsum: "einsum"}
"""Linen's linear layers and the name of each kind."""

# Part of the key of jit's caches: a jitted module of another path is traced for itself.
_path = jax.make_user_context(())


def kind_of(module: nn.Module) -> str | None:
    """Return the kind of a linear layer, None for any other module."""
    return next((kind for base, kind in LINEAR.items() if isinstance(module, base)), None)


@contextlib.contextmanager
def layers_apart(owner: Hashable = None) -> Iterator[None]:
    """Trace every module under ``nn.jit`` for itself, for the length of a call of a model.

    ``nn.jit`` caches by module and shapes, so of two layers that look alike the second takes the trace of the first: no
    interceptor sees it, and it runs in the recipe of the first. The path of the module joins the key of that cache.

    Args:
      owner: traces are shared with calls of the same owner only; ``object()`` shares with none.
    """
    apart = _Apart(owner)
    with apart.base, nn.intercept_methods(apart):
        yield


class _Apart:
    """Method interceptor that holds, for each call that is running, its path and the key of a jitted call below it."""

    def __init__(self, owner: Hashable) -> None:
        self._owner = owner
        self.base = contextlib.ExitStack()
        self._calls: list[tuple[tuple[str, ...], contextlib.ExitStack]] = [((), self.base)]

    def __call__(
        self, next_fun: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        module = context.module
        if context.method_name == "<lambda>":
            # nn.jit asks a module for its scope in this way, and calls the jitted function when it has it. The key
            # stays until the next one, or the end of the caller.
            path, held = self._calls[-1]
            held.close()
            held.enter_context(_path((self._owner, *path, module.name)))
            return next_fun(*args, **kwargs)
        with contextlib.ExitStack() as held:
            self._calls.append((module.path, held))
            try:
                return next_fun(*args, **kwargs)
            finally:
                self._calls.pop()
