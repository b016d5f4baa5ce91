"""Call of an NNX module as a pure function of its variables, with the side effects of the call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from flax.linen import get_logical_axis_rules

from jaxquant.inject.faces import traced_face

Path = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class SideEffects:
    """Changes that a traced call made to its module.

    Attributes:
      changed: paths of the variables whose value changed.
      values: (path of the node, name) of the attributes whose new value is an output of the trace.
      nodes: (path of the node, name, path of the value) of the attributes that were set to an existing node.
      deleted: (path of the node, name) of the deleted attributes.
    """

    changed: tuple[Path, ...]
    values: tuple[tuple[Path, str], ...]
    nodes: tuple[tuple[Path, str, Path], ...]
    deleted: tuple[tuple[Path, str], ...]

    def repeat(self, whole: Any, changed: Sequence[Any], values: Sequence[Any]) -> None:
        """Apply the recorded changes to the module and its arguments; the trace changed only copies.

        Args:
          whole: module and arguments.
          changed, values: new values of the variables and of the attributes, in order.
        """
        if self == SideEffects((), (), (), ()):
            return
        nodes = dict(nnx.iter_graph(whole))
        for path, value in zip(self.changed, changed, strict=True):
            nodes[path].set_raw_value(value)
        for path, attribute in self.deleted:
            delattr(nodes[path], attribute)
        for (path, attribute), value in zip(self.values, values, strict=True):
            setattr(nodes[path], attribute, nnx.data(value) if _holds_arrays(value) else value)
        for path, attribute, other in self.nodes:
            setattr(nodes[path], attribute, nodes[other])


@dataclasses.dataclass(frozen=True)
class Call:
    """Method of a module as a function of its variables; equal calls share their trace."""

    face: Any
    kind: type
    name: str
    graph: Any = dataclasses.field(hash=False)  # may be unhashable, because a module may have a list as a field
    kinds: tuple[type, ...]  # types of the arguments, because graphs with 1 and True compare equal
    rules: Any = dataclasses.field(default_factory=lambda: tuple(get_logical_axis_rules()))

    def __call__(self, params: Any, quant: Any, rest: Any) -> Any:
        module, args, kwargs = whole = nnx.merge(self.graph, nnx.State({0: params}), quant, rest)
        nodes = dict(nnx.iter_graph(whole))
        raw = {path: node.get_raw_value() for path, node in nodes.items() if isinstance(node, nnx.Variable)}
        had = {path: _attributes(node) for path, node in nodes.items()}
        with traced_face(self.face):
            out = getattr(self.kind, self.name)(module, *args, **kwargs)
        changed = {path: now for path, old in raw.items() if (now := nodes[path].get_raw_value()) is not old}
        has = {path: _attributes(node) for path, node in nodes.items()}
        deleted = [(path, name) for path, old in had.items() for name in old if name not in has[path]]
        known = {id(node): path for path, node in nodes.items()}
        values, moved = {}, []
        for path, name, value in _new_attributes(had, has):
            if isinstance(value, (nnx.Variable, nnx.Pytree)) and id(value) in known:
                moved.append((path, name, known[id(value)]))
            else:
                values[path, name] = value
        effects = SideEffects(tuple(changed), tuple(values), tuple(moved), tuple(deleted))
        return effects, [*changed.values()], nnx.split((tuple(values.values()), out))


def _attributes(node: Any) -> dict[str, Any]:
    """Return the attributes of a module or other NNX node, without NNX's internal attributes."""
    if not isinstance(node, nnx.Pytree):
        return {}
    return {name: value for name, value in vars(node).items() if not name.startswith("_pytree__")}


def _new_attributes(had: Mapping[Path, Any], has: Mapping[Path, Any]) -> Iterator[tuple[Path, str, Any]]:
    """Yield node path, name and value of every attribute whose value is a new object."""
    for path, now in has.items():
        old = had[path]
        yield from ((path, name, value) for name, value in now.items() if name not in old or value is not old[name])


def _holds_arrays(value: Any) -> bool:
    return bool(jax.tree.leaves(nnx.split((value,))[1]))
