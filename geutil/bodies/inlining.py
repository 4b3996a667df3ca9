"""Inlining.

Calls replaced by the bodies of their functions, level by level, in a `GraphDef`.

Protobufs only: no graph is made, nothing is imported and nothing is run. The nodes
behave as TensorFlow's own inlining of functions makes them behave, and an effect in a
body still happens whenever a result of the call is used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from geutil.bodies import inlining_plan
from geutil.bodies.inlined_call import (
    BodySite,
    CallSurroundings,
    Expansion,
    NewNode,
    Ties,
    Wiring,
    find_ties,
)
from geutil.bodies.inlining_plan import CallerPlan, Claim, Namespace, Plans
from geutil.errors import TransformError
from geutil.graph.call_graph import BodyNode, FlatBody, Library, output_name
from geutil.graph.gradient_functions import ATTRIBUTE as GRADIENT
from geutil.graph.protos import GraphDef
from geutil.graph.walks import (
    control_references,
    data_inputs,
    node_name,
    short_name,
    tensor_name,
    topological_order,
    tree,
)

_COLOCATED = b"loc:@"


def write_node(target: Any, node: NewNode, wiring: Wiring) -> None:
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


def _rename_colocated(target: Any, node: NewNode, wiring: Wiring) -> None:
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
    del colocated[:]
    colocated.extend(renamed)
    if not renamed:
        del target.attr["_class"]


def _colocated(name: str, node: NewNode, wiring: Wiring) -> str:
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
        self._main = BodySite(main, around, self._find_ties(main, around))
        self._forced = _needed_by_name(main, protected)
        self.wiring = Wiring(self._space)

    def run(self) -> list[NewNode]:
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
            nodes.append(NewNode(barrier, barrier.name, inputs, barrier.device, main))
        return _in_order(nodes)

    def translated(self) -> dict[str, str]:
        """Return the tensor that corresponds to each output of a call of the graph."""
        result = {}
        for name, call in self._main.plan.calls.items():
            for index in range(len(self._plans.of(call).body.results)):
                tensor = self.wiring.tensor(output_name(name, index))
                result[f"{name}:{index}"] = tensor if ":" in tensor else f"{tensor}:0"
        return result

    def _expand(self, site: BodySite) -> list[BodySite]:
        """Make the nodes of a site; return the calls among them."""
        expansion = Expansion(site, self._space, self.wiring)
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
                    NewNode(node.definition, name, inputs, device, site, node.name)
                )
        if site is not self._main:
            expansion.connect(site.name in self._forced)
        return calls

    def _call(
        self, site: BodySite, node: BodyNode, name: str, inputs: list[str], device: str
    ) -> BodySite:
        """Return the site of a call, placed among the effects of the calling body."""
        plan = self._plans.of(site.plan.calls[node.name])
        read = list(map(node_name, data_inputs(node.inputs)))
        args = list(zip(read, plan.args, strict=True))
        around = CallSurroundings(
            late=tuple(arg for name, arg in args if name in site.ties.late),
            seen=tuple(arg for name, arg in args if name in site.ties.seen),
            early=node.name in site.ties.early,
        )
        return BodySite(
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

    def _name(self, level: Sequence[BodySite]) -> None:
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


def _flattened(main: BodySite) -> Iterator[NewNode]:
    items = tree(main.items, lambda i: i.items if isinstance(i, BodySite) else ())
    return (item for item in items if not isinstance(item, BodySite))


def _in_order(nodes: Sequence[NewNode]) -> list[NewNode]:
    by_name = {node.name: node for node in nodes}

    def needs(node: NewNode) -> Iterator[NewNode]:
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
        write_node(result.node.add(), node, inliner.wiring)
        if node.original in node.site.plan.kept:
            kept_calls.append(Kept(node.name, *node.site.plan.kept[node.original]))
    if graph_def.HasField("library"):
        result.library.CopyFrom(library.still_called(result.node))
    return Inlined(
        result, tuple(kept_calls), inliner.translated(), _origins(nodes, inliner)
    )


def _origins(nodes: list[NewNode], inliner: Inliner) -> dict[str, NodeOrigin]:
    """Say where the nodes with a gradient of their own come from."""

    def origin(node: NewNode) -> NodeOrigin:
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
