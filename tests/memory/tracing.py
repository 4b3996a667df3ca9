"""The exact peak of a step: from the allocation records of a traced Session."""

from __future__ import annotations

import tensorflow as tf


def traced_peak(graph, fetches, feeds, *, grappler=True):
    """Return the most bytes that one traced step allocates at once.

    The Session has one inter-op thread. What was there before the step (variables,
    constants, feeds) is not in the records.
    """
    # Otherwise the first session of the process says how many threads there are.
    config = tf.compat.v1.ConfigProto(
        inter_op_parallelism_threads=1, use_per_session_threads=True
    )
    if not grappler:
        config.graph_options.rewrite_options.disable_meta_optimizer = True
    data = tf.compat.v1.RunMetadata()
    options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
    with tf.compat.v1.Session(graph=graph, config=config) as session:
        with graph.as_default():
            variables = tf.compat.v1.global_variables()
            session.run(tf.compat.v1.variables_initializer(variables))
        session.run(fetches, feeds, options=options, run_metadata=data)
    records = [
        (record.alloc_micros, record.alloc_bytes)
        for device in data.step_stats.dev_stats
        for node in device.node_stats
        for memory in node.memory
        for record in memory.allocation_records
    ]
    live = peak = 0
    for _, size in sorted(records, key=lambda record: record[0]):
        live += size
        peak = max(peak, live)
    return peak


def traced_peaks(graph, fetches, feeds, *, sessions=3):
    """Return the peaks of several Sessions; addresses decide part of their order."""
    return [traced_peak(graph, fetches, feeds) for _ in range(sessions)]
