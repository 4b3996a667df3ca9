"""Samples of ops that write the marker, or run what does."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from testdata.powers.common import Sample, counted, counted_variant, done, raw, written


@tf.function(input_signature=[tf.TensorSpec([], tf.string)])
def _first(_: Any) -> Any:
    return tf.constant(0, tf.int64)


def _writer(marker: str, x: Any) -> Any:
    handle = raw.SummaryWriter(shared_name="", container="")
    made = raw.CreateSummaryFileWriter(
        writer=handle,
        logdir=marker,
        max_queue=1,
        flush_millis=1,
        filename_suffix=".x",
    )
    with tf.control_dependencies([made]):
        written = raw.WriteScalarSummary(
            writer=handle, step=np.int64(1), tag="a", value=x
        )
    with tf.control_dependencies([written]):
        return done(raw.FlushSummaryWriter(writer=handle), x)


def _merged(marker: str, x: Any) -> Any:
    part = f"{marker}_part"
    saved = raw.SaveV2(
        prefix=part, tensor_names=["x"], shape_and_slices=[""], tensors=[x]
    )
    with tf.control_dependencies([saved]):
        merged = raw.MergeV2Checkpoints(
            checkpoint_prefixes=[part], destination_prefix=marker
        )
    return done(merged, x)


def _summary_database(marker: str, x: Any) -> Any:
    handle = raw.SummaryWriter(shared_name="db", container="")
    made = raw.CreateSummaryDbWriter(
        writer=handle,
        db_uri=f"file:{marker}",
        experiment_name="e",
        run_name="r",
        user_name="u",
    )
    return done(made, x)


def _event(marker: str, x: Any) -> Any:
    handle = raw.SummaryWriter(shared_name="event", container="")
    made = raw.CreateSummaryFileWriter(
        writer=handle, logdir=marker, max_queue=1, flush_millis=1, filename_suffix=".e"
    )
    with tf.control_dependencies([made]):
        written = raw.ImportEvent(writer=handle, event=b"")
    with tf.control_dependencies([written]):
        return done(raw.FlushSummaryWriter(writer=handle), x)


def _of_graph(marker: str, x: Any) -> Any:
    """Count a dataset whose graph is a constant, and writes the marker."""
    with tf.init_scope():
        dataset = tf.data.Dataset.from_tensors("x").map(lambda y: written(marker, y))
        graph = raw.DatasetToGraphV2(
            input_dataset=dataset._variant_tensor, external_state_policy=1
        ).numpy()
    # A constant would be folded, and datasets cannot be constants.
    fed = tf.where(x > -1e9, graph, "")
    return counted_variant(raw.DatasetFromGraph(graph_def=fed))


def _remote(marker: str, x: Any) -> Any:
    function = tf.function(
        lambda y: written(marker, y), input_signature=[tf.TensorSpec([])]
    ).get_concrete_function()
    here = "/job:localhost/replica:0/task:0/device:CPU:0"
    return raw.RemoteCall(target=here, args=[x], Tout=[tf.float32], f=function)[0]


def _py_func(marker: str, x: Any) -> Any:
    return tf.numpy_function(lambda y: y, [x], tf.float32)


def _eager_py_func(marker: str, x: Any) -> Any:
    return tf.py_function(lambda y: y, [x], tf.float32)


def _registered(marker: str, x: Any) -> Any:
    return raw.RegisterDatasetV2(
        dataset=tf.data.Dataset.range(1)._variant_tensor,
        address="127.0.0.1:1",
        protocol="grpc",
        external_state_policy=1,
    )


def _distributed(marker: str, x: Any) -> Any:
    dataset = tf.data.Dataset.range(1)._variant_tensor
    saved = raw.DistributedSave(
        dataset=dataset, directory=marker, address="127.0.0.1:1", metadata=""
    )
    return done(saved, x)


def _watched(op: Any) -> Sample:
    """Return a sample of an op that tells a debugger of a tensor, through a file."""
    return lambda marker, x: op(
        input=x, tensor_name="x:0", debug_urls=[f"file://{marker}"]
    )


WRITING: dict[str, tuple[str, Sample]] = {
    "WriteFile": (
        "write files",
        lambda marker, x: done(raw.WriteFile(filename=marker, contents="x"), x),
    ),
    "SaveV2": (
        "write files",
        lambda marker, x: done(
            raw.SaveV2(
                prefix=marker, tensor_names=["x"], shape_and_slices=[""], tensors=[x]
            ),
            x,
        ),
    ),
    "Save": (
        "write files",
        lambda marker, x: done(
            raw.Save(filename=marker, tensor_names=["x"], data=[x]), x
        ),
    ),
    "SaveSlices": (
        "write files",
        lambda marker, x: done(
            raw.SaveSlices(
                filename=marker,
                tensor_names=["x"],
                shapes_and_slices=["1 0,1"],
                data=[x[None]],
            ),
            x,
        ),
    ),
    "PrintV2": (
        "write files",
        lambda marker, x: done(
            raw.PrintV2(input="x", output_stream=f"file://{marker}"), x
        ),
    ),
    "CreateSummaryFileWriter": ("write files", _writer),
    "CacheDataset": (
        "write files",
        lambda marker, x: counted(tf.data.Dataset.range(2).cache(marker)),
    ),
    "DatasetToTFRecord": (
        "write files",
        lambda marker, x: done(
            raw.DatasetToTFRecord(
                input_dataset=tf.data.Dataset.from_tensors("x")._variant_tensor,
                filename=marker,
                compression_type="",
            ),
            x,
        ),
    ),
    "SnapshotDatasetV2": (
        "write files",
        lambda marker, x: counted(tf.data.Dataset.range(2).snapshot(marker)),
    ),
    "DebugIdentityV2": (
        "write files",
        lambda marker, x: raw.DebugIdentityV2(
            input=x, tfdbg_run_id="run", debug_urls=[f"file://{marker}"]
        ),
    ),
    "DebugIdentity": ("write files", _watched(raw.DebugIdentity)),
    "SnapshotDataset": (
        "write files",
        lambda marker, x: counted_variant(
            raw.SnapshotDataset(
                input_dataset=tf.data.Dataset.from_tensors("x")._variant_tensor,
                path=marker,
                output_types=[tf.string],
                output_shapes=[[]],
            )
        ),
    ),
    "SaveDatasetV2": (
        "write files",
        lambda marker, x: counted_variant(
            raw.SaveDatasetV2(
                input_dataset=tf.data.Dataset.from_tensors("x")._variant_tensor,
                path=marker,
                shard_func_other_args=[],
                shard_func=_first.get_concrete_function(),
                output_types=[tf.string],
                output_shapes=[[]],
            )
        ),
    ),
    "MergeV2Checkpoints": ("write files", _merged),
    "CreateSummaryDbWriter": ("write files", _summary_database),
    "ImportEvent": ("write files", _event),
    "DebugNanCount": ("write files", _watched(raw.DebugNanCount)),
    "DebugNumericSummary": ("write files", _watched(raw.DebugNumericSummary)),
    "DatasetFromGraph": ("run code", _of_graph),
    "RemoteCall": ("open connections", _remote),
    "PyFunc": ("run code", _py_func),
    "EagerPyFunc": ("run code", _eager_py_func),
    "RegisterDatasetV2": ("open connections", _registered),
    "DistributedSave": ("write files", _distributed),
}
"""The power of each sample, and what makes it of a marker's path and an input."""
NOT_RUN = {
    **dict.fromkeys(
        ("PyFunc", "EagerPyFunc"),
        "its function is one of the process that made it, by a number",
    ),
    **dict.fromkeys(
        ("RegisterDatasetV2", "DistributedSave"),
        "it waits for a server, and none answers here",
    ),
}
"""The samples that cannot be run, and why."""
