"""The exact peak of a step: from the allocation records of a traced Session."""

import tensorflow as tf
from tensorflow.python.grappler import tf_optimizer


def run_traced(
    graph, fetches, feeds, *, grappler=True, threads=1, before=0, config=None
):
    """Return what a step yields, and TensorFlow's metadata of it.

    Args:
        graph: with the step.
        fetches: what the step is to yield.
        feeds: by tensor.
        grappler: whether it rewrites the graph.
        threads: how many ops may run at once.
        before: how many steps the Session runs first.
        config: more settings of the Session.
    """
    # Otherwise the first session of the process says how many threads there are.
    settings = tf.compat.v1.ConfigProto(
        inter_op_parallelism_threads=threads, use_per_session_threads=True
    )
    if config is not None:
        settings.MergeFrom(config)
    if not grappler:
        settings.graph_options.rewrite_options.disable_meta_optimizer = True
    data = tf.compat.v1.RunMetadata()
    options = tf.compat.v1.RunOptions(
        trace_level=tf.compat.v1.RunOptions.FULL_TRACE, output_partition_graphs=True
    )
    with tf.compat.v1.Session(graph=graph, config=settings) as session:
        with graph.as_default():
            variables = tf.compat.v1.global_variables()
            session.run(tf.compat.v1.variables_initializer(variables))
        for _ in range(before):
            session.run(fetches, feeds)
        values = session.run(fetches, feeds, options=options, run_metadata=data)
    return values, data


def trace(graph, fetches, feeds, **options):
    """Return the statistics of one traced step, node by node.

    What was there before the step (variables, constants, feeds) is not in the records.
    """
    _, data = run_traced(graph, fetches, feeds, **options)
    return [node for device in data.step_stats.dev_stats for node in device.node_stats]


def peak_of(stats):
    """Return the most bytes that a traced step allocates at once."""
    records = [
        (record.alloc_micros, record.alloc_bytes)
        for node in stats
        for memory in node.memory
        for record in memory.allocation_records
    ]
    live = peak = 0
    for _, size in sorted(records, key=lambda record: record[0]):
        live += size
        peak = max(peak, live)
    return peak


def order_of(stats, program):
    """Return the nodes of a program in the order of a traced step.

    What the Session folded into constants before is not in the trace. It comes right
    before what reads it.
    """
    names = [n.node_name for n in sorted(stats, key=lambda n: n.all_start_nanos)]
    place = {node.name: i for i, node in enumerate(program.nodes)}
    maker = {t: i for i, node in enumerate(program.nodes) for t in node.outputs}
    traced = [place[name] for name in names if name in place]
    folded = set(place.values()).difference(traced)
    order: dict[int, None] = {}
    for last in [*traced, *folded]:
        stack = [last]
        while stack:
            node = program.nodes[stack[-1]]
            behind = [*map(maker.__getitem__, node.inputs), *node.controls]
            missing = [i for i in behind if i not in order]
            assert folded.issuperset(missing)
            if not missing:
                order[stack.pop()] = None
            stack += missing
    return list(order)


def traced_peaks(graph, fetches, feeds, **options):
    """Return the peaks of three Sessions; addresses decide part of their order."""
    return [peak_of(trace(graph, fetches, feeds, **options)) for _ in range(3)]


def optimized(graph, fetches):
    """Return the nodes of a graph by name, as Grappler leaves them on a CPU."""
    meta = tf.compat.v1.MetaGraphDef(graph_def=graph.as_graph_def())
    for node in meta.graph_def.node:
        node.device = node.device or "/device:CPU:0"
    names = [t.name for t in fetches]
    meta.collection_def["train_op"].node_list.value.extend(names)
    found = tf_optimizer.OptimizeGraph(tf.compat.v1.ConfigProto(), meta)
    return {node.name: node for node in found.node}
