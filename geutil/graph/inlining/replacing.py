"""Replacing calls by the bodies of the functions they call, in a `GraphDef`.

Protobufs only: no graph is made, nothing is imported and nothing is run. The nodes
behave as TensorFlow's own inlining of functions makes them behave, and an effect in a
body still happens whenever a result of the call is used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from geutil.errors import TransformError
from geutil.graph.bodies import Body, BodyNode
from geutil.graph.calls import Library
from geutil.graph.gradient_registry import ATTRIBUTE as GRADIENT
from geutil.graph.inlining.expansion import NewNode
from geutil.graph.inlining.inliner import Inliner
from geutil.graph.inlining.nodes import canonical, write_node
from geutil.graph.inlining.plan import producer_of
from geutil.graph.inlining.plans import Plans
from geutil.graph.protos import GraphDef

_MAX_BYTES = 2**31 - 1
"""What one protobuf can hold."""


@dataclass(frozen=True)
class Kept:
    """A call that is still one.

    Attributes:
        node: the name of its node in the result.
        function: the name of the function.
        reason: why it is still a call.
    """

    node: str
    function: str
    reason: str


@dataclass(frozen=True)
class Origin:
    """Where a node of the result comes from.

    Attributes:
        function: the function whose body it was in.
        node: its name there.
        arguments: the tensors of the result that the function's arguments became.
        tensor: gives the tensor of the result for one of the body, `node:k`.
    """

    function: str
    node: str
    arguments: tuple[str, ...]
    tensor: Callable[[str], str] = field(repr=False)


@dataclass(frozen=True)
class Inlined:
    """A graph whose calls were replaced.

    Attributes:
        graph_def: the graph, in topological order (loop back edges aside).
        kept: the calls that are still there, in the order of their nodes.
        tensors: for each output of a call of the original graph, such as
            `StatefulPartitionedCall:1`, the name of the tensor that it became.
        origins: where nodes come from that were in bodies and name a gradient of their
            own; the name is known to TensorFlow's Python part only.
    """

    graph_def: Any = field(repr=False)
    kept: tuple[Kept, ...]
    tensors: Mapping[str, str]
    origins: Mapping[str, Origin] = field(repr=False)


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

    Consumers read what the body returns. What waited for the call waits for the body's
    ops; the body's ops wait for what the call waited for. A call runs as a whole, after
    all that it reads and before all that reads it: where that shows, control edges make
    up for it, and a result is read through an Identity that waits. It shows where an
    effect would not happen, or a read and a write of a variable would change places.

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
        tensors that stand for outputs of calls. The library holds only what is still
        called.

    Raises:
        TransformError: the result would have more than `limit` nodes or more bytes than
            a protobuf can hold; a function is missing or damaged; a call does not fit
            its function; a protected name does not exist; names are not unique; calls
            depend on themselves.

    Cost: linear in the nodes of the result and their inputs. The limit is checked
    before anything is made.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.graph.inlining import inline_calls
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
    kept = []
    for node in nodes:
        write_node(result.node.add(), node, inliner.wiring)
        if node.original in node.site.plan.kept:
            kept.append(Kept(node.name, *node.site.plan.kept[node.original]))
    if graph_def.HasField("library"):
        result.library.CopyFrom(library.still_called(result.node))
    return Inlined(result, tuple(kept), inliner.translated(), _origins(nodes, inliner))


def _origins(nodes: list[NewNode], inliner: Inliner) -> dict[str, Origin]:
    """Say where the nodes with a gradient of their own come from."""

    def origin(node: NewNode) -> Origin:
        site = node.site

        def tensor(name: str) -> str:
            return _with_index(inliner.wiring.tensor(site.reference(canonical(name))))

        inputs = (_with_index(inliner.wiring.tensor(name)) for name in site.inputs)
        return Origin(site.plan.body.name, node.original, tuple(inputs), tensor)

    return {
        node.name: origin(node)
        for node in nodes
        if node.original
        and node.site.plan.body.name
        and GRADIENT in node.definition.attr
    }


def _with_index(name: str) -> str:
    return name if ":" in name else f"{name}:0"


def _main_body(graph_def: Any) -> Body:
    nodes = tuple(
        BodyNode(node, tuple(map(canonical, node.input))) for node in graph_def.node
    )
    names = {node.name for node in nodes}
    if len(names) < len(nodes):
        raise TransformError("two nodes of the graph have the same name")
    return Body("", (), nodes, (), ())


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


def _protected(main: Body, protected_names: Collection[str]) -> frozenset[str]:
    known = {node.name for node in main.nodes}
    for name in protected_names:
        if producer_of(name) not in known:
            raise TransformError(
                f"protected name '{name}' is not in the graph; take it out of "
                "protected_names, or give the name that the graph has"
            )
    return frozenset(name.removeprefix("^") for name in protected_names)
