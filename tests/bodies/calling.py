"""Running a graph of calls and its inlined form side by side."""

import networkx as nx
import numpy as np
import tensorflow as tf

from geutil.bodies import Inlined, inline_calls


def run(graph_def, steps, feed=None):
    """Return the values of each of `steps`, lists of names, run one after the other."""
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(graph_def, name="")
        config = tf.compat.v1.ConfigProto()
        # Keep what is asked for from being folded away or shared.
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        with tf.compat.v1.Session(graph=graph, config=config) as session:
            return [session.run(list(names), feed) for names in steps]


def same(graph_def, steps, feed=None, **options) -> Inlined:
    """Check that inlining changes none of the values; return what it made."""
    before = graph_def.SerializeToString(deterministic=True)
    inlined = inline_calls(graph_def, **options)
    assert graph_def.SerializeToString(deterministic=True) == before
    names = [[inlined.tensors.get(n, n) for n in step] for step in steps]
    expected = run(graph_def, steps, feed)
    values = run(inlined.graph_def, names, feed)
    for one, other in zip(expected, values, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)
    return inlined


def node_names(inlined):
    return [node.name for node in inlined.graph_def.node]


def nodes(inlined):
    return {node.name: node for node in inlined.graph_def.node}


def calls_left(graph_def):
    functions = {f.signature.name for f in graph_def.library.function}
    kinds = {"PartitionedCall", "StatefulPartitionedCall", *functions}
    return [node.name for node in graph_def.node if node.op in kinds]


def in_topological_order(graph_def):
    seen = set()
    for node in graph_def.node:
        for name in node.input:
            producer = name.removeprefix("^").partition(":")[0]
            if producer not in seen and node.op != "Merge":
                return False
        seen.add(node.name)
    return True


def unordered(graph_def):
    """Return the pairs of a write and another access that no path puts in order.

    Those of `init`, of `value` and of the variable itself do not count: they run in
    steps of their own, or not at all.
    """
    graph = nx.DiGraph()
    for node in graph_def.node:
        graph.add_node(node.name, op=node.op)
        for name in node.input:
            graph.add_edge(name.removeprefix("^").partition(":")[0], node.name)
    outside = nx.ancestors(graph, "init") | nx.ancestors(graph, "value")
    outside |= {name for name in graph if name.startswith("v/")}
    writes, accesses = (
        [n for n, op in graph.nodes(data="op") if op in kinds and n not in outside]
        for kinds in (["AssignVariableOp"], ["AssignVariableOp", "ReadVariableOp"])
    )
    pairs = []
    for write in writes:
        ordered = nx.ancestors(graph, write) | nx.descendants(graph, write) | {write}
        pairs += [(write, other) for other in accesses if other not in ordered]
    return pairs
