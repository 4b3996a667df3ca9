"""The capabilities of a model, read from its files, of whatever kind they are."""

from __future__ import annotations

import stat
import struct
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from geutil.capabilities import power_kinds, saved_models
from geutil.capabilities.graph_scan import power_of_node
from geutil.capabilities.keras_configs import items, powers_of_config
from geutil.capabilities.power_kinds import LOADED, MAIN, POWERS, RUN, Power, Powers
from geutil.errors import ModelError
from geutil.formats import is_tflite_file
from geutil.model.files import wire
from geutil.model.files.keras_files import (
    KERAS_SUFFIXES,
    Hdf5File,
    configurations,
    read_hdf5,
)
from geutil.model.files.wire import Buffer, message_class

if TYPE_CHECKING:
    from geutil.tflite import LiteOp

if TYPE_CHECKING:
    from geutil.model.files.proto_files import PathLike

_CONFIG = "config.json"
_WEIGHTS = (".h5", ".hdf5")
_EXPANSION, _FLOOR = 100, 1 << 28
"""How many times its size, and how many bytes, an entry expands to that is a bomb."""
_HEADER, _MARK = struct.Struct("<4s5H3L2H"), b"PK\x03\x04"
_STREAMED = 8
"""The flag of entries whose sizes stand behind them."""
_CUSTOM_KERNELS = frozenset(
    ("AudioSpectrogram", "Mfcc", "NumericVerify", "TFLite_Detection_PostProcess")
)
"""Custom ops that TFLite's own interpreter has kernels of."""
_FLEX = "Flex"
"""Begins the kinds of ops of TensorFlow in TFLite files."""
_FOREIGN = frozenset(
    ("DELEGATE", "PLACEHOLDER_FOR_GREATER_OP_CODES", "STABLEHLO_CUSTOM_CALL")
)
"""Ops of TFLite that others run."""


def powers_of_keras(file: Path, *, values: bool = True) -> tuple[list[Power], int]:
    """Return the capabilities of a `.keras` or HDF5 file, and its number of layers."""
    config, training = configurations(file)
    is_archive = file.suffix == ".keras"
    place = _CONFIG if is_archive else "its configuration"
    entries = list(powers_of_config(config, place))
    entries += powers_of_config(training, "its training configuration")
    if is_archive:
        entries += _in_entries(file, values=values)
    else:
        entries += _in_links(read_hdf5(file), file.name)
    return entries, sum(1 for item, _ in items(config) if "class_name" in item)


def _in_entries(file: Path, *, values: bool) -> Iterator[Power]:
    """Yield the oddities of an archive's entries, and links in its weights."""
    with zipfile.ZipFile(file) as archive, wire.mapped(file) as buffer:
        infos = archive.infolist()
        problems = [(info, _problem(info, buffer)) for info in infos]
    weights = []
    counts = Counter(info.filename for info in infos)
    for info, found in problems:
        problem = found
        if counts[info.filename] > 1:
            problem = "which is there more than once: readers differ in which counts"
        if problem:
            detail = f"'{info.filename}', {problem}"
            yield Power(
                power_kinds.WRITE, info.filename, "entry", file.name, LOADED, (), detail
            )
        elif info.filename.endswith(_WEIGHTS) and not info.is_dir():
            weights.append(info.filename)
    if weights and values:
        yield from _in_links(read_hdf5(file, tuple(weights)), file.name)


def _problem(info: zipfile.ZipInfo, buffer: Buffer) -> str:
    """Return the oddity of an entry; "" if nothing is."""
    path = PurePosixPath(info.filename.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in info.filename[:2]:
        return "which lies outside of the archive"
    if stat.S_ISLNK(info.external_attr >> 16):
        return "which is a link"
    if info.file_size > max(_FLOOR, _EXPANSION * info.compress_size):
        return f"which expands to {info.file_size:,} bytes"
    head = buffer[info.header_offset : info.header_offset + _HEADER.size]
    if len(head) < _HEADER.size:
        return "which lies behind the end of the file"
    mark, _, flags, method, _, _, _, packed, size, length, _ = _HEADER.unpack(head)
    start = info.header_offset + _HEADER.size
    name = buffer[start : start + length].split(b"\0")[0]
    sizes = (packed, size) if not flags & _STREAMED else (0, 0)
    is_same = (mark, method) == (_MARK, info.compress_type) and name in (
        info.orig_filename.encode(),
        info.orig_filename.encode("cp437", errors="replace"),
    )
    # Sizes beyond 4 GB stand elsewhere.
    known = (info.compress_size, info.file_size)
    if not is_same or any(
        said not in (0, 0xFFFFFFFF, true)
        for said, true in zip(sizes, known, strict=True)
    ):
        return "whose own header says something else: readers differ in which counts"
    return ""


def _in_links(content: Hdf5File, name: str) -> Iterator[Power]:
    """Yield the links and datasets of an HDF5 file that read other files."""
    for path, kind, source in content.outside:
        yield Power(power_kinds.READ, path, kind, name, LOADED, (), f"'{source}'")


def powers_of_tflite(file: Path) -> tuple[list[Power], int]:
    """Return the capabilities of a TFLite file, and how many ops it has.

    TFLite's own kernels compute. Flex ops are TensorFlow's, and have their
    capabilities.
    """
    # Files of Keras need no classes of TFLite, which take 0.1 s to make.
    from geutil.model.files.tflite_inspection import read_tflite

    content = read_tflite(file)
    entries = []
    count = 0
    for number, graph in enumerate(content.graphs):
        place = f"subgraph {number}" if number else MAIN
        for index, op in enumerate(graph.ops):
            count += 1
            kind, detail = _power_of_lite(op)
            if kind not in power_kinds.HARMLESS:
                by = ("whoever runs it",)
                entries.append(Power(kind, str(index), op.kind, place, RUN, by, detail))
    return entries, count


def _power_of_lite(op: LiteOp) -> tuple[str, str]:
    """Return the capability of an op of a TFLite file, and its detail."""
    if not op.is_custom:
        return (power_kinds.UNKNOWN if op.kind in _FOREIGN else power_kinds.COMPUTE), ""
    if not op.kind.startswith(_FLEX):
        is_own = op.kind in _CUSTOM_KERNELS
        return (power_kinds.COMPUTE if is_own else power_kinds.UNKNOWN), ""
    from flatbuffers import flexbuffers

    try:
        # The name of the op, and its node: the runtime looks at these alone.
        parts = flexbuffers.GetRoot(bytearray(op.custom_options)).AsVector
        data = bytes(parts[1].AsStringBytes)
        node = wire.parsed(message_class("NodeDef"), data)
    except Exception:
        # A damaged file raises any error that its reader comes across.
        return power_kinds.UNKNOWN, "its options hold no op of TensorFlow"
    kind, detail = power_of_node(node)
    if node.op != op.kind.removeprefix(_FLEX):
        detail = f"op '{node.op}' {detail}".rstrip()
    return kind, detail


def powers(source: PathLike) -> Powers:
    """Report the capabilities of a model beyond computing and keeping its own state.

    A TensorFlow graph is a program: its ops can read and write files, open connections
    and run Python, while it is loaded or when it runs. A table classifies each op of
    TensorFlow; an op that is not in the table is reported as unknown. Function bodies,
    initializers and every MetaGraph are examined. Nothing is run, no graph is built,
    and TensorFlow is imported only for text formats.

    Bugs in kernels (such as writes to wrong memory) and libraries of custom ops are not
    examined: run an untrusted model in a sandboxed process.

    In Keras files the configuration is searched, at any depth, for layers that contain
    code or read files, and for classes and functions of modules that do more than
    compute; so are the links of HDF5 files, also within archives, and the entries of
    archives. In TFLite files custom ops are reported, and TensorFlow ops by the same
    table.

    Args:
        source: the directory of a SavedModel, or a `.pb`, `.pbtxt`, `.meta`, `.keras`,
            `.h5` or `.tflite` file.

    Returns:
        The capabilities, op by op.

    Raises:
        ModelError: there is nothing there, it is damaged, or of another kind.

    Cost: linear in the nodes; memory for some of them at a time. Graphs that contain
    ops with capabilities are held whole, without their long constants. HDF5 is read in
    another process, which takes a third of a second.

    Example:
        >>> from geutil.model import powers
        >>> powers("testdata/two_signatures").computes_only
        True
    """
    return _powers(Path(source))


def powers_without_values(source: PathLike) -> Powers:
    """Report the capabilities of a model whose weights are not read, as `powers` does.

    In HDF5 files of weights within an archive no links are looked for.
    """
    return _powers(Path(source), values=False)


def _powers(path: Path, *, values: bool = True) -> Powers:
    if not path.exists():
        raise ModelError(f"'{path}' does not exist")
    if path.is_dir():
        entries, ops = saved_models.powers_of_directory(path)
    elif path.suffix in KERAS_SUFFIXES:
        entries, ops = powers_of_keras(path, values=values)
    elif is_tflite_file(path):
        entries, ops = powers_of_tflite(path)
    else:
        entries, ops = saved_models.powers_of_file(path)
    # Libraries have their functions in an order that differs from file to file.
    ordered = sorted(
        entries, key=lambda e: (POWERS.index(e.kind), e.when, e.by, e.name, e.place)
    )
    return Powers(path, tuple(ordered), ops)
