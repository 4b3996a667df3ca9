"""Inlining: calls replaced by the bodies of their functions in a `GraphDef`.

Protobufs only: no graph is made, nothing is imported and nothing is run. The nodes
behave as TensorFlow's own inlining of functions makes them behave, and an effect in a
body still happens whenever a result of the call is used.

References are those of a `GraphDef` (`node`, `node:k`, `^node`), and `^node:k` for the
node that yields a tensor in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from geutil.bodies import inlining_plan
from geutil.bodies.inlining_plan import (
    CallerPlan,
    CallSurroundings,
    Claim,
    Namespace,
    Plans,
    Ties,
    find_ties,
)
from geutil.errors import TransformError
from geutil.graph.gradient_functions import ATTRIBUTE as GRADIENT
from geutil.graph.protos import (
    BodyNode,
    FlatBody,
    GraphDef,
    Library,
    NodeDef,
    is_index,
    output_name,
)
from geutil.graph.walks import (
    control_references,
    data_inputs,
    node_name,
    short_name,
    tensor_name,
    topological_order,
    tree,
)


@dataclass
class _WaitedFor:
    """Ops that are waited for together."""

    members: Sequence[str]
    name: str  # Of the NoOp that corresponds to them if there is not just one.
    device: str
    reserved: bool = False  # Whether the name is kept free for it.
    forced: bool = False  # Whether there is a NoOp in any case.


def _wait_for_tensor(tensor: str) -> str:
    """Return a reference to the node that yields a tensor in the end."""
    return f"^{tensor}" if ":" in tensor else f"^{tensor}:0"


class _Wiring:
    """Follows references through the calls that were replaced."""

    def __init__(self, space: Namespace) -> None:
        # The tensor that replaces each output of a call.
        self.tensors: dict[str, str] = {}
        # The replacements of a call in control inputs.
        self.groups: dict[str, _WaitedFor] = {}
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

    def _settle_group(self, group: _WaitedFor) -> str:
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
class _BodySite:
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
    items: list[_NewNode | _BodySite] = field(default_factory=list, repr=False)

    def reference(self, reference: str) -> str:
        """Return the name in the result of a reference inside the body."""
        if reference.startswith("^"):
            name = reference[1:]
            if name in self.plan.args:
                return _wait_for_tensor(self.inputs[self.plan.args[name]])
            return f"^{self.names.get(name, name)}"
        name, colon, index = reference.partition(":")
        if name in self.plan.args:
            return self.inputs[self.plan.args[name]]
        return f"{self.names.get(name, name)}{colon}{index}"


@dataclass(eq=False)
class _NewNode:
    """A node of the result."""

    definition: Any  # The node that it copies, but for its name, inputs and device.
    name: str
    inputs: Sequence[str]  # References to its inputs, control inputs included.
    device: str
    site: _BodySite
    original: str = ""  # Its name in the body; empty if it is in none.


class _Expansion:
    """Adds to a site the nodes that its body needs to behave like the call did."""

    def __init__(self, site: _BodySite, space: Namespace, wiring: _Wiring) -> None:
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
            waits = [_wait_for_tensor(self._site.inputs[i]) for i in positions]
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
        return {name: [_wait_for_tensor(site.inputs[0])] for name in sources}

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
        self._wiring.groups[effects] = _WaitedFor(
            members, f"{site.name}/effects", site.device
        )
        done = [self._tied(name, "") for name in ties.done]
        if not any(name in site.names for name in ties.done):
            done += site.controls
            # A body in which nothing has to run is done when its arguments are there.
            done += [] if ties.done else map(_wait_for_tensor, site.inputs)
        self._wiring.groups[f"^{site.name}"] = _WaitedFor(
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
        site.items.append(_NewNode(definition, name, inputs, site.device, site))


_COLOCATED = b"loc:@"


def _write_node(target: Any, node: _NewNode, wiring: _Wiring) -> None:
    """Write a node of the result, its inputs followed to the end."""
    target.CopyFrom(node.definition)
    target.name = node.name
    target.ClearField("input")
    target.input.extend(node.inputs)
    target.device = node.device
    if "_class" in target.attr:
        _rename_colocated(target, node, wiring)
    if node.site.frames and "frame_name" in target.attr:
        frame = target.attr["frame_name"].s.decode("utf-8", "replace")
        target.attr["frame_name"].s = node.site.frames[frame].encode()


def _rename_colocated(target: Any, node: _NewNode, wiring: _Wiring) -> None:
    colocated = target.attr["_class"].list.s
    renamed = []
    for entry in colocated:
        if entry.startswith(_COLOCATED):
            name = entry.removeprefix(_COLOCATED).decode("utf-8", "replace")
            new = _colocated(name, node, wiring)
            if new:
                renamed.append(_COLOCATED + new.encode())
        else:
            renamed.append(entry)
    colocated[:] = renamed
    if not renamed:
        del target.attr["_class"]


def _colocated(name: str, node: _NewNode, wiring: _Wiring) -> str:
    """Return the new name of a node's colocated op; nothing for a call."""
    site = node.site
    if name in site.plan.calls:
        return ""
    if name in site.plan.args:
        return node_name(wiring.tensor(site.inputs[site.plan.args[name]]))
    # The graph may name what it likes; a body can only mean what it holds.
    return site.names.get(name, "") if site.name else name


class Inliner:
    """Makes the nodes of a graph whose calls are replaced."""

    def __init__(self, plans: Plans, protected: Collection[str]) -> None:
        main = plans.main
        self._plans = plans
        self._space = Namespace(main.names)
        self._frames = Namespace(main.frames)
        self._ties: dict[tuple[int, CallSurroundings], Ties] = {}
        self._devices: dict[tuple[str, str], str] = {}
        around = CallSurroundings()
        self._main = _BodySite(main, around, self._find_ties(main, around))
        self._forced = _needed_by_name(main, protected)
        self.wiring = _Wiring(self._space)

    def run(self) -> list[_NewNode]:
        """Return the nodes in topological order, their inputs followed to the end."""
        level = [self._main]
        while level:
            level = [call for site in level for call in self._expand(site)]
            self._name(level)
        nodes = list(_flattened(self._main))
        for node in nodes:
            node.inputs = self.wiring.inputs(node.inputs)
        for name in self._main.plan.calls:
            if name in self._forced:
                self.wiring.settle(f"^{name}")
        for barrier in self.wiring.barriers:
            inputs, main = list(barrier.input), self._main
            nodes.append(_NewNode(barrier, barrier.name, inputs, barrier.device, main))
        return _in_order(nodes)

    def translated(self) -> dict[str, str]:
        """Return the tensor that corresponds to each output of a call of the graph."""
        result = {}
        for name, call in self._main.plan.calls.items():
            for index in range(len(self._plans.of(call).body.results)):
                tensor = self.wiring.tensor(output_name(name, index))
                result[f"{name}:{index}"] = tensor if ":" in tensor else f"{tensor}:0"
        return result

    def _expand(self, site: _BodySite) -> list[_BodySite]:
        """Make the nodes of a site; return the calls among them."""
        expansion = _Expansion(site, self._space, self.wiring)
        added_controls = expansion.told_to_wait()
        calls = []
        for node in site.plan.body.nodes:
            inputs = [
                *map(site.reference, node.inputs),
                *added_controls.get(node.name, ()),
            ]
            name = site.names.get(node.name, node.name)
            device = self._device(site.device, node.definition.device)
            if node.name in site.plan.calls:
                call = self._call(site, node, name, inputs, device)
                calls.append(call)
                site.items.append(call)
            else:
                site.items.append(
                    _NewNode(node.definition, name, inputs, device, site, node.name)
                )
        if site is not self._main:
            expansion.connect(site.name in self._forced)
        return calls

    def _call(
        self, site: _BodySite, node: BodyNode, name: str, inputs: list[str], device: str
    ) -> _BodySite:
        """Return the site of a call, placed among the effects of the calling body."""
        plan = self._plans.of(site.plan.calls[node.name])
        read = list(map(node_name, data_inputs(node.inputs)))
        args = list(zip(read, plan.args, strict=True))
        around = CallSurroundings(
            late=tuple(arg for name, arg in args if name in site.ties.late),
            seen=tuple(arg for name, arg in args if name in site.ties.seen),
            early=node.name in site.ties.early,
        )
        return _BodySite(
            plan,
            around,
            self._find_ties(plan, around),
            name,
            node.definition.op,
            data_inputs(inputs),
            control_references(inputs),
            device,
            site.branched or node.name in site.plan.branched,
        )

    def _find_ties(self, plan: CallerPlan, around: CallSurroundings) -> Ties:
        key = id(plan), around
        if key not in self._ties:
            self._ties[key] = find_ties(plan, around)
        return self._ties[key]

    def _name(self, level: Sequence[_BodySite]) -> None:
        """Choose the names of the nodes of bodies that are equally deep."""
        claims = [
            Claim(
                inlining_plan.call_scope(site.name, site.op),
                inlining_plan.readable(site.plan.body.name),
                site.plan.names,
                site.plan.automatic_names,
                2 * site.plan.automatic > site.plan.size,
            )
            for site in level
        ]
        for site, names in zip(level, self._space.claim(claims), strict=True):
            site.names = names
            site.frames = {f: self._frames.unique(f) for f in site.plan.frames}

    def _device(self, outer: str, inner: str) -> str:
        """Return the device of a node in a body: the call's device fills its gaps."""
        if not outer or not inner:
            return inner or outer
        key = outer, inner
        if key not in self._devices:
            self._devices[key] = _merged(outer, inner)
        return self._devices[key]


def _needed_by_name(main: CallerPlan, protected: Collection[str]) -> frozenset[str]:
    """Return the calls that will be run by name, as far as anybody can tell."""
    read = {name for needs in main.needs.values() for name in needs}
    read.update(node_name(name) for name in protected if ":" in name)
    return frozenset(n for n in main.calls if n not in read or n in protected)


def _merged(outer: str, inner: str) -> str:
    try:
        inner_spec = tf.DeviceSpec.from_string(inner)
        return tf.DeviceSpec.from_string(outer).make_merged_spec(inner_spec).to_string()
    except ValueError:  # TensorFlow will say what is wrong with them.
        return inner


def _flattened(main: _BodySite) -> Iterator[_NewNode]:
    items = tree(main.items, lambda i: i.items if isinstance(i, _BodySite) else ())
    return (item for item in items if not isinstance(item, _BodySite))


def _in_order(nodes: Sequence[_NewNode]) -> list[_NewNode]:
    by_name = {node.name: node for node in nodes}

    def needs(node: _NewNode) -> Iterator[_NewNode]:
        for name in map(node_name, node.inputs):
            producer = by_name.get(name)
            if producer is not None and not inlining_plan.is_loop_edge(
                producer.definition.op, node.definition.op
            ):
                yield producer

    return topological_order(nodes, needs)


_MAX_BYTES = 2**31 - 1
"""The most bytes of one protobuf."""


@dataclass(frozen=True)
class Kept:
    """A call that is still one."""

    node: str  # The name of its node in the result.
    function: str
    reason: str  # Why it is still a call.


@dataclass(frozen=True)
class NodeOrigin:
    """Where a node of the result comes from."""

    function: str  # The function whose body it was in.
    node: str
    # The tensors of the result that the function's arguments became.
    arguments: tuple[str, ...]
    # Gives the tensor of the result for one of the body, `node:k`.
    tensor: Callable[[str], str] = field(repr=False)


@dataclass(frozen=True)
class Inlined:
    """A graph whose calls were replaced."""

    # The graph, in topological order (loop back edges aside).
    graph_def: Any = field(repr=False)
    # The calls that are still there, in the order of their nodes.
    kept: tuple[Kept, ...]
    # For each output of a call of the original graph, such as
    # `StatefulPartitionedCall:1`, the name of the tensor that it became.
    tensors: Mapping[str, str]
    # Where nodes come from that were in bodies and name a gradient of their own; the
    # name is known to TensorFlow's Python part only.
    origins: Mapping[str, NodeOrigin] = field(repr=False)


def inline_calls(
    graph_def: Any,
    *,
    keep: Collection[str] = frozenset(),
    limit: int = 10_000_000,
    protected_names: Collection[str] = (),
) -> Inlined:
    """Replace calls by the bodies of the functions they call, however deeply nested.

    Calls are PartitionedCall, StatefulPartitionedCall and nodes whose op is a function.
    While, If, Case and other ops with functions stay units, and their functions stay as
    they are. A call stays when XLA compiles it, when it is marked not to be inlined,
    when it has a gradient of its own, or when its function calls itself.

    Consumers read the body's results. Ops that waited for the call wait for the body's
    ops; the body's ops wait for the call's control inputs. A call runs as a whole,
    after all that it reads and before all that reads it: where that shows, control
    edges make up for it, and a result is read through an Identity that waits. It shows
    where an effect would not happen, or a read and a write of a variable would change
    places.

    Names: those of the graph stay. A call gives its name as a scope, unless that is
    automatic, such as `PartitionedCall_1`; below it the body keeps its names if they
    are free, else it moves into a scope named after its function.

    Args:
        graph_def: a `GraphDef`; it is not changed.
        keep: names of functions whose calls stay.
        limit: the most nodes that the result may have.
        protected_names: nodes and tensors that will be asked for by name. A call that
            is named here as a node (`StatefulPartitionedCall_2`) leaves a NoOp by its
            name; so does one that nothing reads or waits for, unless an output of it
            (`StatefulPartitionedCall_2:0`) is named here. See `Inlined.tensors`.

    Returns:
        The new graph, the calls that stayed with the reasons, and the names of the
        tensors that replace outputs of calls. The library holds only functions that are
        still called.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.bodies import inline_calls
        >>> @tf.function(autograph=False)
        ... def twice(x):
        ...     return tf.add(x, x, name="sum")
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.compat.v1.placeholder(tf.float32, [], name="x")
        ...     y = tf.negative(twice(x), name="y")
        >>> inlined = inline_calls(graph.as_graph_def())
        >>> [node.name for node in inlined.graph_def.node]
        ['x', 'sum', 'Identity', 'y']
        >>> inlined.tensors["PartitionedCall:0"]
        'Identity:0'
    """
    library = Library(graph_def.library)
    main = _main_body(graph_def)
    plans = Plans(main, library, frozenset(keep))
    _check_size(plans, limit)
    inliner = Inliner(plans, _protected(main, protected_names))
    nodes = inliner.run()
    result = GraphDef()
    result.versions.CopyFrom(graph_def.versions)
    kept_calls = []
    for node in nodes:
        _write_node(result.node.add(), node, inliner.wiring)
        if node.original in node.site.plan.kept:
            kept_calls.append(Kept(node.name, *node.site.plan.kept[node.original]))
    if graph_def.HasField("library"):
        result.library.CopyFrom(library.still_called(result.node))
    return Inlined(
        result, tuple(kept_calls), inliner.translated(), _origins(nodes, inliner)
    )


def _origins(nodes: list[_NewNode], inliner: Inliner) -> dict[str, NodeOrigin]:
    """Say where the nodes with a gradient of their own come from."""

    def origin(node: _NewNode) -> NodeOrigin:
        site = node.site

        def tensor(name: str) -> str:
            return tensor_name(inliner.wiring.tensor(site.reference(short_name(name))))

        inputs = (tensor_name(inliner.wiring.tensor(name)) for name in site.inputs)
        return NodeOrigin(site.plan.body.name, node.original, tuple(inputs), tensor)

    return {
        node.name: origin(node)
        for node in nodes
        if node.original
        and node.site.plan.body.name
        and GRADIENT in node.definition.attr
    }


def _main_body(graph_def: Any) -> FlatBody:
    nodes = tuple(
        BodyNode(node, tuple(map(short_name, node.input))) for node in graph_def.node
    )
    names = {node.name for node in nodes}
    if len(names) < len(nodes):
        raise TransformError("two nodes of the graph have the same name")
    return FlatBody("", (), nodes, (), ())


def _check_size(plans: Plans, limit: int) -> None:
    if plans.main.size > limit:
        raise TransformError(
            f"without its calls the graph would have more than {limit:,} nodes; raise "
            "limit, or name functions in keep whose calls shall stay"
        )
    if plans.main.bytes > _MAX_BYTES:
        raise TransformError(
            "without its calls the graph would be larger than the 2 GiB that a "
            "protobuf can hold; name functions in keep whose calls shall stay"
        )


def _protected(main: FlatBody, protected_names: Collection[str]) -> frozenset[str]:
    node_names = {node.name for node in main.nodes}
    for name in protected_names:
        if node_name(name) not in node_names:
            raise TransformError(
                f"protected name '{name}' is not in the graph; take it out of "
                "protected_names, or give the name that the graph has"
            )
    return frozenset(name.removeprefix("^") for name in protected_names)
