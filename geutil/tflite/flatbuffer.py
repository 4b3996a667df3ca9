"""The flatbuffer of a TFLite file, read into objects and written from objects.

Flatbuffers are read where they lie, and nothing in them says whether they are intact:
an offset that leads anywhere is followed. So each list is counted against the size of
the file, and each index against the list that it is for. A flatbuffer does not know its
own end, so a zip archive that libraries for metadata append is found from the end.

Weights are not copied into the flatbuffer that is written: its tables are built with
room for the places of the weights, which are written one after another, in the file or
behind it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from flatbuffers import number_types

from geutil.errors import GeutilError, TFLiteError
from geutil.tflite.arguments import check_text
from geutil.tflite.kinds import (
    RUNTIME,
    runtime_entry,
    runtime_named,
    runtime_needed,
)
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
    text,
)
from geutil.tflite.schema import (
    CUSTOM,
    FAULTS,
    IDENTIFIER,
    field_count,
    is_call,
    kind_names,
    kind_number,
    option_fault,
    option_names,
    option_number,
    option_word,
    schema,
    type_names,
    type_numbers,
    words_of,
)
from geutil.tflite.verify import verify

_END = struct.Struct("<4s4H2IH")
"""The record at the end: signature, disks, entries twice, directory, comment."""
_END_MARK, _ENTRY_MARK, _FILE_MARK = b"PK\5\6", b"PK\1\2", b"PK\3\4"
_ENTRY = struct.Struct("<4s24x3H8xI")
"""An entry of the directory: signature, three lengths, the place of its file."""


def _find_archive(data: Array) -> Array | None:
    """Return the bytes of the archive at the end of a file; None without one."""
    try:
        return data[_places(data)[0] :]
    except (struct.error, ValueError):
        return None


def _moved_archive(archive: Array, place: int) -> bytes:
    """Return an archive as it has to be written at a place of a file."""
    start, directory, entries = _places(archive)
    moved = bytearray(archive.tobytes())
    for at, file in entries:
        struct.pack_into("<I", moved, at + 42, file - start + place)
    struct.pack_into("<I", moved, len(moved) - 6, directory - start + place)
    return bytes(moved)


def _places(data: Array) -> tuple[int, int, list[tuple[int, int]]]:
    """Return where an archive and its directory start; each entry and its file."""
    end = len(data) - _END.size
    if end < 0:
        raise ValueError("too short for an archive")
    mark, *_, size, stated, comment = _END.unpack(data[end:].tobytes())
    if mark != _END_MARK or comment:
        raise ValueError("no archive ends here")
    directory = end - int(size)
    # Some writers count from the start of the archive, not of the file.
    shift, entries, at = directory - stated, [], directory
    while at < end:
        mark, *lengths, place = _ENTRY.unpack(_piece(data, at, _ENTRY.size))
        file = place + shift
        if mark != _ENTRY_MARK or _piece(data, file, 4) != _FILE_MARK:
            raise ValueError("the directory of the archive is damaged")
        entries.append((at, file))
        at += 46 + sum(lengths)
    if directory < 0 or at != end:
        raise ValueError("the directory of the archive is damaged")
    return min([directory, *(file for _, file in entries)]), directory, entries


def _piece(data: Array, start: int, size: int) -> bytes:
    if start < 0:
        raise ValueError("a place before the file")
    piece: Any = data[start : start + size]
    return bytes(np.asarray(piece))


T = TypeVar("T")

_DATA, _OFFSET = 4, 6
"""The fields of the bytes and of their place in the schema's table of a buffer."""


class BrokenFileError(TFLiteError):
    """The bytes are not a complete TFLite file."""


def read_into(file: Contents, blob: Any) -> None:
    """Read a file into an object without contents."""
    if not _is_tflite(blob):
        raise BrokenFileError("these bytes are no TFLite file")
    try:
        _Reader(file, blob).read()
    except BrokenFileError:
        raise
    except FAULTS as error:
        said = str(error) or type(error).__name__
        raise BrokenFileError(
            f"the TFLite file is cut off or damaged: {said}"
        ) from error


class _Reader:
    """Reads one file, and counts the bytes that it reads."""

    def __init__(self, file: Contents, blob: Any) -> None:
        self._blob = blob
        self._bytes = np.frombuffer(blob, np.uint8)
        # Of an intact file, all lists together have fewer entries than it has bytes.
        self._left = len(blob)
        self._model = schema().Model.GetRootAs(blob, 0)
        self._file = file

    def read(self) -> None:
        """Read the file."""
        model, file = self._model, self._file
        file.bytes_total = len(self._blob)
        file.description = text(model.Description())
        self._note_unknown("Model", model)
        file.buffers = [*self._each(model, "Buffers", self._buffer)]
        file.codes = [*self._each(model, "OperatorCodes", self._code)]
        count = self._counted(model.SubgraphsLength())
        if not count:
            raise BrokenFileError("the TFLite file holds no subgraph")
        file.graphs = [LiteGraph() for _ in range(count)]
        for i, graph in enumerate(file.graphs):
            self._fill(graph, model.Subgraphs(i))
        for one in self._each(model, "SignatureDefs", self._signature):
            file.signatures[one.key] = one
        for name, buffer in self._each(model, "Metadata", self._metadata):
            file.metadata[name] = buffer
        places = self._numbers(model, "MetadataBuffer")
        file.old_metadata = [self._at(p, file.buffers, "buffer") for p in places]
        file.record = self._rest(model)
        file.archive = _find_archive(self._bytes)
        used = {id(t.buffer) for t in file.tensors}
        used |= {id(b) for b in (*file.metadata.values(), *file.old_metadata)}
        # The schema keeps buffer 0 empty, for tensors without values.
        file.kept = {i for i, b in enumerate(file.buffers) if id(b) not in used} | {0}

    def _rest(self, model: Any) -> Any:
        """Return the tables of a model that are read no further, and its version."""
        rest = schema().ModelT()
        rest.version = model.Version()
        for field in ("ExternalBufferGroups", "ExternalBuffers"):
            if hasattr(model, field):
                kind = getattr(schema(), f"{field[:-1]}T")
                name = field[0].lower() + field[1:]
                found = [*self._each(model, field, kind.InitFromObj)]
                setattr(rest, name, found or None)
        return rest

    def _note_unknown(self, table: str, obj: Any) -> None:
        """Note a field that the schema lacks: writing the file would lose it."""
        tab = obj._tab
        start = tab.Pos - tab.Get(number_types.SOffsetTFlags, tab.Pos)
        known = 4 + 2 * field_count(table)
        for at in range(known, tab.Get(number_types.VOffsetTFlags, start), 2):
            if tab.Get(number_types.VOffsetTFlags, start + at):
                self._file.unknown = f"field {(at - 4) // 2} of a table {table}"

    def _counted(self, count: int) -> int:
        self._left -= count
        if self._left < 0:
            raise BrokenFileError(
                "the TFLite file is damaged: its lists are longer than the file"
            )
        return count

    def _each(self, owner: Any, field: str, of: Callable[[Any], T]) -> Iterator[T]:
        """Yield the results of a function for the entries of a list."""
        get = getattr(owner, field)
        for i in range(self._counted(getattr(owner, f"{field}Length")())):
            yield of(get(i))

    def _numbers(self, owner: Any, field: str) -> list[int]:
        """Return a list of numbers."""
        if not self._counted(getattr(owner, f"{field}Length")()):
            return []
        numbers: list[int] = getattr(owner, f"{field}AsNumpy")().tolist()
        return numbers

    def _at(self, place: int, entries: Any, what: str, *, lowest: int = 0) -> Any:
        """Return the entry at a place; None for places that mean none."""
        if not lowest <= place < len(entries):
            raise BrokenFileError(
                f"the TFLite file is damaged: it names {what} {place}, and has "
                f"{len(entries)}"
            )
        return entries[place] if place >= 0 else None

    def _each_at(
        self, owner: Any, field: str, tensors: Sequence[LiteTensor], lowest: int = 0
    ) -> tuple[Any, ...]:
        """Return the tensors that a list of places names."""
        places = self._numbers(owner, field)
        return tuple(self._at(p, tensors, "tensor", lowest=lowest) for p in places)

    def _unpacked(self, table: str, obj: Any) -> Any:
        """Return a table as an object of the schema, whose lists are counted."""
        self._note_unknown(table, obj)
        record = getattr(schema(), f"{table}T").InitFromObj(obj)
        for value in vars(record).values():
            if isinstance(value, list):
                self._counted(len(value))
        return record

    def _buffer(self, buffer: Any) -> Buffer:
        """Return a buffer; those of files above 2 GB lie behind the flatbuffer."""
        self._note_unknown("Buffer", buffer)
        if hasattr(buffer, "Offset") and buffer.Offset() > 1:
            self._file.is_split = True
            return Buffer(self._behind(buffer.Offset(), buffer.Size(), "weights"))
        if buffer.DataIsNone():
            return Buffer()
        table = buffer._tab
        start = table.Vector(table.Offset(_DATA))
        return Buffer(self._behind(start, buffer.DataLength(), "weights"))

    def _behind(self, start: int, size: int, what: str) -> Array:
        """Return the bytes of a place in the file."""
        if start < 0 or start + size > len(self._blob):
            raise BrokenFileError(
                f"the TFLite file is cut off: {what} of {size:,} bytes end behind its "
                f"{len(self._blob):,}"
            )
        return self._bytes[start : start + size]

    def _code(self, code: Any) -> Code:
        """Return an op code."""
        # Codes above 127 do not fit the field of old, which then holds 127.
        number = max(code.BuiltinCode(), code.DeprecatedBuiltinCode())
        kind = _named(kind_names(), number, "an op of number")
        is_custom = kind == CUSTOM
        name = (text(code.CustomCode()) or kind) if is_custom else kind
        record = self._unpacked("OperatorCode", code)
        return Code(name, int(code.Version()), is_custom, record)

    def _fill(self, graph: LiteGraph, table: Any) -> None:
        """Read a subgraph into its object, which ops can call already."""
        self._note_unknown("SubGraph", table)
        graph.name = text(table.Name())
        if hasattr(table, "DebugMetadataIndex"):
            graph.record.debugMetadataIndex = table.DebugMetadataIndex()
        tensors = [*self._each(table, "Tensors", self._tensor)]
        graph.read_tensors(tensors)
        for tensor in tensors:
            self._quantize(tensor, tensors)
        graph.inputs = self._each_at(table, "Inputs", tensors)
        graph.outputs = self._each_at(table, "Outputs", tensors)
        graph.set_ops(self._each(table, "Operators", lambda op: self._op(op, tensors)))

    def _tensor(self, table: Any) -> LiteTensor:
        """Return a tensor, whose steps are read once all tensors are there."""
        record = self._unpacked("Tensor", table)
        dtype = _named(type_names(), record.type, "a tensor of type")
        buffer = self._at(record.buffer, self._file.buffers, "buffer")
        return LiteTensor.read(record, dtype, buffer)

    def _quantize(self, tensor: LiteTensor, tensors: Sequence[LiteTensor]) -> None:
        """Read how a tensor is quantized; blocks have their scales elsewhere."""
        entry = tensor.record.quantization
        if entry is None:
            return
        axis = int(entry.quantizedDimension)
        kinds = schema().QuantizationDetails
        if entry.detailsType == getattr(kinds, "BlockwiseQuantization", -1):
            blocks = entry.details
            scales = self._at(blocks.scales, tensors, "tensor")
            zeros = self._at(blocks.zeroPoints, tensors, "tensor", lowest=-1)
            found = Quantization((), (), axis, int(blocks.blockSize), scales, zeros)
        # An entry can hold the ends of a range alone, and no scale.
        elif entry.scale is None or not self._counted(len(entry.scale)):
            return
        else:
            scale = tuple(np.asarray(entry.scale).tolist())
            zero = () if entry.zeroPoint is None else (*map(int, entry.zeroPoint),)
            zero = zero or (0,)
            if len(zero) not in (1, len(scale)):
                raise BrokenFileError(
                    f"the TFLite file is damaged: {len(scale)} scales with "
                    f"{len(zero)} zero points"
                )
            # One zero point can be stored for all channels.
            found = Quantization(scale, zero * (len(scale) // len(zero)), axis)
        # The writer copies the record of a quantization that is still `as_read`.
        tensor.quantization = tensor.as_read = found

    def _op(self, table: Any, tensors: Sequence[LiteTensor]) -> LiteOp:
        """Return an op."""
        self._note_unknown("Operator", table)
        code = self._at(table.OpcodeIndex(), self._file.codes, "op code")
        made = self._each_at(table, "Outputs", tensors, -1)
        op = LiteOp.read(
            code,
            self._rest_of(table),
            self._each_at(table, "Inputs", tensors, -1),
            tuple(tensor for tensor in made if tensor is not None),
        )
        op.table, op.options = self._options(table)
        op.intermediates = self._each_at(table, "Intermediates", tensors, -1)
        op.custom_options = self._custom_options(table)
        return op

    def _rest_of(self, op: Any) -> Any:
        """Return the fields of an op that are read no further."""
        record = schema().OperatorT()
        record.customOptionsFormat = op.CustomOptionsFormat()
        if not op.MutatingVariableInputsIsNone():
            self._counted(op.MutatingVariableInputsLength())
            record.mutatingVariableInputs = op.MutatingVariableInputsAsNumpy()
        if hasattr(op, "DebugMetadataIndex"):
            record.debugMetadataIndex = op.DebugMetadataIndex()
        return record

    def _custom_options(self, op: Any) -> bytes:
        """Return the options of a custom op; large ones lie behind the flatbuffer."""
        if getattr(op, "LargeCustomOptionsOffset", int)() > 1:
            self._file.is_split = True
            place = op.LargeCustomOptionsOffset(), op.LargeCustomOptionsSize()
            return self._behind(*place, "custom options").tobytes()
        return bytes(self._numbers(op, "CustomOptions"))

    def _options(self, op: Any) -> tuple[str | None, dict[str, Any]]:
        """Return an op's table of options, and the options."""
        # Newer kinds keep options in a second union, which older schemas lack.
        for field in ("BuiltinOptions", "BuiltinOptions2"):
            union = getattr(schema(), field, None)
            kind = getattr(op, f"{field}Type", int)()
            table = getattr(op, field, lambda: None)()
            if union is None or not kind or table is None:
                continue
            name = _named(words_of(field), kind, "options of number")
            own = getattr(schema(), name)()
            own.Init(table.Bytes, table.Pos)
            values = self._unpacked(name, own)
            options = {
                option: self._option(option, getattr(values, attribute))
                for attribute, option in option_names(name).items()
                if getattr(values, attribute) is not None
            }
            return name, options
        return None, {}

    def _option(self, name: str, value: Any) -> Any:
        """Return the value of an option; subgraphs in the place of their numbers."""
        value = option_word(name, value)
        graphs = self._file.graphs
        if is_call(name) and isinstance(value, int):
            return self._at(value, graphs, "subgraph", lowest=-1)
        if name == "branch_subgraph_indices":
            return [self._at(place, graphs, "subgraph") for place in value]
        return value

    def _signature(self, entry: Any) -> LiteSignature:
        self._note_unknown("SignatureDef", entry)
        graph = self._at(entry.SubgraphIndex(), self._file.graphs, "subgraph")
        tensors = graph.tensors

        def end(one: Any) -> tuple[str, LiteTensor]:
            tensor = self._at(one.TensorIndex(), tensors, "tensor")
            return text(one.Name()), tensor

        return LiteSignature(
            text(entry.SignatureKey()),
            graph,
            dict(self._each(entry, "Inputs", end)),
            dict(self._each(entry, "Outputs", end)),
        )

    def _metadata(self, entry: Any) -> tuple[str, Buffer]:
        buffer = self._at(entry.Buffer(), self._file.buffers, "buffer")
        return text(entry.Name()), buffer


def _named(names: Mapping[int, str], number: int, what: str) -> str:
    """Return a name of the schema by its number."""
    if number not in names:
        raise BrokenFileError(
            f"the TFLite file has {what} {number}, which this schema lacks: it is "
            "damaged, or newer than the runtime installed"
        )
    return names[number]


def _is_tflite(blob: bytes) -> bool:
    """Return whether bytes are a TFLite file."""
    return bytes(blob[4:8]) == IDENTIFIER


_ALIGNMENT = 16
"""The schema aligns the bytes of a buffer so."""
_LARGEST = 2**31 - 1
"""Offsets in a flatbuffer reach so far; weights of larger files lie behind it."""
_TABLES = 64 << 20
"""Room for the tables of a file whose weights lie inside."""
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
            yield _moved_archive(self._file.archive, total)

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
