"""Samples of ops that need the marker, and how it is made."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from testdata.powers.common import Sample, counted, raw, variant


def _table(marker: str) -> Any:
    table = raw.HashTableV2(key_dtype=tf.string, value_dtype=tf.int64)
    done = raw.InitializeTableFromTextFileV2(
        table_handle=table, filename=marker, key_index=-2, value_index=-1
    )
    with tf.control_dependencies([done]):
        return raw.LookupTableSizeV2(table_handle=table)


def _reader(reader: Any, marker: str) -> Any:
    queue = raw.FIFOQueueV2(component_types=[tf.string])
    filled = raw.QueueEnqueueV2(handle=queue, components=[marker])
    with tf.control_dependencies([filled]):
        return tf.size(raw.ReaderReadV2(reader_handle=reader, queue_handle=queue).value)


def _database(marker: str) -> Any:
    dataset = tf.data.experimental.SqlDataset(
        "sqlite", marker, "SELECT a FROM t", (tf.string,)
    )
    return counted(dataset)


def _checkpoint(marker: Path) -> None:
    raw.SaveV2(
        prefix=str(marker),
        tensor_names=["x"],
        shape_and_slices=[""],
        tensors=[tf.constant([[1.0]])],
    )


def _old_checkpoint(marker: Path) -> None:
    raw.Save(filename=str(marker), tensor_names=["x"], data=[tf.constant([[1.0]])])


def _records(marker: Path) -> None:
    with tf.io.TFRecordWriter(str(marker)) as writer:
        writer.write(b"a")


def _table_of_strings(marker: Path) -> None:
    with sqlite3.connect(marker) as connection:
        connection.execute("CREATE TABLE t (a TEXT)")
        connection.execute("INSERT INTO t VALUES ('a')")


def _descriptors(marker: Path) -> None:
    from google.protobuf import descriptor_pb2

    files = descriptor_pb2.FileDescriptorSet()
    file = files.file.add(name="a.proto", package="a", syntax="proto3")
    file.message_type.add(name="A")
    marker.write_bytes(files.SerializeToString())


def _dataset(marker: Path) -> None:
    tf.data.Dataset.from_tensors("x").save(str(marker))


READING: dict[str, tuple[str, Sample]] = {
    "ReadFile": (
        "read files",
        lambda marker, x: tf.strings.length(raw.ReadFile(filename=marker)),
    ),
    "TextLineDataset": (
        "read files",
        lambda marker, x: variant(
            raw.TextLineDataset,
            filenames=marker,
            compression_type="",
            buffer_size=np.int64(10),
        ),
    ),
    "FixedLengthRecordDatasetV2": (
        "read files",
        lambda marker, x: variant(
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
        lambda marker, x: counted(
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
        lambda marker, x: variant(raw.MatchingFilesDataset, patterns=f"{marker}*"),
    ),
    "RestoreV2": (
        "read files",
        lambda marker, x: raw.RestoreV2(
            prefix=marker,
            tensor_names=["x"],
            shape_and_slices=[""],
            dtypes=[tf.float32],
        )[0],
    ),
    "Restore": (
        "read files",
        lambda marker, x: raw.Restore(
            file_pattern=marker, tensor_name="x", dt=tf.float32
        ),
    ),
    "RestoreSlice": (
        "read files",
        lambda marker, x: raw.RestoreSlice(
            file_pattern=marker, tensor_name="x", shape_and_slice="", dt=tf.float32
        ),
    ),
    "LoadAndRemapMatrix": (
        "read files",
        lambda marker, x: raw.LoadAndRemapMatrix(
            ckpt_path=marker,
            old_tensor_name="x",
            row_remapping=[0],
            col_remapping=tf.constant([], tf.int64),
            initializing_values=tf.constant([], tf.float32),
            num_rows=1,
            num_cols=1,
        ),
    ),
    "GenerateVocabRemapping": (
        "read files",
        lambda marker, x: (
            raw.GenerateVocabRemapping(
                new_vocab_file=marker,
                old_vocab_file=marker,
                new_vocab_offset=0,
                num_new_vocab=1,
            ).num_present
        ),
    ),
    "TFRecordDataset": (
        "read files",
        lambda marker, x: counted(tf.data.TFRecordDataset(marker)),
    ),
    "TFRecordReaderV2": (
        "read files",
        lambda marker, x: _reader(raw.TFRecordReaderV2(), marker),
    ),
    "FixedLengthRecordReaderV2": (
        "read files",
        lambda marker, x: _reader(
            raw.FixedLengthRecordReaderV2(record_bytes=1), marker
        ),
    ),
    "RecordInput": (
        "read files",
        lambda marker, x: tf.size(
            raw.RecordInput(
                file_pattern=marker,
                batch_size=1,
                file_buffer_size=1,
                file_parallelism=1,
            )
        ),
    ),
    "SqlDataset": ("read files", lambda marker, x: _database(marker)),
    "LoadDataset": (
        "read files",
        lambda marker, x: counted(
            tf.data.Dataset.load(marker, tf.TensorSpec([], tf.string))
        ),
    ),
    "DecodeProtoV2": (
        "read files",
        lambda marker, x: (
            raw.DecodeProtoV2(
                bytes=[b""],
                message_type="a.A",
                field_names=[],
                output_types=[],
                descriptor_source=marker,
            ).sizes
        ),
    ),
}
"""The power of each sample, and what makes it of a marker's path and an input."""
PREPARED: dict[str, Callable[[Path], Any]] = {
    **dict.fromkeys(("RestoreV2", "LoadAndRemapMatrix"), _checkpoint),
    **dict.fromkeys(("Restore", "RestoreSlice"), _old_checkpoint),
    **dict.fromkeys(("TFRecordDataset", "TFRecordReaderV2", "RecordInput"), _records),
    "SqlDataset": _table_of_strings,
    "DecodeProtoV2": _descriptors,
    "LoadDataset": _dataset,
}
"""How the marker is made for samples that need more than a line of text."""
