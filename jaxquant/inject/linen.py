"""A Linen model as a face of ``jaxquant.trace``: whatever way leads into it, what it computes is traced and quantized.

    model.apply(variables, …)   ──►  pure function of (parameters, other collections, random keys, arguments)
                                          │ Engine: trace, decide by the parameters' paths, rewrite
    variables["_overwrite_with_gradient"] ┘ quant state, and as its gradient what was seen

The model becomes an instance of a subclass of its class, of the same name. ``init`` and ``apply`` of it are the float
model's under the engine, for any method. Plain Python can also call a method of the model, or of one of its
submodules, from outside: after ``bind``, in ``nn.apply``, in a larger float model. No function of variables is there
to be traced, so that these methods are wrapped, and those of the submodules when they are bound: the only place where
classes of others are touched. A thread-local mark says that a trace is at work, within which everything is the float
model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.core import unfreeze
from flax.core.scope import DenyList, in_filter

from jaxquant.backends import RANDOM_STREAM, native
from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.paths import at_layer, layer_name
from jaxquant.core.qtensor import INPUT_SCALE, ConvertedKernel, QTensor
from jaxquant.core.trees import leaves_by_path
from jaxquant.inject.layers import split_arrays, trace_init
from jaxquant.state.tree import OVERWRITE_WITH_GRADIENT
from jaxquant.trace.engine import Dialect, Engine, Traced
from jaxquant.trace.paths import Name
from jaxquant.trace.plan import Contraction

_ALL_BUT_INTERMEDIATES = DenyList("intermediates")
_DEFAULTS = {"rngs": None, "method": None, "mutable": False, "capture_intermediates": False}

# Part of the key of jit's caches too, so that a function which was traced inside a trace is traced anew outside.
_at_work = jax.make_user_context(None)


def quantize_linen(model: nn.Module, config: QuantConfig, *example_inputs: Any, **example_kwargs: Any) -> nn.Module:
    """Quantize a Linen model.

    Args:
      model: the model; it stays as it is.
      config: what is asked.
      example_inputs, example_kwargs: arguments of ``__call__``; without them the first call decides.

    Raises:
      ValueError: a rule that matches no layer, no layer at all, or a model that is quantized already.
    """
    if (before := quantized_with(model)) is not None:
        raise ValueError(
            f"{type(model).__name__} is quantized already, with {before.engine.config.quantization!r}; quantize the "
            "float model"
        )
    face = Face(config)
    if example_inputs or example_kwargs:
        face.decide(model, *example_inputs, **example_kwargs)
    return face.of(model)


@contextlib.contextmanager
def as_float(model: nn.Module) -> Iterator[None]:
    """Let a quantized model, and any other, be the float one, for the length of a context."""
    with _at_work(quantized_with(model)):
        yield


def quantized_with(model: Any) -> Face | None:
    """Return the face of a quantized Linen model, None for another."""
    return getattr(type(model), "_jaxquant_face", None)


def tracing_engine() -> Engine | None:
    """Return the engine of the model that is being traced or initialized, None where none is."""
    face = _at_work.value
    return None if face is None else face.engine


def _missing(recipe: str, path: str, field: str) -> str:
    return (
        f"recipe {recipe!r} at {at_layer(path)} keeps state in the collection '{OVERWRITE_WITH_GRADIENT}', and this "
        f"call has no {field!r} there: pass the collection to apply beside 'params'; state that was stored, or of "
        "flax's own ops, goes through jaxquant.state.with_bins"
    )


def operation_name(site: Contraction) -> str:
    """Name the state of a contraction after the op module that flax's own layers would have."""
    make = native.einsum_cls if site.is_einsum else native.dot_general_cls
    assert site.recipe is not None
    return f"{make(site.recipe).func.__name__}_0"


DIALECT = Dialect(
    what="this model",
    layers="layer",
    root_is_layer=True,
    may_extend=True,
    numbers=False,
    operation=operation_name,
    missing=_missing,
)


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A call of a Linen module as a function of arrays; equal calls share their trace."""

    face: Face
    module: nn.Module
    method: Any
    mutable: Any
    capture: Any

    def __call__(self, params: Any, rest: Mapping[str, Any], rngs: Any, args: Any, kwargs: Any) -> Any:
        variables = rest if params is None else {**rest, "params": params}
        options = _asked(rngs=rngs, method=self.method, mutable=self.mutable, capture_intermediates=self.capture)
        with _at_work(self.face):
            return _own(self.module, "apply")(self.module, variables, *args, **options, **kwargs)

    def __hash__(self) -> int:
        return hash((id(self.face), type(self.module), self.method))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Call) or self.face is not other.face:
            return False
        mine, theirs = ((each.method, each.mutable, each.capture) for each in (self, other))
        return mine == theirs and _same(self.module, other.module)


def _same(first: nn.Module, second: nn.Module) -> bool:
    """Whether two unbound modules compute the same; fields that are arrays are the same only as objects."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    for field in dataclasses.fields(first):  # pyright: ignore[reportArgumentType]
        mine, theirs = getattr(first, field.name), getattr(second, field.name)
        if mine is theirs or field.name == "parent":
            continue
        leaves = [*jax.tree.leaves(mine), *jax.tree.leaves(theirs)]
        if any(hasattr(leaf, "shape") for leaf in leaves) or mine != theirs:
            return False
    return True


class Face:
    """What the quantized modules of one model share: the engine, and the classes that were made.

    Args:
      config: what is asked.
    """

    def __init__(self, config: QuantConfig) -> None:
        self.engine = Engine(config, DIALECT, config.resolved_backend)
        self._classes: dict[tuple[type, bool], type] = {}
        self._dtypes: dict[str, str] = {}

    # -- decisions ---------------------------------------------------------------------------------------------------

    def decide(self, model: nn.Module, *inputs: Any, **kwargs: Any) -> None:
        """Decide on the trace of a call with example inputs, arrays or shapes."""
        self.engine.decide(self.trace_example(model, *inputs, **kwargs).analysis)

    def trace_example(self, model: nn.Module, *inputs: Any, **kwargs: Any) -> Traced:
        """Trace a call of the float model on parameters that are shapes only."""
        variables = unfreeze(trace_init(model, *inputs, **kwargs))
        mutable = tuple(name for name in variables if name not in ("params", OVERWRITE_WITH_GRADIENT))
        call = _Call(self, model, None, mutable or False, False)
        key = jax.eval_shape(lambda: jax.random.key(0))
        rngs = dict.fromkeys(("params", "dropout", RANDOM_STREAM), key)
        params, rest = _collections(variables)
        return self.engine.trace(call, params, (rest, rngs, inputs, kwargs))

    # -- calls -------------------------------------------------------------------------------------------------------

    def call(
        self,
        module: nn.Module,
        variables: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        rngs: Any,
        method: Any,
        mutable: Any,
        capture: Any,
        prefix: Name = (),
    ) -> Any:
        """Compute a method of an unbound module; as ``nn.Module.apply``."""
        params, rest = _collections(variables)
        params = self._with_dtypes(params, module, args, kwargs, rngs=rngs, method=method, prefix=prefix)
        given = variables.get(OVERWRITE_WITH_GRADIENT, {})
        state: Any = given
        for part in reversed(prefix):
            state = {part: state}
        is_watched = _interceptors()
        if is_watched and given:  # what watches a layer may want to see its state
            rest = {**rest, OVERWRITE_WITH_GRADIENT: given}
        call = _Call(self, module, method, _hashable_filter(mutable), capture)
        key = rngs.get(RANDOM_STREAM) if isinstance(rngs, Mapping) else None
        out = self.engine.run(
            call,
            params,
            (rest, rngs, args, dict(kwargs)),
            state,
            key,
            prefix=prefix,
            is_whole=not prefix and method in (None, "__call__"),
            # An interceptor is no part of jit's key, and what it notes belongs to this call.
            is_cached=not is_watched,
        )
        if mutable is False or not given or not in_filter(mutable, OVERWRITE_WITH_GRADIENT):
            return out
        result, changed = out
        return result, {**changed, OVERWRITE_WITH_GRADIENT: given}

    def init_state(
        self,
        module: nn.Module,
        variables: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        rngs: Any,
        method: Any,
        prefix: Name = (),
    ) -> dict[str, Any]:
        """Make the quant state of the layers that a call runs, from variables that are initialized; no arithmetic."""
        params, rest = _collections(variables)
        call = _Call(self, module, method, tuple(rest) or False, False)
        state: Any = self.engine.init(
            call,
            params,
            (rest, rngs, args, dict(kwargs)),
            prefix=prefix,
            is_whole=not prefix and method in (None, "__call__"),
        )
        for part in prefix:
            state = state.get(part, {})
        return state

    # -- converted kernels -------------------------------------------------------------------------------------------

    def convert(
        self,
        model: nn.Module,
        variables: Mapping[str, Any],
        *inputs: Any,
        known: Collection[Name] = (),
        **kwargs: Any,
    ) -> dict[str, ConvertedKernel]:
        """Convert every kernel that a call with example inputs runs quantized.

        Args:
          model: the float model.
          variables: its parameters, and the quant state of training.
          inputs, kwargs: of the call.
          known: paths of parameters that are to stay as they are.

        Returns:
          By "/"-joined path of the parameter, its ``ConvertedKernel``.
        """
        mutable = tuple(name for name in variables if name not in ("params", OVERWRITE_WITH_GRADIENT))
        call = _Call(self, model, None, mutable or False, False)
        params, rest = _collections(variables)
        rngs = dict.fromkeys(("params", "dropout", RANDOM_STREAM), jax.random.key(0))
        state = variables.get(OVERWRITE_WITH_GRADIENT, {})
        found, _ = self.engine.convert(call, params, (rest, rngs, inputs, kwargs), state, known)
        leaves = leaves_by_path(found, lambda leaf: isinstance(leaf, ConvertedKernel))
        return {path: leaf for path, leaf in leaves.items() if isinstance(leaf, ConvertedKernel)}

    def _with_dtypes(
        self, params: Any, module: nn.Module, args: Any, kwargs: Any, *, rngs: Any, method: Any, prefix: Name
    ) -> Any:
        """Return parameters whose converted kernels say the float dtype that they stand for, and their static scale."""
        leaves = leaves_by_path(params, _is_tensor)
        converted = [path for path, leaf in leaves.items() if isinstance(leaf, QTensor)]
        if not converted:
            return params
        names = {path: "/".join((*prefix, path)) for path in converted}
        if not self.engine.config.checkpoint_is_quantized:
            layer, dtype = names[converted[0]].rpartition("/")[0], leaves[converted[0]].qvalue.dtype.name
            raise ValueError(
                f"{layer_name(layer)} has a converted kernel ({dtype}) and checkpoint_is_quantized is false"
            )
        if any(name not in self._dtypes for name in names.values()):
            streams = rngs or {}
            shapes = self._shapes_of(module, args, kwargs, streams, method)
            self._dtypes |= {
                "/".join((*prefix, path)): leaf.dtype.name for path, leaf in leaves_by_path(shapes).items()
            }
        return _named_kernels(params, lambda path: self._dtypes["/".join((*prefix, *path))])

    def _shapes_of(self, module: nn.Module, args: Any, kwargs: Any, rngs: Mapping[str, Any], method: Any) -> Any:
        """Trace the initialization of the float model that a call runs; returns its parameters' shapes."""
        arrays, rebuild = split_arrays((args, dict(kwargs)))

        def initialize(key: jax.Array, arrays: list[Any]) -> Any:
            args, kwargs = rebuild(arrays)
            streams = dict.fromkeys(("params", "dropout", RANDOM_STREAM, *rngs), key)
            with _at_work(self):
                return _own(module, "init")(module, streams, *args, **_asked(method=method), **kwargs)

        return nn.meta.unbox(jax.eval_shape(initialize, jax.random.key(0), arrays)["params"])

    # -- classes -----------------------------------------------------------------------------------------------------

    def of(self, model: nn.Module) -> nn.Module:
        """Return a copy of an unbound model whose calls run quantized."""
        fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.init and f.name != "parent"}  # pyright: ignore[reportArgumentType]
        return self._class(type(model), is_model=True)(parent=None, **fields)

    def mark(self, module: nn.Module, root: nn.Module) -> None:
        """Wrap the submodules that a bound module has so far, in place: they live as long as this binding."""
        for child in module._state.children.values():  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(child, nn.Module) and quantized_with(child) is None:
                object.__setattr__(child, "__class__", self._class(type(child), is_model=False))
                object.__setattr__(child, "_jaxquant_root", root)

    def _class(self, base: type, is_model: bool) -> Any:
        if (base, is_model) not in self._classes:
            fields: dict[str, Any] = {name: _wrapped(base, name) for name in model_methods(base)}
            fields |= {"__module__": base.__module__, "__doc__": base.__doc__, "__qualname__": base.__qualname__}
            fields |= {"_jaxquant_face": self, "_jaxquant_base": base, **_BOUND, **(_MODEL if is_model else {})}
            made = types.new_class(base.__name__, (base,), {}, lambda body: body.update(fields))
            self._classes[base, is_model] = made
        return self._classes[base, is_model]


def _collections(variables: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Part the variables of a model into its parameters, None where there are none, and collections but quant state."""
    rest = {name: value for name, value in variables.items() if name not in ("params", OVERWRITE_WITH_GRADIENT)}
    return variables.get("params"), rest


def scale_name(leaf: str) -> str:
    """Return the name of the static scale of the activation that meets a converted parameter, which lies beside it."""
    return INPUT_SCALE if leaf == "kernel" else f"{leaf}_{INPUT_SCALE}"


def _is_tensor(node: Any) -> bool:
    return isinstance(node, QTensor)


def _named_kernels(tree: Any, dtype: Callable[[tuple[str, ...]], str], path: tuple[str, ...] = ()) -> Any:
    """Join each converted kernel of a tree of dicts with its float dtype and the scale that lies beside it."""
    if not isinstance(tree, Mapping):
        return tree
    scales = {scale_name(name) for name, value in tree.items() if isinstance(value, QTensor)}
    return {
        name: ConvertedKernel(value, dtype((*path, name)), tree.get(scale_name(name)))
        if isinstance(value, QTensor)
        else _named_kernels(value, dtype, (*path, name))
        for name, value in tree.items()
        if name not in scales
    }


def _hashable_filter(mutable: Any) -> Any:
    return tuple(mutable) if isinstance(mutable, (list, set)) else mutable


def _interceptors() -> bool:
    """Whether a Linen method interceptor is active. Linen has no public way to ask."""
    return bool(nn.module._global_interceptor_stack)


def model_methods(base: type) -> list[str]:
    """Return the methods that a model's own classes define, for which layers may run: ``__call__`` and public ones."""
    own = [cls for cls in reversed(base.__mro__) if cls not in nn.Module.__mro__]
    methods = {name: value for cls in own for name, value in vars(cls).items() if inspect.isfunction(value)}
    return [
        name
        for name, value in methods.items()
        if name == "__call__" or not (name == "setup" or name.startswith("_") or getattr(value, "nowrap", False))
    ]


def _wrapped(base: type, name: str) -> Callable[..., Any]:
    """Wrap a method: called from plain Python on a bound module, it is traced like a call of ``apply``."""
    plain = getattr(base, name)

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        face = quantized_with(self)
        if self.scope is None or face is None or _at_work.value is face:
            return plain(self, *args, **kwargs)
        return _call_bound(face, self, name, plain, args, kwargs)

    return method


def _call_bound(face: Face, module: Any, name: str, plain: Any, args: Any, kwargs: Any) -> Any:
    root = getattr(module, "_jaxquant_root", module)
    prefix = tuple(module.path[len(root.path) :])
    if module.is_initializing():
        with _at_work(face):
            out = plain(module, *args, **kwargs)
        if module.is_mutable_collection(OVERWRITE_WITH_GRADIENT):
            copy, variables = nn.Module.unbind(module)
            rngs = _rngs(module)
            state = face.init_state(copy, variables, args, kwargs, rngs=rngs, method=name, prefix=prefix)
            for key, value in state.items():
                module.put_variable(OVERWRITE_WITH_GRADIENT, key, value)
        return out
    copy, variables = nn.Module.unbind(module)
    mutable = module.scope.mutable
    out = face.call(
        copy,
        variables,
        args,
        kwargs,
        rngs=_rngs(module),
        method=name,
        mutable=mutable,
        capture=False,
        prefix=prefix,
    )
    if mutable is False:
        return out
    out, changed = out
    for collection, values in changed.items():
        for key, value in values.items():
            if collection != OVERWRITE_WITH_GRADIENT:
                module.put_variable(collection, key, value)
    return out


def _own(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return the float model's function: a model may have an ``init`` and an ``apply`` of its own."""
    return getattr(getattr(type(module), "_jaxquant_base", type(module)), name)


def _asked(**options: Any) -> dict[str, Any]:
    """Return the options that are not Linen's defaults; a model's own ``apply`` need not take the others."""
    return {name: value for name, value in options.items() if value is not _DEFAULTS[name]}


def _rngs(module: Any) -> dict[str, Any]:
    return {name: module.make_rng(name) for name in module.scope.rngs}


# -- what the class of a quantized model has beside its methods --------------------------------------------------------


def _init_with_output(
    self: Any,
    rngs: Any,
    *args: Any,
    method: Any = None,
    mutable: Any = _ALL_BUT_INTERMEDIATES,
    capture_intermediates: Any = False,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Initialize the float model's variables and the quant state; returns the quantized output and the variables."""
    face = self._jaxquant_face
    options = _asked(method=method, capture_intermediates=capture_intermediates)
    options |= {} if mutable is _ALL_BUT_INTERMEDIATES else {"mutable": mutable}
    if _at_work.value is face:
        return _own(self, "init_with_output")(self, rngs, *args, **options, **kwargs)
    variables = _init(self, rngs, *args, **options, **kwargs)
    given = {name: value for name, value in variables.items() if name != "intermediates"}
    out = face.call(
        self, given, args, kwargs, rngs=_streams(rngs), method=method, mutable=mutable, capture=capture_intermediates
    )
    return (out if mutable is False else out[0]), variables


def _init(
    self: Any,
    rngs: Any,
    *args: Any,
    method: Any = None,
    mutable: Any = _ALL_BUT_INTERMEDIATES,
    capture_intermediates: Any = False,
    **kwargs: Any,
) -> Any:
    """Initialize the float model's variables and the quant state, without computing the output."""
    face = self._jaxquant_face
    options = _asked(method=method, capture_intermediates=capture_intermediates)
    options |= {} if mutable is _ALL_BUT_INTERMEDIATES else {"mutable": mutable}
    if face.engine.config.checkpoint_is_quantized and _at_work.value is not face:
        raise ValueError(
            f"{type(self).__name__} with checkpoint_is_quantized true has no float kernel to initialize; convert the "
            "parameters with jaxquant.convert"
        )
    if _at_work.value is face:
        return _own(self, "init")(self, rngs, *args, **options, **kwargs)
    with _at_work(face):
        variables = _own(self, "init")(self, rngs, *args, **options, **kwargs)
    if mutable is False:
        return variables
    state = face.init_state(self, variables, args, kwargs, rngs=_streams(rngs), method=method)
    if not state or not in_filter(mutable, OVERWRITE_WITH_GRADIENT):
        return variables
    given: Any = variables.get(OVERWRITE_WITH_GRADIENT, {})
    own = _merge(unfreeze(given), state)
    return type(variables)({**variables, OVERWRITE_WITH_GRADIENT: own})


def _apply(
    self: Any,
    variables: Any,
    *args: Any,
    rngs: Any = None,
    method: Any = None,
    mutable: Any = False,
    capture_intermediates: Any = False,
    **kwargs: Any,
) -> Any:
    """Apply a method in low precision; as ``nn.Module.apply``."""
    face = self._jaxquant_face
    if _at_work.value is face or self.scope is not None:
        options = _asked(rngs=rngs, method=method, mutable=mutable, capture_intermediates=capture_intermediates)
        return _own(self, "apply")(self, variables, *args, **options, **kwargs)
    return face.call(
        self,
        variables,
        args,
        kwargs,
        rngs=_streams(rngs),
        method=method,
        mutable=mutable,
        capture=capture_intermediates,
    )


def _merge(first: Any, second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested dicts; a model may have quant state of its own ops."""
    both = {name: _merge(first[name], second[name]) for name in second if isinstance(first.get(name), Mapping)}
    return {**first, **second, **both}


def _streams(rngs: Any) -> Any:
    return rngs if rngs is None or isinstance(rngs, Mapping) else {"params": rngs}


def _getattr(self: Any, name: str) -> Any:
    """Set up the module, as Linen does, and wrap the submodules that this made."""
    value = self._jaxquant_base.__getattr__(self, name)
    _mark(self)
    return value


def _post_init(self: Any) -> None:
    self._jaxquant_base.__post_init__(self)
    _mark(self)


def _mark(self: Any) -> None:
    face = quantized_with(self)
    if face is not None and self.scope is not None and _at_work.value is not face:
        face.mark(self, getattr(self, "_jaxquant_root", self))


def _reduce(self: Any) -> tuple[Any, ...]:
    """Pickle as the float model, the config and what was decided."""
    face, base = self._jaxquant_face, self._jaxquant_base
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init and f.name != "parent"}
    return _restore, (base, fields, face.engine.config, face.engine.decisions)


def _restore(base: type, fields: dict[str, Any], config: QuantConfig, decisions: Any) -> nn.Module:
    face = Face(config)
    face.engine.decisions = decisions
    return face.of(base(**fields, parent=None))


_BOUND = {"__getattr__": nn.nowrap(_getattr), "__post_init__": _post_init}
"""What the class of any wrapped module has."""
_MODEL = {
    "init": nn.nowrap(_init),
    "init_with_output": nn.nowrap(_init_with_output),
    "apply": nn.nowrap(_apply),
    "__reduce__": nn.nowrap(_reduce),
}
"""What the class of a model has, too."""
