"""TFLite files read into objects, each list counted and each index checked.

Flatbuffers are read where they lie, and nothing in them says whether they are intact:
an offset that leads anywhere is followed. So each list is counted against the size of
the file, and each index against the list that it is for. A flatbuffer does not know its
own end, so a zip archive that libraries for metadata append is found from the end.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from flatbuffers import number_types

from geutil.errors import TFLiteError
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
    text,
)
from geutil.tflite.schema import (
    CUSTOM,
    FAULTS,
    IDENTIFIER,
    field_count,
    is_call,
    kind_names,
    option_names,
    option_word,
    schema,
    type_names,
    words_of,
)

_END = struct.Struct("<4s4H2IH")
"""The record at the end: signature, disks, entries twice, directory, comment."""
_END_MARK, _ENTRY_MARK, _FILE_MARK = b"PK\5\6", b"PK\1\2", b"PK\3\4"
_ENTRY = struct.Struct("<4s24x3H8xI")
"""An entry of the directory: signature, three lengths, the place of its file."""


def find_archive(data: Array) -> Array | None:
    """Return the bytes of the archive at the end of a file; None without one."""
    try:
        return data[_places(data)[0] :]
    except (struct.error, ValueError):
        return None


def moved_archive(archive: Array, place: int) -> bytes:
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

_DATA = 4
"""The field of the bytes in the schema's table of a buffer."""


class BrokenFileError(TFLiteError):
    """The bytes are not a complete TFLite file."""


def read_into(file: Contents, blob: Any) -> None:
    """Read a file into an object without contents."""
    if not is_tflite(blob):
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
        file.archive = find_archive(self._bytes)
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


def is_tflite(blob: bytes) -> bool:
    """Tell whether bytes are a TFLite file."""
    return bytes(blob[4:8]) == IDENTIFIER
