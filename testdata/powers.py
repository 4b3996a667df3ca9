"""Samples of models that do more than compute, each harmless: it touches one marker.

`SAMPLES` names them; `save(name, folder, marker)` writes one as a SavedModel. Run, a
sample of "write files" makes the marker or something that begins with its name; one of
"read files" or "list folders" needs the marker to be there. Ways in which ops hide (in
branches, loops, datasets, initializers, objects) are in `HIDDEN`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

raw = tf.raw_ops
Sample = Callable[[str, Any], Any]


def _counted(dataset: Any) -> Any:
    return dataset.reduce(np.int64(0), lambda count, _: count + 1)


def _variant(op: Any, **inputs: Any) -> Any:
    """Return how many strings a dataset has that a raw op makes."""
    reduced = raw.ReduceDataset(
        input_dataset=op(**inputs),
        initial_state=[tf.constant(0, tf.int64)],
        other_arguments=[],
        f=_count.get_concrete_function(),
        output_types=[tf.int64],
        output_shapes=[[]],
    )
    return reduced[0]


@tf.function(
    input_signature=[tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.string)]
)
def _count(n: Any, _: Any) -> Any:
    return n + 1


def _done(op: Any, x: Any) -> Any:
    """Return x behind an op without results."""
    with tf.control_dependencies([op]):
        return tf.identity(x)


def _table(marker: str) -> Any:
    table = raw.HashTableV2(key_dtype=tf.string, value_dtype=tf.int64)
    done = raw.InitializeTableFromTextFileV2(
        table_handle=table, filename=marker, key_index=-2, value_index=-1
    )
    with tf.control_dependencies([done]):
        return raw.LookupTableSizeV2(table_handle=table)


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
        return _done(raw.FlushSummaryWriter(writer=handle), x)


def _reader(reader: Any, marker: str) -> Any:
    queue = raw.FIFOQueueV2(component_types=[tf.string])
    filled = raw.QueueEnqueueV2(handle=queue, components=[marker])
    with tf.control_dependencies([filled]):
        return tf.size(raw.ReaderReadV2(reader_handle=reader, queue_handle=queue).value)


SAMPLES: dict[str, tuple[str, Sample]] = {
    "WriteFile": (
        "write files",
        lambda marker, x: _done(raw.WriteFile(filename=marker, contents="x"), x),
    ),
    "SaveV2": (
        "write files",
        lambda marker, x: _done(
            raw.SaveV2(
                prefix=marker, tensor_names=["x"], shape_and_slices=[""], tensors=[x]
            ),
            x,
        ),
    ),
    "Save": (
        "write files",
        lambda marker, x: _done(
            raw.Save(filename=marker, tensor_names=["x"], data=[x]), x
        ),
    ),
    "SaveSlices": (
        "write files",
        lambda marker, x: _done(
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
        lambda marker, x: _done(
            raw.PrintV2(input="x", output_stream=f"file://{marker}"), x
        ),
    ),
    "SummaryWriter": ("write files", _writer),
    "CacheDataset": (
        "write files",
        lambda marker, x: _counted(tf.data.Dataset.range(2).cache(marker)),
    ),
    "DatasetToTFRecord": (
        "write files",
        lambda marker, x: _done(
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
        lambda marker, x: _counted(tf.data.Dataset.range(2).snapshot(marker)),
    ),
    "DebugIdentityV2": (
        "write files",
        lambda marker, x: raw.DebugIdentityV2(
            input=x, tfdbg_run_id="run", debug_urls=[f"file://{marker}"]
        ),
    ),
    "DebugIdentity": (
        "write files",
        lambda marker, x: raw.DebugIdentity(
            input=x, tensor_name="x:0", debug_urls=[f"file://{marker}"]
        ),
    ),
    "ReadFile": (
        "read files",
        lambda marker, x: tf.strings.length(raw.ReadFile(filename=marker)),
    ),
    "TextLineDataset": (
        "read files",
        lambda marker, x: _variant(
            raw.TextLineDataset,
            filenames=marker,
            compression_type="",
            buffer_size=np.int64(10),
        ),
    ),
    "FixedLengthRecordDatasetV2": (
        "read files",
        lambda marker, x: _variant(
            raw.FixedLengthRecordDatasetV2,
            filenames=marker,
            header_bytes=np.int64(0),
            record_bytes=np.int64(1),
            footer_bytes=np.int64(0),
            buffer_size=np.int64(10),
            compression_type="",
        ),
    ),
    "CSVDataset": (
        "read files",
        lambda marker, x: _counted(
            tf.data.experimental.CsvDataset(marker, [tf.string] * 2)
        ),
    ),
    "InitializeTableFromTextFileV2": ("read files", lambda marker, x: _table(marker)),
    "WholeFileReaderV2": (
        "read files",
        lambda marker, x: _reader(raw.WholeFileReaderV2(), marker),
    ),
    "TextLineReaderV2": (
        "read files",
        lambda marker, x: _reader(raw.TextLineReaderV2(), marker),
    ),
    "FixedUnigramCandidateSampler": (
        "read files",
        lambda marker, x: (
            raw.FixedUnigramCandidateSampler(
                true_classes=np.int64([[0]]),
                num_true=1,
                num_sampled=1,
                unique=False,
                range_max=1,
                vocab_file=marker,
            ).sampled_candidates
        ),
    ),
    "MatchingFiles": (
        "list folders",
        lambda marker, x: 1 // tf.size(raw.MatchingFiles(pattern=f"{marker}*")),
    ),
    "MatchingFilesDataset": (
        "list folders",
        lambda marker, x: _variant(raw.MatchingFilesDataset, patterns=f"{marker}*"),
    ),
}
"""The power of each sample, and what makes it of a marker's path and an input."""


def _written(marker: str, x: Any) -> Any:
    return SAMPLES["WriteFile"][1](marker, x)


HIDDEN: dict[str, Sample] = {
    "branch": lambda marker, x: tf.cond(x > 0, lambda: _written(marker, x), lambda: x),
    "case": lambda marker, x: tf.switch_case(
        tf.cast(x, tf.int32) * 0, [lambda: _written(marker, x), lambda: x]
    ),
    "loop": lambda marker, x: tf.while_loop(
        lambda i, _: i < 1, lambda i, y: (i + 1, _written(marker, y)), (0, x)
    )[1],
    "function": lambda marker, x: tf.function(
        lambda y: 2 * tf.function(lambda z: _written(marker, z))(y)
    )(x),
    "map": lambda marker, x: _counted(
        tf.data.Dataset.range(2).map(lambda i: _written(marker, i))
    ),
    "computed path": lambda marker, x: _written(
        tf.strings.join([marker, tf.strings.as_string(tf.cast(x, tf.int32))]), x
    ),
    "custom gradient": lambda marker, x: tf.custom_gradient(
        lambda y: (_written(marker, y), lambda slope: slope)
    )(x),
}
"""Ways in which an op that writes the marker is hidden."""


def save(sample: Sample, folder: Path, marker: Path) -> None:
    """Write a sample as a SavedModel."""
    module = tf.Module()
    spec = [tf.TensorSpec([], name="x")]
    module.f = tf.function(
        lambda x: {"y": sample(str(marker), x)}, input_signature=spec
    )
    signature = module.f.get_concrete_function()
    tf.saved_model.save(module, str(folder), {"serving_default": signature})
