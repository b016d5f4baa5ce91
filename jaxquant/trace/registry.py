"""Registry: programs that a trace reads instead of kernels and of functions with custom derivatives.

    custom_vjp, custom_jvp   its own primal program, or the registered JAX function
    pallas_call, any other   the registered JAX function

If contractions of a registered function are quantized, it runs as that program: the quantized ops compute the forward
and backward pass, and its custom derivative is bypassed. If nothing in it is quantized, it runs unchanged.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType

from jaxquant.trace.jaxprs import called

CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call"})
"""Primitives of functions with custom derivatives."""
_registered: dict[str, Callable[..., Any] | None] = {}


def register_function(function: str | Callable[..., Any], computes: Callable[..., Any] | None = None) -> None:
    """Register a JAX program for a kernel or a function with a custom derivative, so that traces can quantize it.

    Register before you quantize the model; programs that were already traced do not change.

    Args:
      function: a ``jax.custom_vjp`` or ``jax.custom_jvp`` function, or the name of such a function, of a Pallas kernel
        or of a primitive, as the report shows it. A name matches every function with that name.
      computes: JAX function of the same arrays, in the order of the arguments of ``function``, that returns arrays of
        the same shapes and dtypes; it receives no static arguments. Under ``jax.vmap`` the arrays also have the batch
        axes, at any position, so count reduced axes from the end. None uses the function itself, without its custom
        derivative, and is correct under vmap; kernels do not support None.

    Raises:
      TypeError: ``function`` is neither a name nor such a function.
      ValueError: ``function`` is already registered, or ``computes`` is given for a closure, which cannot be told
        apart from other closures that are created at the same source line.
    """
    name = _name(function)
    if computes is not None and not isinstance(function, str) and _plain(function).__closure__:
        raise ValueError(
            f"{name!r} is a closure, and register_function cannot distinguish closures of the same source line; omit "
            "computes, or pass the values that the function closes over as arguments"
        )
    if name in _registered:
        raise ValueError(f"{name!r} is already registered; call jaxquant.trace.unregister_function first")
    _registered[name] = computes


def unregister_function(function: str | Callable[..., Any]) -> None:
    """Remove a registered function.

    Args:
      function: see ``register_function``.

    Raises:
      ValueError: the function is not registered.
    """
    name = _name(function)
    if name not in _registered:
        raise ValueError(f"{name!r} is not registered; call jaxquant.register_function first")
    del _registered[name]


def registered() -> tuple[Any, ...]:
    """Return all registered functions, as a comparable value."""
    return tuple(_registered.items())


def _name(function: str | Callable[..., Any]) -> str:
    if isinstance(function, str):
        return function
    if not isinstance(function, (jax.custom_vjp, jax.custom_jvp)):
        raise TypeError(
            f"register_function takes a jax.custom_vjp or jax.custom_jvp function, or a name, got {function!r}; "
            "register a Pallas kernel by its name in the report"
        )
    plain = _plain(function)
    return f"{plain.__name__} at {plain.__code__.co_filename}:{plain.__code__.co_firstlineno}"


def _plain(function: Any) -> Any:
    """Return the Python function inside wrappers and partials, whose source location names it."""
    plain = inspect.unwrap(function.fun)
    while isinstance(plain, functools.partial):
        plain = inspect.unwrap(plain.func)
    if not inspect.isfunction(plain):
        raise TypeError(f"register_function needs a Python function, but {function!r} wraps {plain!r}; pass a name")
    return plain


def function_name(eqn: Any) -> str:
    """Return the name of the function that an equation calls, or else the name of its primitive."""
    return _source(eqn).partition(" at ")[0]


def how_to_register() -> str:
    """Return the hint that ends the message about a function that is not analyzed, with the registered names."""
    taken = f" (registered so far: {', '.join(map(repr, _registered))})" if _registered else ""
    return f"register this function with jaxquant.register_function{taken}"


def registered_program(eqn: Any) -> Any:
    """Return the closed jaxpr of a registered function, or None if the function is not registered.

    Raises:
      ValueError: the registered function does not fit the arrays of the call.
    """
    if not _registered:
        return None
    source = _source(eqn)
    names = (source, source.partition(" at ")[0], eqn.primitive.name)
    name = next((each for each in names if each in _registered), None)
    if name is None:
        return None
    computes = _registered[name]
    if computes is None:
        if eqn.primitive.name in CUSTOM:
            return called(eqn)
        raise ValueError(
            f"{name!r} is registered without computes, but {eqn.primitive.name} has no JAX program to quantize; pass "
            "computes to register_function"
        )
    given, wanted = ([atom.aval for atom in atoms] for atoms in (eqn.invars, eqn.outvars))
    try:
        with eqn.ctx.manager:
            program = jax.make_jaxpr(computes)(*map(_typed, given))
    except (TypeError, ValueError) as error:
        raise ValueError(f"computes of the registered {name!r} does not accept {_texts(given)}: {error}") from error
    if _texts(program.out_avals) != _texts(wanted):
        raise ValueError(
            f"computes of the registered {name!r} returns {_texts(program.out_avals)} for {_texts(given)}, but must "
            f"return {_texts(wanted)} like {name!r}"
        )
    return program


def _source(eqn: Any) -> str:
    program = called(eqn) if eqn.primitive.name in CUSTOM else eqn.params.get("jaxpr")
    info = getattr(getattr(program, "jaxpr", program), "debug_info", None)
    return eqn.primitive.name if info is None else info.func_src_info


def _typed(aval: Any) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype, weak type and explicit sharding of an array."""
    return jax.ShapeDtypeStruct(
        aval.shape,
        aval.dtype,
        sharding=aval.sharding if AxisType.Explicit in aval.sharding.mesh.axis_types else None,
        weak_type=aval.weak_type,
    )


def _texts(avals: Any) -> str:
    return ", ".join(f"{each.dtype}[{','.join(map(str, each.shape))}]" for each in avals) or "nothing"
