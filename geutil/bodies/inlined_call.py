"""One call replaced by the nodes of a body; its readers are rewired.

A call runs all of its body, and whoever reads a result or waits for the call can rely
on that. Once the body stands in the caller's place, they can rely only on the nodes
that lie on their way: `find_ties` says which nodes are tied to them.

References are those of a `GraphDef` (`node`, `node:k`, `^node`), and `^node:k` for the
node that yields a tensor in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from geutil.bodies.inlining_plan import CallerPlan, Namespace
from geutil.errors import TransformError
from geutil.graph.call_graph import BodyNode, is_index, output_name
from geutil.graph.protos import NodeDef
from geutil.graph.walks import node_name, topological_order

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


@dataclass
class Group:
    """Ops that are waited for together."""

    members: Sequence[str]
    name: str  # Of the NoOp that corresponds to them if there is not just one.
    device: str
    reserved: bool = False  # Whether the name is kept free for it.
    forced: bool = False  # Whether there is a NoOp in any case.


def wait_for_tensor(tensor: str) -> str:
    """Return a reference to the node that yields a tensor in the end."""
    return f"^{tensor}" if ":" in tensor else f"^{tensor}:0"


class Wiring:
    """Follows references through the calls that were replaced."""

    def __init__(self, space: Namespace) -> None:
        # The tensor that replaces each output of a call.
        self.tensors: dict[str, str] = {}
        # The replacements of a call in control inputs.
        self.groups: dict[str, Group] = {}
        self.barriers: list[Any] = []
        self._space = space
        self._settled: dict[str, str] = {}

    def inputs(self, references: Iterable[str]) -> list[str]:
        """Return the inputs of a node: data first, each control input once."""
        data, controls = [], []
        for reference in references:
            if reference.startswith("^"):
                controls.append(reference)
            else:
                data.append(self.tensor(reference))
        return [*data, *self._controls(controls)] if controls else data

    def tensor(self, reference: str) -> str:
        """Return the tensor that `reference` corresponds to in the end."""
        tensor_by_reference = self.tensors
        if reference not in tensor_by_reference:
            return reference
        path: dict[str, None] = {}
        end = reference
        while end in tensor_by_reference:
            if end in path:
                raise TransformError(
                    f"'{reference}' depends on itself through calls that return "
                    "their arguments; the graph is damaged"
                )
            path[end] = None
            end = tensor_by_reference[end]
        # Later look-ups of a long chain end after one step.
        for name in path:
            tensor_by_reference[name] = end
        return end

    def settle(self, reference: str) -> str:
        """Return the name of the op to wait for, and make it if need be."""
        settled = self._settled
        if reference in settled:
            return settled[reference]

        def members(name: str) -> Iterable[str]:
            group = None if name in settled else self.groups.get(name)
            return () if group is None else group.members

        for name in topological_order([reference], members):
            if name not in settled:
                group = self.groups.get(name)
                settled[name] = (
                    self._op(name) if group is None else self._settle_group(group)
                )
        return settled[reference]

    def _settle_group(self, group: Group) -> str:
        """Return the op that a group settles on: its only member, or a new NoOp."""
        names: dict[str, None] = {}
        for member in group.members:
            if member not in self._settled:
                raise TransformError(
                    f"'{group.name}' waits for itself through the functions it calls; "
                    "the graph is damaged"
                )
            names[self._settled[member]] = None
        if len(names) == 1 and not group.forced:
            return next(iter(names))
        name = group.name if group.reserved else self._space.unique(group.name)
        inputs = [f"^{n}" for n in names]
        self.barriers.append(
            NodeDef(name=name, op="NoOp", input=inputs, device=group.device)
        )
        return name

    def _controls(self, references: Iterable[str]) -> list[str]:
        return [f"^{name}" for name in dict.fromkeys(map(self.settle, references))]

    def _op(self, reference: str) -> str:
        name, colon, index = reference[1:].partition(":")
        if not colon:
            return name
        tensor = output_name(name, int(index)) if is_index(index) else reference[1:]
        return node_name(self.tensor(tensor))


_RESOURCE = tf.resource.as_datatype_enum


@dataclass(eq=False)
class BodySite:
    """A place where a body stands: that of a call, or the main graph itself."""

    plan: CallerPlan
    around: CallSurroundings  # Where the call stands among the effects of its caller.
    ties: Ties  # Nodes and arguments that have to be tied to its results.
    name: str = ""  # The name of the call in the result, reserved for its replacement.
    op: str = ""
    inputs: list[str] = field(default_factory=list)
    controls: list[str] = field(default_factory=list)
    device: str = ""
    branched: bool = False  # Whether it may be in a version 1 loop or branch.
    # The name in the result of each node of the body.
    names: Mapping[str, str] = field(default_factory=dict)
    # The names in the result of the frames of its loops.
    frames: Mapping[str, str] = field(default_factory=dict)
    # The new nodes, and the calls that are replaced in turn, in order.
    items: list[NewNode | BodySite] = field(default_factory=list, repr=False)

    def reference(self, reference: str) -> str:
        """Return the name in the result of a reference inside the body."""
        if reference.startswith("^"):
            name = reference[1:]
            if name in self.plan.args:
                return wait_for_tensor(self.inputs[self.plan.args[name]])
            return f"^{self.names.get(name, name)}"
        name, colon, index = reference.partition(":")
        if name in self.plan.args:
            return self.inputs[self.plan.args[name]]
        return f"{self.names.get(name, name)}{colon}{index}"


@dataclass(eq=False)
class NewNode:
    """A node of the result."""

    definition: Any  # The node that it copies, but for its name, inputs and device.
    name: str
    inputs: Sequence[str]  # References to its inputs, control inputs included.
    device: str
    site: BodySite
    original: str = ""  # Its name in the body; empty if it is in none.


class Expansion:
    """Adds to a site the nodes that its body needs to behave like the call did."""

    def __init__(self, site: BodySite, space: Namespace, wiring: Wiring) -> None:
        self._site = site
        self._space = space
        self._wiring = wiring

    def told_to_wait(self) -> dict[str, list[str]]:
        """Return the control inputs that nodes of the body need in addition."""
        # With control inputs at the call, nothing in the body may start before them. A
        # read of a variable may not start before arguments that come behind an effect,
        # nor an effect before those that come behind a read. In a version 1 loop or
        # branch, a node without inputs is outside: an argument brings it in.
        site = self._site
        if site.controls:
            added_controls = self._after_controls()
        elif site.branched and site.inputs:
            added_controls = self._brought_in()
        else:
            added_controls = {}
        self._tell(added_controls, site.ties.told_late, site.around.late)
        self._tell(added_controls, site.ties.told_seen, site.around.seen)
        return added_controls

    def _tell(
        self,
        added_controls: dict[str, list[str]],
        names: Sequence[str],
        args: Sequence[str],
    ) -> None:
        """Let nodes wait for arguments."""
        if names:
            positions = (self._site.plan.args[name] for name in args)
            waits = [wait_for_tensor(self._site.inputs[i]) for i in positions]
            waits = self._joined(waits, len(names))
            added_controls.update(
                (name, [*added_controls.get(name, ()), *waits]) for name in names
            )

    def _joined(self, controls: list[str], readers: int) -> list[str]:
        """Return control inputs for several readers, as one if that saves edges."""
        if len(controls) < 2 or readers < 2:
            return controls
        start = self._space.unique(f"{self._site.name}/start")
        self._add("NoOp", start, controls)
        return [f"^{start}"]

    def _brought_in(self) -> dict[str, list[str]]:
        site = self._site
        sources = [n.name for n in site.plan.waiting if not n.inputs]
        self._add_gates(self._branch_gates() | ({0} if sources else set()), [])
        return {name: [wait_for_tensor(site.inputs[0])] for name in sources}

    def _after_controls(self) -> dict[str, list[str]]:
        """Return the nodes that have to wait for the controls of a call, with these."""
        site, args = self._site, self._site.plan.args
        results = (node_name(r.tensor) for r in site.plan.body.results)
        # An argument that is returned has no node in the body that could wait.
        gates = {args[name] for name in results if name in args}
        if site.branched:
            gates |= self._branch_gates()
        waiting_names = []
        for node in site.plan.waiting:
            gate = self._gate(node)
            if gate is None:
                waiting_names.append(node.name)
            else:
                gates.add(gate)
        controls = self._joined(site.controls, len(gates) + len(waiting_names))
        self._add_gates(gates, controls)
        return dict.fromkeys(waiting_names, controls)

    def _branch_gates(self) -> set[int]:
        """Return the arguments that something waits for without reading them."""
        # A Switch is no use there: it runs, whichever of its outputs comes to life.
        site, args = self._site, self._site.plan.args
        nodes = site.plan.body.nodes
        waited_for = {r[1:] for n in nodes for r in n.inputs if r.startswith("^")}
        waited_for.update(site.ties.done or args, site.ties.effects, site.around.seen)
        return {args[name] for name in waited_for if name in args}

    def _add_gates(self, gates: set[int], controls: Sequence[str]) -> None:
        """Let arguments pass through an Identity that waits."""
        site = self._site
        for position in sorted(gates):
            arg = site.plan.body.args[position]
            name = self._space.unique(f"{site.name}/{arg.name}")
            inputs = [site.inputs[position], *controls]
            self._add("Identity", name, inputs, arg.dtype)
            site.inputs[position] = name

    def _gate(self, node: BodyNode) -> int | None:
        """Return the argument of a kernel that can wait instead of the kernel."""
        # oneDNN's layout pass aborts the process at a control edge onto a Conv2D.
        plan = self._site.plan
        if node.name in plan.calls or not plan.effects.is_kernel(node.definition):
            return None
        for reference in node.inputs:
            position = plan.args.get(reference)
            if position is not None and plan.body.args[position].dtype != _RESOURCE:
                return position
        return None

    def connect(self, forced: bool) -> None:
        """Note the replacements of the call's outputs and of the call itself."""
        site, ties = self._site, self._site.ties
        effects = f"^{site.name}\0"
        members = [self._tied(name, "\0") for name in ties.effects]
        self._wiring.groups[effects] = Group(
            members, f"{site.name}/effects", site.device
        )
        done = [self._tied(name, "") for name in ties.done]
        if not any(name in site.names for name in ties.done):
            done += site.controls
            # A body in which nothing has to run is done when its arguments are there.
            done += [] if ties.done else map(wait_for_tensor, site.inputs)
        self._wiring.groups[f"^{site.name}"] = Group(
            done, site.name, site.device, reserved=True, forced=forced
        )
        for index, result in enumerate(site.plan.body.results):
            tensor = site.reference(result.tensor)
            if index in ties.loose:
                name = self._space.unique(f"{site.name}/{result.name}")
                self._add("Identity", name, [tensor, effects], result.dtype)
                tensor = name
            self._wiring.tensors[output_name(site.name, index)] = tensor

    def _tied(self, name: str, suffix: str) -> str:
        """Return a reference to a node or argument that ties name."""
        reference = self._site.reference(f"^{name}")
        return reference + suffix if name in self._site.plan.calls else reference

    def _add(
        self, op: str, name: str, inputs: Sequence[str], dtype: int | None = None
    ) -> None:
        definition = NodeDef(name=name, op=op)
        if dtype is not None:
            definition.attr["T"].type = dtype
        site = self._site
        site.items.append(NewNode(definition, name, inputs, site.device, site))
