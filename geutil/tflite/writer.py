"""TFLite files written from objects: tables in a flatbuffer, weights behind them.

Weights are not copied into the flatbuffer: its tables are built with room for the
places of the weights, which are written one after another, in the file or behind it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from geutil.errors import GeutilError, TFLiteError
from geutil.tflite.arguments import check_text
from geutil.tflite.parts import (
    Array,
    Buffer,
    Code,
    Contents,
    LiteGraph,
    LiteOp,
    LiteSignature,
    LiteTensor,
    Quantization,
    copied_record,
)
from geutil.tflite.reader import moved_archive
from geutil.tflite.schema import (
    CUSTOM,
    FAULTS,
    IDENTIFIER,
    is_call,
    kind_number,
    option_fault,
    option_names,
    option_number,
    schema,
    type_numbers,
)
from geutil.tflite.verify import verify
from geutil.tflite.versions import (
    RUNTIME,
    runtime_entry,
    runtime_named,
    runtime_needed,
)

_ALIGNMENT = 16
"""The schema aligns the bytes of a buffer so."""
_LARGEST = 2**31 - 1
"""Offsets in a flatbuffer reach so far; weights of larger files lie behind it."""
_TABLES = 64 << 20
"""Room for the tables of a file whose weights lie inside."""
_DATA, _OFFSET = 4, 6
"""The fields of the bytes and of their place in the schema's table of a buffer."""
_LARGE_OFFSET = 22
"""The field of an op for the place of custom options behind the flatbuffer."""
_LAST_OF_ONE_BYTE = 127
"""Kinds up to this one are written in a field for old readers, too."""


class _Stub:
    """A buffer whose bytes are written behind the tables."""

    def __init__(self, buffer: Buffer, placeholder: list[int], split: bool) -> None:
        self._buffer, self._placeholder, self._split = buffer, placeholder, split

    def Pack(self, builder: Any) -> int:  # noqa: N802
        """Write the table; its bytes are all the same placeholder at first."""
        tables, data = schema(), self._buffer.data
        here = data is not None and not (self._split and data.size)
        if here and not self._placeholder:
            self._placeholder.append(builder.CreateNumpyVector(np.zeros(0, np.uint8)))
        tables.BufferStart(builder)
        if here:
            tables.BufferAddData(builder, self._placeholder[0])
        elif data is not None:
            # Smaller numbers mean that there is none.
            tables.BufferAddOffset(builder, 2)
            tables.BufferAddSize(builder, data.size)
        return int(tables.BufferEnd(builder))


class Writer:
    """Writes one file: tables in a flatbuffer, then the bytes of the buffers."""

    def __init__(self, file: Contents) -> None:
        """Collect the tables of a file, each buffer once."""
        if file.unknown:
            raise TFLiteError(
                f"the file has {file.unknown}, which the schema that is installed "
                "lacks and would lose; install a newer ai-edge-litert"
            )
        if not file.graphs:
            raise TFLiteError("the file has no subgraph; begin one with add_input")
        self._file = file
        self._graphs = {graph: i for i, graph in enumerate(file.graphs)}
        self._metadata = {**file.metadata}
        # An edit may have added a kernel that is newer than the runtime named there.
        if (runtime := runtime_needed(file)) != runtime_named(file):
            self._metadata[RUNTIME] = runtime_entry(runtime)
        self._buffers = self._used_buffers()
        self._buffer_at = {id(b): i for i, b in enumerate(self._buffers)}
        self._codes = [*file.codes]
        self._code_at: dict[Any, int] = {}
        for i, code in enumerate(self._codes):
            self._code_at.setdefault(id(code), i)
            key = (code.kind, code.is_custom, code.version)
            self._code_at.setdefault(key, i)
        self._large: list[tuple[int, int, bytes]] = []
        total = sum(b.size + _ALIGNMENT for b in self._buffers)
        # Nothing is packed yet, so the size of the tables is an estimate.
        self._split = file.is_split or total > _LARGEST - _TABLES

    def _used_buffers(self) -> list[Buffer]:
        """Return the buffers of the new file, in the order of the one that was read."""
        file = self._file
        named = [t.buffer for t in file.tensors]
        named += [*self._metadata.values(), *file.old_metadata]
        used = {id(b): b for b in named}
        kept = [
            b for i, b in enumerate(file.buffers) if i in file.kept or id(b) in used
        ]
        known = {id(b) for b in kept}
        return [*kept, *(b for key, b in used.items() if key not in known)]

    def pieces(self) -> Iterator[Any]:
        """Yield the bytes of the file, one piece after another."""
        import flatbuffers

        builder = flatbuffers.Builder(1 << 16)
        try:
            builder.Finish(self._model().Pack(builder), IDENTIFIER)
        except FAULTS as error:
            if isinstance(error, GeutilError):
                raise
            # The checks name the op or tensor at fault; the schema's error does not.
            verify(self._file)
            raise TFLiteError(
                f"the file has a part that cannot be written: {error!r}; look at the "
                "fields that were set last"
            ) from error
        head = bytearray(builder.Output())
        head += bytes(-len(head) % _ALIGNMENT)
        tables = schema().Model.GetRootAs(head, 0)
        pieces, total = self._behind(head, tables)
        # The estimate of the tables may have been too small.
        if not self._split and total > _LARGEST:
            raise TFLiteError(
                f"the file would take {total:,} bytes with its weights inside"
            )
        yield bytes(head)
        end = len(head)
        for place, prefix, data in pieces:
            yield bytes(place - end - len(prefix)) + prefix
            yield data
            end = place + len(data)
        yield bytes(total - end)
        # An archive counts places from the start of the file, and has moved.
        if self._file.archive is not None:
            yield moved_archive(self._file.archive, total)

    def _behind(
        self, head: bytearray, tables: Any
    ) -> tuple[list[tuple[int, bytes, Any]], int]:
        """Return the bytes behind the tables, placed, and the end; note the places."""
        pieces: list[tuple[int, bytes, Any]] = []
        end = len(head)
        for i, buffer in enumerate(self._buffers):
            if buffer.data is None or (self._split and not buffer.size):
                continue
            table = tables.Buffers(i)._tab
            # In a flatbuffer, the count of the bytes stands before them.
            prefix = b"" if self._split else struct.pack("<I", buffer.size)
            start = end + len(prefix)
            start += -start % _ALIGNMENT
            if self._split:
                struct.pack_into("<Q", head, table.Pos + table.Offset(_OFFSET), start)
            else:
                field = table.Pos + table.Offset(_DATA)
                struct.pack_into("<I", head, field, start - 4 - field)
            pieces.append((start, prefix, np.ascontiguousarray(buffer.data).data))
            end = start + buffer.size
        for graph, op, options in self._large:
            table = tables.Subgraphs(graph).Operators(op)._tab
            start = end + -end % _ALIGNMENT
            field = table.Pos + table.Offset(_LARGE_OFFSET)
            struct.pack_into("<Q", head, field, start)
            pieces.append((start, b"", options))
            end = start + len(options)
        return pieces, end + -end % 4

    def _model(self) -> Any:
        """Return the schema's object of the file."""
        file, types = self._file, schema()
        model = copied_record(file.record)
        model.description = check_text(file.description, "the description") or None
        model.subgraphs = [self._subgraph(graph) for graph in file.graphs]
        model.operatorCodes = [code.record for code in self._codes]
        placeholder: list[int] = []
        model.buffers = [_Stub(b, placeholder, self._split) for b in self._buffers]
        model.metadata = []
        for name, buffer in self._metadata.items():
            entry = types.MetadataT()
            entry.name = check_text(name, "the name of metadata")
            entry.buffer = self._buffer_at[id(buffer)]
            model.metadata.append(entry)
        model.metadata = model.metadata or None
        old = [self._buffer_at[id(b)] for b in file.old_metadata]
        model.metadataBuffer = np.asarray(old, np.int32) if old else None
        model.signatureDefs = [self._signature(s) for s in file.signatures.values()]
        model.signatureDefs = model.signatureDefs or None
        return model

    def _subgraph(self, graph: LiteGraph) -> Any:
        subgraph = copied_record(graph.record)
        tensors = graph.tensors
        at = {tensor: i for i, tensor in enumerate(tensors)}
        subgraph.name = graph.name or None
        subgraph.tensors = [self._tensor(tensor, at) for tensor in tensors]
        subgraph.inputs = _places_of(graph.inputs, at)
        subgraph.outputs = _places_of(graph.outputs, at)
        place = self._graphs[graph]
        subgraph.operators = [
            self._op(op, at, place, i) for i, op in enumerate(graph.ops)
        ]
        return subgraph

    def _tensor(self, tensor: LiteTensor, at: Mapping[LiteTensor, int]) -> Any:
        """Return the record of a tensor with the number of its buffer."""
        record = copied_record(tensor.record)
        record.name = tensor.name
        record.type = type_numbers()[tensor.dtype]
        record.buffer = self._buffer_at[id(tensor.buffer)]
        record.isVariable = tensor.is_variable
        quantization = tensor.quantization
        # The record that was read keeps fields that geutil does not know, such as min.
        if quantization is not tensor.as_read:
            record.quantization = _quantization_record(quantization)
        # Tensors can have other numbers in this file than in the one that was read.
        if quantization is not None and quantization.block_scales is not None:
            entry = record.quantization = copied_record(record.quantization)
            details = entry.details = copied_record(entry.details)
            zeros = quantization.block_zeros
            details.scales = at[quantization.block_scales]
            details.zeroPoints = -1 if zeros is None else at[zeros]
        return record

    def _op(
        self, op: LiteOp, at: Mapping[LiteTensor, int], graph: int, place: int
    ) -> Any:
        """Return the record of an op with the numbers of its code and tensors."""
        record = copied_record(op.record)
        record.opcodeIndex = self._code_of(op)
        record.inputs = _places_of(op.inputs, at)
        record.outputs = _places_of(op.outputs, at)
        if op.intermediates:
            record.intermediates = _places_of(op.intermediates, at)
        if op.custom_options and self._split:
            # The place is filled in later; 0 and 1 would mean that there are none.
            record.largeCustomOptionsOffset = 2
            record.largeCustomOptionsSize = len(op.custom_options)
            self._large.append((graph, place, op.custom_options))
        elif op.custom_options:
            record.customOptions = np.frombuffer(op.custom_options, np.uint8)
        for option in op.options.items():
            if fault := option_fault(op.table, *option):
                raise TFLiteError(f"{op!r} {fault}")
        if op.table is None:
            return record
        field = "builtinOptions"
        # Newer kinds have their tables in the second union.
        if not hasattr(schema().BuiltinOptions, op.table):
            field = "builtinOptions2"
        union = getattr(schema(), field[0].upper() + field[1:])
        setattr(record, f"{field}Type", getattr(union, op.table))
        setattr(record, field, self._options_record(op, op.table))
        return record

    def _options_record(self, op: LiteOp, table: str) -> Any:
        names = {option: name for name, option in option_names(table).items()}
        record = getattr(schema(), f"{table}T")()
        for option, value in op.options.items():
            if is_call(option) and not isinstance(value, int):
                value = -1 if value is None else self._graphs[value]
            elif option == "branch_subgraph_indices":
                value = [self._graphs[graph] for graph in value]
            setattr(record, names[option], option_number(option, value))
        return record

    def _code_of(self, op: LiteOp) -> int:
        """Return the number of an op's code, which is added where there is none."""
        known = self._code_at.get(id(Code.of(op)))
        if known is not None:
            return known
        key = (op.kind, op.is_custom, op.version)
        if key not in self._code_at:
            record = schema().OperatorCodeT()
            if op.is_custom:
                record.customCode = check_text(op.kind, "the kind of a custom op")
            number = kind_number(CUSTOM if op.is_custom else op.kind)
            record.builtinCode, record.version = number, op.version
            record.deprecatedBuiltinCode = min(number, _LAST_OF_ONE_BYTE)
            self._code_at[key] = len(self._codes)
            self._codes.append(Code(op.kind, op.version, op.is_custom, record))
        return self._code_at[key]

    def _signature(self, signature: LiteSignature) -> Any:
        types = schema()
        record = types.SignatureDefT()
        record.signatureKey = check_text(signature.key, "the name of a signature")
        record.subgraphIndex = self._graphs[signature.graph]
        at = {tensor: i for i, tensor in enumerate(signature.graph.tensors)}
        for field in ("inputs", "outputs"):
            ends = []
            for name, tensor in getattr(signature, field).items():
                end = types.TensorMapT()
                end.name = check_text(name, "the name of an end of a signature")
                end.tensorIndex = at[tensor]
                ends.append(end)
            setattr(record, field, ends)
        return record


def _quantization_record(quantization: Quantization | None) -> Any:
    """Return the schema's object of a quantization; the tensors of blocks are open."""
    if quantization is None:
        return None
    types = schema()
    record = types.QuantizationParametersT()
    record.quantizedDimension = quantization.axis
    if quantization.block:
        record.detailsType = types.QuantizationDetails.BlockwiseQuantization
        record.details = types.BlockwiseQuantizationT()
        record.details.blockSize = quantization.block
        return record
    record.scale = np.asarray(quantization.scales, np.float32)
    zeros = np.asarray(quantization.zero_points, np.int64)
    record.zeroPoint = np.broadcast_to(zeros, record.scale.shape).copy()
    return record


def _places_of(
    tensors: Iterable[LiteTensor | None], at: Mapping[LiteTensor, int]
) -> Array:
    return np.asarray([-1 if t is None else at[t] for t in tensors], np.int32)
