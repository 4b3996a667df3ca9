"""The plan of inlining: the graphs that call, new names, and the order of effects.

For each graph that calls: which calls are replaced, which stay and why, and how large
the result becomes.

A body keeps its own names where they are free, below the scope that the call was given.
Where they are not, the whole body moves into a scope that is named after its function.
Automatic names, such as `NoOp` or `Identity_2`, are worth no scope: they get another
number, unless they are most of the body's names.

A call runs all of its body, and whoever reads a result or waits for the call can rely
on that. Once the body stands in the caller's place, they can rely only on the nodes
that lie on their way: `find_ties` says which nodes are tied to them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from geutil.errors import TransformError
from geutil.graph import op_types, protos
from geutil.graph.protos import (
    BodyNode,
    Effects,
    FlatBody,
    FunctionCall,
    Instance,
    Library,
    flat_body,
)
from geutil.graph.types import scope_basename, scope_dirname
from geutil.graph.walks import control_references, data_inputs, node_name

_NUMBER = re.compile(r"_\d+$")
_VERSION = re.compile(r"v\d+$")
_ILLEGAL = re.compile(r"[^A-Za-z0-9_.-]+")
_KIND = re.compile(r"^__(inference|forward|backward)_(?=.)")
_LONGEST = 1000
"""Characters of a name beyond which it is not searched for a type of op."""


def is_automatic(name: str, op: str) -> bool:
    """Return whether a name says no more than the type of its op.

    Example:
        >>> from geutil.bodies.inlining_plan import is_automatic
        >>> is_automatic("add_3", "AddV2"), is_automatic("conv/add_3", "AddV2")
        (True, False)
    """
    plain = _NUMBER.sub("", name).replace("_", "").lower()
    return "/" not in name and plain == _VERSION.sub("", op.replace("_", "").lower())


def call_scope(name: str, op: str) -> str:
    """Return the scope that a call gives its body: its name, unless it is automatic."""
    # A name of more than a thousand characters is none that anybody reads: below it,
    # the scopes start anew.
    if len(name) > _LONGEST:
        return ""
    basename = scope_basename(name)
    plain = _NUMBER.sub("", basename)
    if plain in op_types.CALLS or plain in (op, readable(op)) or basename == op:
        return scope_dirname(name)
    return f"{name}/"


def readable(function: str) -> str:
    """Return the name that a function had in its source, fit for a scope.

    Example:
        >>> from geutil.bodies.inlining_plan import readable
        >>> readable("__inference_dense_layer_call_fn_1234")
        'dense_layer_call_fn'
    """
    name = function
    while _KIND.match(name):
        name = _NUMBER.sub("", _KIND.sub("", name))
    name = _ILLEGAL.sub("_", name).strip("_.-")
    return name or "call"


@dataclass(frozen=True)
class Claim:
    """A body that asks for names."""

    scope: str  # The scope to put it in, with a slash at its end, or nothing.
    fallback: str  # The name of the scope below that for when names are taken.
    names: Sequence[str]  # The names of its nodes, as the body has them.
    automatic: frozenset[str]  # Those among them that say nothing.
    mostly_automatic: bool  # Whether that holds for most nodes, callees' included.


class Namespace:
    """The names that are taken in a graph."""

    def __init__(self, used_names: Iterable[str]) -> None:
        self._taken = set(used_names)
        self._scopes: set[str] = set()
        self._numbers: dict[str, int] = {}

    def unique(self, name: str) -> str:
        """Take `name`, or the next free one with a number."""
        if name in self._taken:
            name = self._next(_NUMBER.sub("", name), self._taken)
        self._taken.add(name)
        return name

    def claim(self, claims: Sequence[Claim]) -> list[dict[str, str]]:
        """Return the names of each body's nodes; bodies in each other's way move."""
        name_counts = Counter(c.scope + name for c in claims for name in c.names)
        return [self._claim(c, name_counts) for c in claims]

    def _claim(self, claim: Claim, name_counts: Counter[str]) -> dict[str, str]:
        scope = claim.scope
        clashes = [
            name
            for name in claim.names
            if scope + name in self._taken or name_counts[scope + name] > 1
        ]
        if clashes and (
            claim.mostly_automatic or not claim.automatic.issuperset(clashes)
        ):
            scope = self._free_scope(scope + claim.fallback, claim.names)
        # Those that keep their names take them before a numbered one can.
        free_names = [n for n in claim.names if scope + n not in self._taken]
        result = dict.fromkeys(claim.names, "")
        for name in free_names:
            result[name] = scope + name
            self._taken.add(scope + name)
        for name in claim.names:
            result[name] = result[name] or self.unique(scope + name)
        return result

    def _free_scope(self, scope: str, names: Sequence[str]) -> str:
        while (
            scope in self._scopes
            or scope in self._taken
            or any(f"{scope}/{name}" in self._taken for name in names)
        ):
            scope = self._next(_NUMBER.sub("", scope), self._scopes)
        self._scopes.add(scope)
        return f"{scope}/"

    def _next(self, base: str, used_names: set[str]) -> str:
        """Return the first name with a number that is not in `used_names`."""
        number = self._numbers.get(base, 0) + 1
        while f"{base}_{number}" in used_names:
            number += 1
        self._numbers[base] = number
        return f"{base}_{number}"


_ENTRANCES = op_types.ENTERS | op_types.SWITCHES


@dataclass
class CallerPlan:
    """One graph that calls: the main one, or a function for a choice of attributes."""

    body: FlatBody
    effects: Effects = field(repr=False)  # Tells which nodes have an effect.
    # Tells which nodes have one or read state that effects change.
    state: Effects = field(repr=False)
    # The calls that will be replaced, by node.
    calls: dict[str, FunctionCall] = field(default_factory=dict)
    # The function and the reason of each other call.
    kept: dict[str, tuple[str, str]] = field(default_factory=dict)
    size: int = 0  # Number of nodes, those of the calls' bodies included.
    automatic: int = 0  # Number of those whose name says nothing.
    bytes: int = 0  # About the size of all that as a protobuf.

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the nodes."""
        return tuple(node.name for node in self.body.nodes)

    @cached_property
    def automatic_names(self) -> frozenset[str]:
        """The names that say nothing."""
        definitions = (node.definition for node in self.body.nodes)
        return frozenset(d.name for d in definitions if is_automatic(d.name, d.op))

    @cached_property
    def args(self) -> Mapping[str, int]:
        """The position of each argument."""
        return {arg.name: i for i, arg in enumerate(self.body.args)}

    @cached_property
    def needs(self) -> dict[str, list[str]]:
        """The nodes and arguments that each node needs, without back edges."""
        definitions = {node.name: node.definition for node in self.body.nodes}

        def is_back_edge(reader: Any, producer: str) -> bool:
            definition = definitions.get(producer)
            return definition is not None and is_loop_edge(definition.op, reader.op)

        return {
            node.name: [
                producer
                for producer in dict.fromkeys(map(node_name, node.inputs))
                if not is_back_edge(node.definition, producer)
            ]
            for node in self.body.nodes
        }

    def reliable_needs(self, name: str) -> list[str]:
        """Return the needs that hold for every replacement of a node."""
        # The body of a call need not read all inputs of the call.
        return self._control_needs.get(name) or (
            [] if name in self.calls else self.needs[name]
        )

    @cached_property
    def _control_needs(self) -> dict[str, list[str]]:
        return {
            node.name: list(map(node_name, control_references(node.inputs)))
            for node in self.body.nodes
            if node.name in self.calls
        }

    @cached_property
    def order(self) -> list[str]:
        """The names of the nodes in topological order."""
        return protos.needs_first(self.needs)

    @cached_property
    def waiting(self) -> list[BodyNode]:
        """The nodes that need new control inputs: all others wait for one of them."""
        # Those that read nothing of the body, and calls that will be replaced: the
        # first ops of their bodies need not read the call's inputs.
        return [node for node in self.body.nodes if self._has_to_be_told(node)]

    def _has_to_be_told(self, node: BodyNode) -> bool:
        inputs: Iterable[str] = node.inputs
        if node.name in self.calls:
            inputs = control_references(inputs)
        return all(node_name(name) in self.args for name in inputs)

    @cached_property
    def branched(self) -> frozenset[str]:
        """The nodes that may be in a version 1 loop or branch: behind an entrance."""
        # Nodes behind the loop or the branches are among them, for simplicity.
        branched_names: set[str] = set()
        entrances = {n.name for n in self.body.nodes if n.definition.op in _ENTRANCES}
        if entrances:
            for name in self.order:
                if not branched_names.isdisjoint(self.needs[name]) or name in entrances:
                    branched_names.add(name)
        return frozenset(branched_names)

    @cached_property
    def effective(self) -> list[str]:
        """The nodes with an effect."""
        return [n.name for n in self.body.nodes if self.effects.of(n.definition)]

    @cached_property
    def stateful(self) -> list[str]:
        """The nodes with an effect and those that read state that effects change."""
        return [n.name for n in self.body.nodes if self.state.of(n.definition)]

    @cached_property
    def frames(self) -> list[str]:
        """The frames of the loops of version 1."""
        enters = (n.definition for n in self.body.nodes if "Enter" in n.definition.op)
        attributes = (d.attr["frame_name"].s for d in enters if "frame_name" in d.attr)
        return list(dict.fromkeys(s.decode("utf-8", "replace") for s in attributes))


def is_loop_edge(producer: str, consumer: str) -> bool:
    """Tell, from the types of two ops, whether an edge leads back in a loop."""
    return producer.removeprefix("Ref") == "NextIteration" and (
        consumer.removeprefix("Ref") == "Merge"
    )


_MAX_VERSIONS = 1000
"""Choices of attributes of one function; a few are common, many are an attack."""


class Plans:
    """The plans of a graph and of every function that is inlined into it."""

    def __init__(self, main: FlatBody, library: Library, keep: frozenset[str]) -> None:
        self._library = library
        self._keep = keep
        self._effects = Effects(library.functions)
        self._state = Effects(library.functions, reads=True)
        self._versions: dict[str, int] = {}
        self.main = CallerPlan(main, self._effects, self._state)
        self._plans: dict[Instance, CallerPlan] = {}
        calls = list(self._read(self.main))
        for call in calls:
            if call.instance not in self._plans:
                calls.extend(self._read(self._new_plan(call)))
        self._keep_more()
        self._measure()

    def of(self, call: FunctionCall) -> CallerPlan:
        """Return the plan of the function that is called."""
        return self._plans[call.instance]

    def _new_plan(self, call: FunctionCall) -> CallerPlan:
        count = self._versions[call.function] = self._versions.get(call.function, 0) + 1
        if count > _MAX_VERSIONS:
            raise TransformError(
                f"function '{call.function}' is called with more than {_MAX_VERSIONS} "
                "choices of its attributes; name it in keep to leave its calls alone"
            )
        functions = self._library.functions
        body = flat_body(functions[call.function], functions, call.attributes)
        plan = self._plans[call.instance] = CallerPlan(body, self._effects, self._state)
        return plan

    def _read(self, plan: CallerPlan) -> Iterator[FunctionCall]:
        """Find the calls of a plan; yield those that will be replaced."""
        for node in plan.body.nodes:
            call = self._library.call(node.definition)
            if call is None:
                continue
            if call.function in self._keep:
                reason = "the function is named in keep"
            else:
                reason = self._library.reason_to_keep(node.definition, call.function)
            if reason:
                plan.kept[node.name] = call.function, reason
                continue
            self._check(node, call)
            plan.calls[node.name] = call
            yield call

    def _check(self, node: BodyNode, call: FunctionCall) -> None:
        signature = self._library.functions[call.function].signature
        argument_count = len(data_inputs(node.inputs))
        _check_count(node, call, "arguments", argument_count, len(signature.input_arg))
        if "Tout" in node.definition.attr and node.definition.op != call.function:
            expected = len(node.definition.attr["Tout"].list.type)
            _check_count(node, call, "results", expected, len(signature.output_arg))

    def _keep_more(self) -> None:
        """Leave calls of functions whose bodies cannot stand in the caller's place."""
        calls = {
            instance: [call.instance for call in plan.calls.values()]
            for instance, plan in self._plans.items()
        }
        reasons = dict.fromkeys(protos.on_cycles(calls), "the function calls itself")
        for instance, plan in self._plans.items():
            inside = [name for name in plan.effective if name in plan.branched]
            if inside:
                reasons[instance] = (
                    f"'{inside[0]}' in it has an effect and may stand in a version 1 "
                    "loop or branch, where nothing outside can wait for it"
                )
        for plan in (self.main, *self._plans.values()) if reasons else ():
            for name, call in list(plan.calls.items()):
                if call.instance in reasons:
                    del plan.calls[name]
                    plan.kept[name] = call.function, reasons[call.instance]

    def _measure(self) -> None:
        """Work out the sizes, callees first."""
        needs = {
            instance: [call.instance for call in plan.calls.values()]
            for instance, plan in self._plans.items()
        }
        for instance in protos.needs_first(needs):
            definition = self._library.functions[instance[0]]
            self._measure_one(self._plans[instance], definition.ByteSize())
        self._measure_one(self.main, 0)

    def _measure_one(self, plan: CallerPlan, own_bytes: int) -> None:
        callees = [self.of(call) for call in plan.calls.values()]
        plan.size = len(plan.body.nodes) + sum(p.size for p in callees)
        plan.automatic = len(plan.automatic_names) + sum(p.automatic for p in callees)
        plan.bytes = own_bytes + sum(p.bytes for p in callees)


def _check_count(
    node: BodyNode, call: FunctionCall, what: str, actual: int, declared: int
) -> None:
    if actual != declared:
        raise TransformError(
            f"'{node.name}' calls function '{call.function}' with {actual} {what}, but "
            f"the function has {declared}; the graph is damaged"
        )


_MAX_SEPARATE = 1000
"""The most effects or arguments with ties of their own; above it, all wait for all."""


@dataclass(frozen=True)
class CallSurroundings:
    """Where a call stands among the effects of its caller."""

    late: tuple[str, ...] = ()  # The arguments, by name, that come behind an effect.
    # Those that come behind a read of state that effects change, too.
    seen: tuple[str, ...] = ()
    early: bool = False  # Whether an effect comes behind a result.


@dataclass(frozen=True)
class Ties:
    """The ties to make, as names of nodes and arguments of the body."""

    effects: tuple[str, ...]  # The nodes that each result has to wait for.
    # The positions of the results that do not wait for all of them by themselves.
    loose: frozenset[int]
    done: tuple[str, ...]  # The nodes that ops waiting for the call have to wait for.
    # The nodes that need control inputs from the late arguments.
    told_late: tuple[str, ...]
    told_seen: tuple[str, ...]  # Those that need control inputs from the seen ones.
    # The nodes and arguments that have an effect or come behind one.
    late: frozenset[str]
    # Those that read state that effects change, or come behind a read, too.
    seen: frozenset[str]
    early: frozenset[str]  # The nodes that an effect, or a node before one, depends on.


def find_ties(plan: CallerPlan, around: CallSurroundings) -> Ties:
    """Return the ties of one body: linear in the nodes, times the effects over 64."""
    body = plan.body
    results = [node_name(result.tensor) for result in body.results]
    controls = [node for _, node in body.control_results]
    # A call is strict about effects, by the ties of its own body; not about reads.
    needs: Callable[[str], Iterable[str]] = plan.needs.__getitem__
    noticed = [*around.late, *plan.effective]
    if around.early:
        noticed, needs = [*around.seen, *plan.stateful], plan.reliable_needs
    effects = _last(noticed, plan.order, needs)
    done = (*around.seen, *plan.stateful, *controls, *results)
    told_late = _told(plan, around.late, plan.stateful, strict=True)
    return Ties(
        effects=tuple(effects),
        loose=frozenset(_loose(plan.order, needs, effects, results)),
        done=tuple(_last(done, plan.order, plan.reliable_needs)),
        told_late=tuple(told_late),
        told_seen=tuple(_told(plan, around.seen, plan.effective, strict=False)),
        late=frozenset(_behind(plan, (*around.late, *plan.effective, *told_late))),
        seen=frozenset(_behind(plan, (*around.seen, *plan.stateful))),
        early=frozenset(_early(plan, results if around.early else [])),
    )


def _behind(plan: CallerPlan, starts: Iterable[str]) -> set[str]:
    """Return `starts` and all that comes behind one of them."""
    reachable = set(starts)
    for name in plan.order if reachable else ():
        if not reachable.isdisjoint(plan.needs[name]):
            reachable.add(name)
    return reachable


def _early(plan: CallerPlan, results: Iterable[str]) -> set[str]:
    """Return the nodes whose outputs reach an effect or one of `results`."""
    early_nodes = set(results)
    before = {*plan.effective, *early_nodes}
    inputs = {node.name: node.inputs for node in plan.body.nodes}
    for name in reversed(plan.order) if before else ():
        if name in before:
            before.update(plan.needs[name])
            early_nodes.update(node_name(r) for r in inputs[name] if r[:1] != "^")
    return early_nodes


def _told(
    plan: CallerPlan, args: Sequence[str], members: Iterable[str], *, strict: bool
) -> list[str]:
    """Return the members that do not come behind all of `args` by themselves."""
    # If `strict`, a call that reads such an argument makes the readers of its results
    # wait, whatever its body is.
    members = frozenset(members if args else ())
    if not members or len(args) > _MAX_SEPARATE:
        return [name for name in plan.order if name in members]
    # A bit for each argument that a node comes behind.
    bits = {name: 1 << i for i, name in enumerate(args)}
    every = (1 << len(args)) - 1
    unordered_members = []
    for name in plan.order:
        # A call that reads the arguments finds the nodes to tell in its own body.
        own = _union(bits, plan.needs[name])
        if name in members and own != every:
            unordered_members.append(name)
            bits[name] = every
        elif own:
            sure = strict or name not in plan.calls
            bits[name] = own if sure else _union(bits, plan.reliable_needs(name))
    return unordered_members


def _union(bits: Mapping[str, int], names: Iterable[str]) -> int:
    result = 0
    for name in names:
        result |= bits.get(name, 0)
    return result


def _last(
    members: Iterable[str],
    order: Sequence[str],
    needs: Callable[[str], Iterable[str]],
) -> list[str]:
    """Return the members that no other member needs."""
    members = dict.fromkeys(members)
    needed: set[str] = set()
    for name in reversed(order) if members else ():
        if name in needed or name in members:
            needed.update(needs(name))
    return [name for name in members if name not in needed]


def _loose(
    order: Sequence[str],
    needs: Callable[[str], Iterable[str]],
    effects: Sequence[str],
    results: Sequence[str],
) -> list[int]:
    """Return the positions of the results that do not need all of `effects`."""
    if not effects or not results:
        return []
    if len(effects) > _MAX_SEPARATE:
        return list(range(len(results)))
    # A bit for each effect that a node needs or is.
    bits = {name: 1 << i for i, name in enumerate(effects)}
    for name in order:
        bit = bits.get(name, 0) | _union(bits, needs(name))
        if bit:
            bits[name] = bit
    every = (1 << len(effects)) - 1
    return [i for i, name in enumerate(results) if bits.get(name, 0) != every]
