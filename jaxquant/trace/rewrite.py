"""Rewrite: evaluate a jaxpr with its chosen contractions replaced by quantized ops.

Other equations are evaluated by ``jax.core.eval_jaxpr``, each as its own jaxpr, so that this file needs no knowledge of
their primitives. An equation that contains a chosen contraction is rebuilt: jit (with its shardings; donation, layouts
and compiler options of inner jits are dropped), remat with its policy, scan, while, cond and shard_map. An equation
that reads a converted kernel is also rebuilt; structural steps are replayed on the kernel (``converted.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer, eval_jaxpr
from jax.extend import source_info_util
from jax.extend.core import DebugInfo, Jaxpr, Literal
from jax.sharding import PartitionSpec, Sharding

from jaxquant.core.qtensor import QTensor
from jaxquant.core.quant_state import LayerState
from jaxquant.core.rounding import Seed, fold
from jaxquant.core.sharding import platform_of
from jaxquant.ops.gradients import forward_only
from jaxquant.trace import converted
from jaxquant.trace.jaxprs import JITS, REMATS, called, scan_counts
from jaxquant.trace.plan import Contraction, Key, Plan, SharedActivation
from jaxquant.trace.registry import CUSTOM, function_name

Array = jax.Array
States = Mapping[Key, LayerState]
Contract = Callable[[Contraction, Any, list[Any], LayerState, Seed | None, Any], Array]
Share = Callable[[Contraction, Array, list[LayerState]], Any]


class Rewriter:
    """Evaluator of plans.

    Args:
      contract: function that computes the equation of a chosen contraction.
      share: function of (first contraction, activation, states) that quantizes an activation for all contractions that
        share it, or None if each quantizes it.
    """

    def __init__(self, contract: Contract, share: Share | None = None) -> None:
        self._contract, self._share = contract, share
        self._jits: dict[Any, Any] = {}
        self._plain: dict[Any, Any] = {}

    def evaluate(
        self, plan: Plan, consts: Sequence[Any], args: Sequence[Any], states: States, noise: Seed | None
    ) -> list[Any]:
        """Evaluate a jaxpr.

        Args:
          plan: plan of the jaxpr.
          consts, args: constants and inputs of the jaxpr.
          states: quant state of every chosen contraction in it, by key.
          noise: seeds of its chosen contractions in the order of the program, one array for each number, or None.
        """
        jaxpr = plan.jaxpr
        known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        known.update(zip(jaxpr.invars, args, strict=True))
        last_reader = {atom: index for index, eqn in enumerate(jaxpr.eqns) for atom in _variables(eqn.invars)}
        kept = set(_variables(jaxpr.outvars))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else known[atom]

        seen, shared = 0, {}
        for index, eqn in enumerate(jaxpr.eqns):
            ins = [read(atom) for atom in eqn.invars]
            site, inner = plan.sites.get(index), plan.inner.get(index, [])
            chosen = int(site is not None and site.recipe is not None) + sum(len(each.chosen) for each in inner)
            has_loop = index not in plan.programs and any(each.has_loop for each in inner)
            if chosen or has_loop or any(isinstance(each, QTensor) for each in ins):
                own = noise and _slice_noise(noise, seen, chosen)
                seen += chosen
                program = plan.programs.get(index)
                outs = self._replace(eqn, site, inner, ins, states, own, program, shared)
            else:
                outs = self._evaluate(eqn, _rounded(eqn, plan, ins))
            if plan.opened and eqn.primitive.name == "while":
                outs = [forward_only(plan.opened, each) for each in outs]
            known.update(zip(eqn.outvars, outs, strict=True))
            for atom in _variables(eqn.invars):
                if last_reader[atom] == index and atom not in kept:
                    known.pop(atom, None)
        return [read(atom) for atom in jaxpr.outvars]

    def _evaluate(self, eqn: Any, ins: list[Any]) -> Sequence[Any]:
        """Evaluate an equation unchanged. Equal ones share an inlined jit, so that jax differentiates them once."""
        if eqn.effects or not any(isinstance(each, Tracer) for each in ins) or (key := _key_of(eqn)) is None:
            return evaluate_equation(eqn, ins)
        info = eqn.source_info
        if key not in self._plain:
            bare = eqn.replace(source_info=info.replace(name_stack=type(info.name_stack)()))
            self._plain[key] = jax.jit(functools.partial(evaluate_equation, bare), inline=True)
        stack = source_info_util.current_name_stack() + info.name_stack
        with source_info_util.user_context(info.traceback, name_stack=stack), eqn.ctx.manager:
            return self._plain[key](ins)

    def _replace(
        self,
        eqn: Any,
        site: Contraction | None,
        inner: list[Plan],
        ins: list[Any],
        states: States,
        noise: Seed | None,
        program: Any,
        shared: dict[SharedActivation, Any],
    ) -> Sequence[Any]:
        """Compute an equation again, in its name scopes and the context in which it was traced.

        ``program`` is the program that replaces a registered function, or None. ``shared`` holds the activations of
        this jaxpr that are already quantized for several contractions.
        """
        stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
            if site is not None and site.recipe is not None:
                prepared = self._prepared(site, ins, states, shared)
                key = noise and Seed(*(jax.lax.index_in_dim(each, 0, keepdims=False) for each in noise))
                return [self._contract(site, eqn, ins, states[site.key], key, prepared)]
            name = eqn.primitive.name
            if not inner:
                return [converted.replay(eqn, ins[0], evaluate_equation)]
            if name in CUSTOM and program is None:  # reads only converted kernels, which have no derivative
                program = called(eqn)
            if program is not None:
                return self._program(eqn, self._body(inner[0], program), ins, states, noise)
            kind = "jit" if name in JITS else "remat" if name in REMATS else name
            return getattr(self, f"_{kind}")(eqn, inner, ins, states, noise)

    def _body(self, plan: Plan, program: Any) -> functools.partial[list[Any]]:
        """Return the function of (inputs, states, noise) that evaluates a nested program."""
        return functools.partial(self.evaluate, plan, getattr(program, "consts", ()))

    def _program(self, eqn: Any, body: Any, ins: list[Any], states: States, noise: Seed | None) -> list[Any]:
        """Evaluate the program that replaces a registered function.

        Raises:
          NotImplementedError: it combines values that differ between the devices of a shard_map with values that do
            not.
        """
        try:
            return body(ins, states, noise)
        except (TypeError, ValueError) as error:
            if not any(atom.aval.manual_axis_type.varying for atom in eqn.invars) or "varying" not in str(error):
                raise
            raise NotImplementedError(
                f"computes of the registered {function_name(eqn)!r} combines values that differ between the devices of "
                "a shard_map with values that are equal on all devices, such as initial zeros of a loop; omit computes "
                "in register_function, or pass check_vma=False to jax.shard_map"
            ) from error

    def _prepared(self, site: Contraction, ins: list[Any], states: States, shared: dict[SharedActivation, Any]) -> Any:
        """Return the shared quantized activation, or None if this contraction quantizes its own.

        On TPUs each contraction quantizes its own: one cast then writes a copy for each reader in the layout that its
        matmul needs. A shared copy would make XLA transpose weights and gradients instead, which costs more.
        """
        shared_activation = site.shared_activation
        if shared_activation is None or self._share is None or site.side is None:
            return None
        if isinstance(ins[site.side], QTensor) or platform_of(ins[1 - site.side]) == "tpu":
            return None
        if shared_activation not in shared:
            given = [states[key] for key in shared_activation.keys]
            shared[shared_activation] = self._share(site, ins[1 - site.side], given)
        return shared[shared_activation]

    def _jit(self, eqn: Any, plans: list[Plan], ins: list[Any], states: States, noise: Seed | None) -> Sequence[Any]:
        """Call a jit, created once for each (jaxpr, decisions): equal layers are traced and lowered once."""
        (plan,), inner, params = plans, called(eqn), eqn.params
        kinds = tuple(isinstance(each, QTensor) for each in ins)
        cached = (id(inner), plan.signature, kinds, noise is None)
        if cached not in self._jits:
            keys, body = list(plan.stacks), self._body(plan, inner)

            def call(args: list[Any], given: list[Any], noise: Seed | None) -> list[Any]:
                return body(args, dict(zip(keys, given, strict=True)), noise)

            call.__name__ = call.__qualname__ = params.get("name", eqn.primitive.name)
            options: dict[str, Any] = {"inline": params.get("inline", False)}
            placed = [
                [each if isinstance(each, Sharding) else None for each in params.get(f"{side}_shardings", ())]
                for side in ("in", "out")
            ]
            placed[0] = [converted.part_shardings(each, place) for each, place in zip(ins, placed[0], strict=False)]
            if any(placed[0]) or any(placed[1]):
                options |= {"in_shardings": (placed[0], None, None), "out_shardings": placed[1]}
            self._jits[cached] = jax.jit(call, **options), inner  # keeps the jaxpr alive, so that its id is not reused
        return self._jits[cached][0](ins, [states[each] for each in plan.stacks], noise)

    def _remat(self, eqn: Any, plans: list[Plan], ins: list[Any], states: States, noise: Seed | None) -> Sequence[Any]:
        options = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
        return jax.checkpoint(self._body(plans[0], called(eqn)), **options)(ins, _states_of(states, plans), noise)

    def _scan(self, eqn: Any, plans: list[Plan], ins: list[Any], states: States, noise: Seed | None) -> Sequence[Any]:
        """Build a scan that slices the state of the weights that it slices; other state is the same in every step."""
        (plan,), params = plans, eqn.params
        consts, carries = scan_counts(params)
        given, carry, slices = ins[:consts], ins[consts : consts + carries], ins[consts + carries :]
        slices = [each.stacked((params["length"],)) if isinstance(each, QTensor) else each for each in slices]
        over = [each for each, stack in plan.stacks.items() if any(level == plan.level for level, _ in stack)]
        fixed = {each: states[each] for each in plan.stacks if each not in over}
        evaluate = self._body(plan, params["jaxpr"])

        def body(carry: list[Any], step: Any) -> tuple[list[Any], list[Any]]:
            slices, sliced, index = step
            mine = fixed | dict(zip(over, sliced, strict=True))
            outs = evaluate([*given, *carry, *slices], mine, noise and fold(noise, index))
            return outs[:carries], outs[carries:]

        steps = (slices, [states[each] for each in over], noise and np.arange(params["length"], dtype=np.uint32))
        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, made = jax.lax.scan(body, carry, steps, **options)
        return [*carry, *made]

    def _while(self, eqn: Any, plans: list[Plan], ins: list[Any], states: States, noise: Seed | None) -> Sequence[Any]:
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        test, body = map(self._body, plans, (eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]))
        given, parts = ins[first : first + second], _split_noise(noise, plans)
        return jax.lax.while_loop(
            lambda carry: test([*ins[:first], *carry], states, parts[0])[0],
            lambda carry: body([*given, *carry], states, parts[1]),
            ins[first + second :],
        )

    def _cond(self, eqn: Any, plans: list[Plan], ins: list[Any], states: States, noise: Seed | None) -> Sequence[Any]:
        bodies = zip(map(self._body, plans, eqn.params["branches"]), _split_noise(noise, plans), strict=True)
        branches = [functools.partial(body, noise=own) for body, own in bodies]
        return jax.lax.switch(ins[0], branches, ins[1:], _states_of(states, plans))

    def _shard_map(
        self, eqn: Any, plans: list[Plan], ins: list[Any], states: States, noise: Seed | None
    ) -> Sequence[Any]:
        params, given = eqn.params, _states_of(states, plans)
        manual = set(params["newly_manual_axes"])
        places = {site.key: _state_spec(site, plans[0].level, manual) for site in plans[0].chosen}
        args_specs = list(map(converted.part_specs, ins, params["in_specs"]))
        return jax.shard_map(
            self._body(plans[0], params["jaxpr"]),
            mesh=params["mesh"],
            in_specs=(args_specs, places, PartitionSpec()),
            out_specs=list(params["out_specs"]),
            check_vma=params["check_vma"],
            axis_names=manual,
        )(ins, given, noise)


def _rounded(eqn: Any, plan: Plan, ins: list[Any]) -> list[Any]:
    """On TPUs, round a float32 input of a scan's body to bfloat16 precision before its cast to bfloat16.

    The TPU compiler moves the cast of a weight's slice out of the loop, which stores a bfloat16 copy of all layers'
    weights. It does not move the cast of a rounded value.
    """
    is_cast = eqn.primitive.name == "convert_element_type" and eqn.params["new_dtype"] == "bfloat16"
    if plan.level and is_cast and eqn.invars[0] in plan.jaxpr.invars and ins[0].dtype == "float32":
        return [jax.lax.reduce_precision(ins[0], 8, 7)] if platform_of(ins[0]) == "tpu" else ins
    return ins


def _state_spec(site: Contraction, level: int, manual: set[str]) -> PartitionSpec:
    """Return the partition spec of a contraction's state in a shard_map: split like its experts."""
    if site.recipe is None or site.recipe.shares_experts or not site.split:
        return PartitionSpec()
    scans = sum(each > level for each, _ in site.stack)
    own = (tuple(name for name in names if name in manual) for names in site.split)
    return PartitionSpec(*[None] * scans, *(names or None for names in own))


def _split_noise(noise: Seed | None, plans: list[Plan]) -> list[Seed | None]:
    """Split noise among consecutive plans."""
    counts = [len(plan.chosen) for plan in plans]
    return [noise and _slice_noise(noise, sum(counts[:index]), count) for index, count in enumerate(counts)]


def _slice_noise(noise: Seed, first: int, count: int) -> Seed:
    """Return the seeds of ``count`` consecutive contractions."""
    return Seed(*(jax.lax.slice_in_dim(each, first, first + count) for each in noise))


def _states_of(states: States, plans: list[Plan]) -> dict[Key, Any]:
    return {each: states[each] for plan in plans for each in plan.stacks}


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(atom for atom in atoms if not isinstance(atom, Literal)))


def _key_of(eqn: Any) -> Any:
    """Return a key that is equal for equations that compute the same, or None if a parameter is unhashable."""
    atoms = tuple(
        (atom.aval, np.asarray(atom.val).tobytes() if isinstance(atom, Literal) else eqn.invars.index(atom))
        for atom in eqn.invars
    )
    options = tuple(
        (name, type(each), repr(each) if isinstance(each, float | np.floating) else each)
        for name, each in eqn.params.items()
    )
    key = eqn.primitive, atoms, options, eqn.ctx
    try:
        hash(key)
    except TypeError:
        return None
    return key


def evaluate_equation(eqn: Any, ins: list[Any]) -> Sequence[Any]:
    """Evaluate an equation unchanged."""
    given = {atom: value for atom, value in zip(eqn.invars, ins, strict=True) if not isinstance(atom, Literal)}
    names = tuple("" for _ in given), tuple("" for _ in eqn.outvars)
    info = DebugInfo("jaxquant.quantize", str(eqn.primitive), *names)
    jaxpr = Jaxpr([], list(given), list(eqn.outvars), [eqn], eqn.effects, info)
    return eval_jaxpr(jaxpr, [], *given.values())
