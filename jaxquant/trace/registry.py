"""Registry: programs that a trace reads in place of kernels and of functions with a derivative of their own.

    custom_vjp, custom_jvp   its own primal program, or the jax function that was registered
    pallas_call, any other   the jax function that was registered

A registered function whose contractions are quantized runs as that program, forward and backward by the quantized ops:
its own derivative is not asked any more. One of which nothing is quantized runs as it was written.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType

CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})
"""Primitives of functions with derivatives of their own."""
_registered: dict[str, Callable[..., Any] | None] = {}


def register_function(function: str | Callable[..., Any], computes: Callable[..., Any] | None = None) -> None:
    """Register what a function with a derivative of its own, or a kernel, computes, so that traces quantize it.

    Call it before the model is quantized: a program that was traced already stays what it is.

    Args:
      function: a ``jax.custom_vjp`` or ``jax.custom_jvp`` function; or the name of one, of a Pallas kernel or of a
        primitive, as the report has it. A name is that of every function so called.
      computes: a function of jax's of the same arrays, those in the arguments of ``function`` in order, that returns
        arrays of the same shapes and dtypes; arguments that are static are not handed to it. Under
        ``jax.vmap`` the arrays have the batch's axes too, wherever vmap put them, so that what reduces over an axis has
        to count them from the end. None reads the function itself, without its derivative, and is right under vmap; a
        kernel cannot be read so.

    Raises:
      TypeError: neither a name nor such a function.
      ValueError: it is registered already; ``computes`` for one of several functions that a program makes at one place
        of its source.
    """
    name = _name(function)
    if computes is not None and not isinstance(function, str) and _plain(function).__closure__:
        raise ValueError(
            f"{name!r} is a closure, and register_function cannot tell it from others made at the same place: register "
            "it without a function that says what it computes, or make what it closes over an argument"
        )
    if name in _registered:
        raise ValueError(f"{name!r} is registered already; take it back with jaxquant.trace.unregister_function first")
    _registered[name] = computes


def unregister_function(function: str | Callable[..., Any]) -> None:
    """Take back what was registered.

    Args:
      function: as for ``register_function``.

    Raises:
      ValueError: it is not registered.
    """
    name = _name(function)
    if name not in _registered:
        raise ValueError(f"{name!r} is not registered")
    del _registered[name]


def registered() -> tuple[Any, ...]:
    """Return what is registered, as a value to compare."""
    return tuple(_registered.items())


def _name(function: str | Callable[..., Any]) -> str:
    if isinstance(function, str):
        return function
    if not isinstance(function, (jax.custom_vjp, jax.custom_jvp)):
        raise TypeError(
            f"register_function takes a jax.custom_vjp or jax.custom_jvp function, or a name, got {function!r}; a "
            "Pallas kernel is registered by the name that the report has"
        )
    plain = _plain(function)
    return f"{plain.__name__} at {plain.__code__.co_filename}:{plain.__code__.co_firstlineno}"


def _plain(function: Any) -> Any:
    """Return the Python function behind wrappers and partials, whose place in the source names it."""
    plain = inspect.unwrap(function.fun)
    while isinstance(plain, functools.partial):
        plain = inspect.unwrap(plain.func)
    if not inspect.isfunction(plain):
        raise TypeError(f"register_function takes derivatives of a Python function, and {function!r} wraps {plain!r}")
    return plain


def own_program(eqn: Any) -> Any:
    """Return the program of a function with a derivative of its own."""
    return eqn.params["fun_jaxpr" if eqn.primitive.name == "custom_vjp_call_jaxpr" else "call_jaxpr"]


def function_name(eqn: Any) -> str:
    """Return the name of the function behind an equation, that of its primitive where it has none."""
    return _source(eqn).partition(" at ")[0]


def how_to_register() -> str:
    """Return the end of the reason for which a function is not read, with the names that are registered so far."""
    taken = f" (registered so far: {', '.join(map(repr, _registered))})" if _registered else ""
    return f"jaxquant.register_function says what it computes{taken}"


def registered_program(eqn: Any) -> Any:
    """Return the program that a registered function computes, closed; None for a function that is not registered.

    Raises:
      ValueError: what was registered does not fit the function's arrays.
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
            return own_program(eqn)
        raise ValueError(
            f"{name!r} is registered without a function that says what it computes, and {eqn.primitive.name} has no "
            "program to read; give register_function one"
        )
    given, wanted = ([atom.aval for atom in atoms] for atoms in (eqn.invars, eqn.outvars))
    try:
        with eqn.ctx.manager:
            program = jax.make_jaxpr(computes)(*map(_typed, given))
    except (TypeError, ValueError) as error:
        raise ValueError(f"what is registered for {name!r} does not take its {_texts(given)}: {error}") from error
    if _texts(program.out_avals) != _texts(wanted):
        raise ValueError(
            f"what is registered for {name!r} returns {_texts(program.out_avals)} of {_texts(given)}, and the function "
            f"returns {_texts(wanted)}"
        )
    return program


def _source(eqn: Any) -> str:
    program = own_program(eqn) if eqn.primitive.name in CUSTOM else eqn.params.get("jaxpr")
    info = getattr(getattr(program, "jaxpr", program), "debug_info", None)
    return eqn.primitive.name if info is None else info.func_src_info


def _typed(aval: Any) -> jax.ShapeDtypeStruct:
    """Describe an array with what its type says, such as where explicit axes cut it."""
    return jax.ShapeDtypeStruct(
        aval.shape,
        aval.dtype,
        sharding=aval.sharding if AxisType.Explicit in aval.sharding.mesh.axis_types else None,
        weak_type=aval.weak_type,
    )


def _texts(avals: Any) -> str:
    return ", ".join(f"{each.dtype}[{','.join(map(str, each.shape))}]" for each in avals) or "nothing"
