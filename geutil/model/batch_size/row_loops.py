"""Loops over the rows of a batch: they run once for each row, on lists that long.

Those of version 1 come last: they work on arrays, in frames.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from geutil.graph.types import Tensor
from geutil.graph.walks import node_name
from geutil.model.batch_size.batch_edits import (
    Scope,
    ScopeNode,
    SetConstant,
    SetSize,
    SizeSource,
    constant_value,
)
from geutil.model.batch_size.sites import Site, attribute_of_shape

COPIES = frozenset(("Cast", "ExpandDims", "Identity", "Pack", "Reshape"))
"""Ops through which a number of a row goes as it is."""
_ELEMENT = "TensorListGetItem"
READS = frozenset(("GatherV2", "Slice", "StridedSlice", _ELEMENT))
"""Ops that take a row of input 0, where input 1 tells."""
BOUNDS = {"Less": (0, 1), "Greater": (1, 0)}
"""Comparisons, with the inputs that are the counter and the bound."""


@dataclass
class RowLoop:
    """A loop over the rows of a batch."""

    edits: list[SetSize] = field(default_factory=list)
    # The loop variables that are lists with an element for each row.
    lists: list[int] = field(default_factory=list)


def row_loop(site: Site, condition: Scope, body: Scope) -> RowLoop:
    """Let a loop that takes the rows of a batch one by one run for each of them."""
    # A loop is one over rows if its body takes elements of a list of rows, or rows of a
    # tensor that has the batch, where a counter tells; and its condition compares that
    # counter with the old batch size. All bounds that are the old batch size are the
    # new one then, and so is the size of each list that is reserved for it. A loop that
    # takes rows in another way is a problem.
    found = RowLoop()
    reads = [read for read in _reads(site, body) if _has_rows(site, read[1])]
    variable = next((variable for _, variable, _ in reads), None)
    if variable is None:
        return found
    bounds = list(_bounds(site, condition))
    counters = {counter for _, _, counter in reads}
    counted = [bound for bound in bounds if bound.counter in counters]
    if any(bound.grows for bound in counted):
        site.probing.row_reads.update(name for name, _, _ in reads)
        return found
    old = [bound for bound in bounds if bound.value == site.sizes.old]
    if None in counters or not any(bound in old for bound in counted):
        site.problem(
            f"it takes rows of the batch one by one ('{reads[0][0]}'), and its "
            f"condition does not compare their number with {site.sizes.old}",
            "let it count from 0 to the size of the batch, as tf.map_fn does",
        )
        return found
    site.probing.row_reads.update(name for name, _, _ in reads)
    for bound in old:
        if bound.variable is None:
            source = _source(site, variable, condition.args[variable][:-2])
            found.edits.append(SetSize(bound.entry.node.name, bound.index, source))
        elif bound.variable not in site.replaced:
            _set_size(site, bound.variable, variable)
    found.lists = list(_reserved(site, variable))
    source = _source(site, variable, site.written[variable])
    _lengthen_constants(site, body, counters, source)
    return found


_Read = tuple[str, "int | None", "int | None"]
"""An op that takes an element, the variable that it takes it of, and the counter.

The variable is None for a constant in the body, the counter where none is known."""


def _reads(site: Site, body: Scope) -> Iterator[_Read]:
    """Yield the ops that take one element of a loop variable, or of a constant."""
    entries = _by_name(body)
    for entry in body.entries:
        if entry.node.op not in READS or not is_along_first_axis(entry, entries):
            continue
        variable, source = _traced(body, entries, entry.inputs[0])
        counter, place = _traced(body, entries, entry.inputs[1])
        if variable is None and (source != "Const" or counter is None):
            continue
        if entry.node.op == _ELEMENT or place != "Const":
            yield entry.node.name, variable, counter


def is_along_first_axis(entry: ScopeNode, entries: Mapping[str, ScopeNode]) -> bool:
    """Return whether an op may take less than all along the first axis."""
    if entry.node.op == "StridedSlice":
        masks = ("begin_mask", "ellipsis_mask", "new_axis_mask")
        return not any(entry.node.attr[mask].i & 1 for mask in masks)
    if entry.node.op == "GatherV2":
        axis = entries.get(node_name(entry.inputs[2]))
        if axis is not None and axis.node.op == "Const":
            return not np.any(constant_value(axis.node))
    return True


def _has_rows(site: Site, variable: int | None) -> bool:
    if variable is None:
        return False
    t = site.operands[variable]
    return site.probing.is_list_of_rows(t) or site.probing.axis(t) == 0


def _lengthen_constants(
    site: Site, body: Scope, counters: set[int | None], source: SizeSource
) -> None:
    """Repeat constants whose rows go to rows of the batch; count numbers further."""
    for name, variable, counter in _reads(site, body):
        if variable is None:
            if counter in counters:
                site.problem(
                    f"'{name}' takes a row of a constant for each row of the batch",
                    "let the constant be computed from the input, or have equal rows",
                )
            continue
        t = site.operands[variable]
        if counter not in counters or site.probing.grows(t):
            continue
        producer = site.producers[variable]
        if producer is None or producer.node.op != "TensorListFromTensor":
            if t.shape.rank and t.shape[0] == site.sizes.old:
                site.broadcast(variable, 0, 1)
            continue
        elements = t.op.inputs[0]
        if not elements.shape.rank or elements.shape[0] != site.sizes.old:
            continue
        if elements.op.type == "Range" and _counts(site, elements):
            numbers = node_name(producer.inputs[0])
            site.edit(SetSize(numbers, 1, source))
            site.plan.growing.add(numbers)
            continue
        made = Site(producer, [*t.op.inputs], site.probing, site.plan, source)
        made.broadcast(0, 0, 1)


def _counts(site: Site, numbers: Tensor) -> bool:
    value = site.probing.value(numbers)
    return value is not None and value.tolist() == list(range(site.sizes.old))


@dataclass(frozen=True)
class _Bound:
    """A comparison of a counter."""

    entry: ScopeNode
    index: int  # The input that is the bound.
    counter: int  # The loop variable that is compared.
    # The loop variable that is the bound; None if it is a constant.
    variable: int | None
    value: int | None  # The bound; None if it is not known.
    grows: bool  # Whether it depends on the inputs.


def _bounds(site: Site, condition: Scope) -> Iterator[_Bound]:
    """Yield the comparisons of a loop's condition: counter, bound and its value."""
    entries = _by_name(condition)
    for entry in condition.entries:
        if entry.node.op not in BOUNDS or entry.node.attr["T"].type != _INT32:
            continue
        at, index = BOUNDS[entry.node.op]
        counter, _ = _traced(condition, entries, entry.inputs[at])
        if counter is None:
            continue
        variable, _ = _traced(condition, entries, entry.inputs[index])
        value, grows = None, False
        producer = entries.get(node_name(entry.inputs[index]))
        if variable is not None:
            operand = site.operands[variable]
            value, grows = site.probing.value(operand), site.probing.grows(operand)
        elif producer is not None and producer.node.op == "Const":
            value = constant_value(producer.node)
        # Nothing tells whether a bound that the loop computes depends on the inputs.
        elif producer is not None:
            grows = True
        number = None if value is None else int(value)
        yield _Bound(entry, index, counter, variable, number, grows)


_INT32 = tf.int32.as_datatype_enum


def _by_name(scope: Scope) -> dict[str, ScopeNode]:
    return {entry.node.name: entry for entry in scope.entries}


def _traced(
    scope: Scope, entries: Mapping[str, ScopeNode], name: str
) -> tuple[int | None, str]:
    """Return the loop variable that a tensor is, None if it is none, or its op type."""
    while name not in scope.args:
        entry = entries.get(node_name(name))
        if entry is None or entry.node.op not in (*COPIES, _ELEMENT):
            return None, "" if entry is None else entry.node.op
        # An element of a list of numbers counts as the counter that tells which.
        name = entry.inputs[entry.node.op == _ELEMENT]
    return scope.args.index(name), ""


def _source(site: Site, variable: int, written: str) -> SizeSource:
    """Return the source of the batch size: a list of rows, or a tensor's shape."""
    t = site.operands[variable]
    axis = site.probing.axis(t)
    factor = 1 if axis is None else site.sizes.factor(t.shape[axis])
    return SizeSource(written, axis, factor, t.dtype.as_datatype_enum)


def _set_size(site: Site, index: int, variable: int) -> None:
    """Let a number that the loop is given be the size of the batch."""
    source = _source(site, variable, site.written[variable])
    site.edit(SetSize(site.node.name, index, source))
    site.operands[index] = site.probing.placeholder(tf.int32, [])
    site.replaced |= {index}


def _reserved(site: Site, variable: int) -> Iterator[int]:
    """Make lists that are reserved for the loop as long as the batch has rows."""
    for index, producer in enumerate(site.producers):
        handle = site.operands[index]
        if producer is None or producer.node.op != "TensorListReserve":
            continue
        if site.probing.value(handle.op.inputs[1]) == site.sizes.old:
            source = _source(site, variable, site.written[variable])
            site.edit(SetSize(producer.node.name, 1, source))
            _undo_element_shape(site, index, producer)
            yield index


def _undo_element_shape(site: Site, index: int, producer: ScopeNode) -> None:
    """Give a list the shape of elements that it had: they are rows, without a batch."""
    name = producer.node.name
    for edit in site.plan.edits:
        if isinstance(edit, SetConstant) and edit.node == name:
            site.plan.edits.remove(edit)
            dims = [site.sizes.old, *edit.value[1:].tolist()]
            handle = site.operands[index]
            shape = site.probing.constant(dims, handle.op.inputs[0].dtype)
            made = site.probing.make(producer.node, [shape, handle.op.inputs[1]])
            site.operands[index] = made[0]
            return


_PASSED = COPIES | {"Switch"}


@dataclass
class _LoopFrame:
    """The reads, writes and comparisons of a loop, by structure alone."""

    # (op, name of the array, counter) for each read.
    reads: list[tuple[str, str, str | None]] = field(default_factory=list)
    # (op, input, counter, value or None) for each bound of a counter.
    bounds: list[tuple[str, int, str, int | None]] = field(default_factory=list)
    # The arrays that it writes into.
    written: list[ScopeNode] = field(default_factory=list)
    # The source of the batch size, once it is known to take rows.
    source: SizeSource | None = None


class RowFrames:
    """The loops of version 1 in a scope."""

    def __init__(self, scope: Scope) -> None:
        self._entries = {entry.node.name: entry for entry in scope.entries}
        self._frames: dict[str, _LoopFrame] = {}
        self._arrays_of_rows: set[str] = set()
        self._constant_arrays: set[str] = set()
        if any(entry.node.op == "Enter" for entry in scope.entries):
            for entry in scope.entries:
                self._note(entry)

    def _note(self, entry: ScopeNode) -> None:
        """Note the reads, writes and bounds in a loop of version 1."""
        op, name = entry.node.op, entry.node.name
        if op == "TensorArrayReadV3" or (
            op in READS and is_along_first_axis(entry, self._entries)
        ):
            enter, counter = (self._traced(name) for name in entry.inputs[:2])
            is_fixed = counter is not None and counter.node.op == "Const"
            if enter is not None and enter.node.op == "Enter" and not is_fixed:
                at = counter.node.name if _is_merge(counter) and counter else None
                read = self._array_behind(enter)
                self._frame_of(enter).reads.append((name, read, at))
        elif op == "TensorArrayWriteV3":
            enter = self._traced(entry.inputs[0])
            if enter is not None and enter.node.op == "Enter":
                array = self._entries.get(self._array_behind(enter))
                if array is not None:
                    self._frame_of(enter).written.append(array)
        elif op in BOUNDS:
            at_index, index = BOUNDS[op]
            counter = self._traced(entry.inputs[at_index])
            if counter is not None and _is_merge(counter):
                enter = self._traced(counter.inputs[0])
                bound = self._traced(entry.inputs[index])
                if bound is not None and bound.node.op == "Enter":
                    bound = self._traced(bound.inputs[0])
                if enter is not None and enter.node.op == "Enter":
                    self._frame_of(enter).bounds.append(
                        (name, index, counter.node.name, _number(bound))
                    )

    def _traced(self, name: str) -> ScopeNode | None:
        """Return the op that makes the original of a copied tensor."""
        entry = self._entries.get(node_name(name))
        while entry is not None and entry.node.op in _PASSED:
            entry = self._entries.get(node_name(entry.inputs[0]))
        return entry

    def _array_behind(self, enter: ScopeNode) -> str:
        """Return the array that enters a loop; for other tensors the Enter op."""
        array = self._traced(enter.inputs[0])
        is_array = array is not None and array.node.op == "TensorArrayV3"
        return array.node.name if array and is_array else enter.node.name

    def _frame_of(self, enter: ScopeNode) -> _LoopFrame:
        name = enter.node.attr["frame_name"].s.decode()
        return self._frames.setdefault(name, _LoopFrame())

    def see(self, site: Site) -> None:
        """Let the loops that take rows of an op's result run for each of them."""
        name = site.node.name
        if site.node.op == "Enter" and site.axis(0) == 0:
            source = site.source(0)
            for frame_name, frame in self._reading(name):
                if source is not None:
                    self._mend(site, frame_name, frame, source)
        elif site.node.op == "TensorArrayV3":
            self._open_elements(site)
        elif site.node.op == "TensorArrayScatterV3" and site.producers[0] is not None:
            self._scatter(site, site.producers[0])
        elif site.node.op == "TensorArrayGatherV3" and self.is_of_rows(site):
            site.probing.row_reads.add(name)
            self._count_to_the_batch(site, 1, self._source_of(site.producers[0]))

    def _open_elements(self, site: Site) -> None:
        """Leave open whether elements of an array as long as the batch are batches."""
        dims = [d.size for d in site.node.attr["element_shape"].shape.dim]
        size = self._traced(self._entries[site.node.name].inputs[0])
        if dims and dims[0] == site.sizes.old == _number(size):
            open_shape = attribute_of_shape((None, *dims[1:]))
            site.set_attribute("element_shape", open_shape)

    def is_of_rows(self, site: Site) -> bool:
        """Return whether an op takes an array with an element for each row."""
        array = site.producers[0] if site.producers else None
        return array is not None and array.node.name in self._arrays_of_rows

    def _scatter(self, site: Site, array: ScopeNode) -> None:
        """Follow rows that are scattered into an array, which loops read one by one."""
        name = array.node.name
        if not site.probing.grows(site.operands[2]):
            self._constant_arrays.add(name)
            for frame_name, frame in self._reading(name):
                if frame.source is not None:
                    _refuse_constant(site, frame_name, name)
            return
        source = site.source(2)
        if site.axis(2) != 0 or source is None:
            return
        self._arrays_of_rows.add(name)
        self._lengthen(site, array, source)
        self._count_to_the_batch(site, 1, source)
        for frame_name, frame in self._reading(name):
            self._mend(site, frame_name, frame, source)

    def _reading(self, name: str) -> Iterator[tuple[str, _LoopFrame]]:
        for frame_name, frame in self._frames.items():
            if any(read == name for _, read, _ in frame.reads):
                yield frame_name, frame

    def _mend(
        self, site: Site, frame_name: str, frame: _LoopFrame, source: SizeSource
    ) -> None:
        """Let a loop over the rows of an array count to the size of the batch."""
        if frame.source is not None:
            return
        frame.source = source
        rows = {*self._arrays_of_rows, site.node.name}
        counters = {counter for _, read, counter in frame.reads if read in rows}
        old = [bound for bound in frame.bounds if bound[3] == site.sizes.old]
        if None in counters or not any(bound[2] in counters for bound in old):
            unknown = [b for b in frame.bounds if b[2] in counters and b[3] is None]
            if None in counters or not unknown:
                site.problem(
                    f"the loop '{frame_name}' takes rows of it one by one, and its "
                    f"condition does not compare their number with {site.sizes.old}",
                    "let it count from 0 to the size of the batch, as tf.map_fn does",
                )
                return
        site.probing.row_reads.update(name for name, _, _ in frame.reads)
        for name, index, _, _ in old:
            site.edit(SetSize(name, index, source, frame_name))
        for array in frame.written:
            if self._lengthen(site, array, source):
                self._arrays_of_rows.add(array.node.name)
        for _, read, counter in frame.reads:
            if counter in counters and read in self._constant_arrays:
                _refuse_constant(site, frame_name, read)

    def _lengthen(self, site: Site, array: ScopeNode, source: SizeSource) -> bool:
        """Make an array as long as the batch has rows, if it was."""
        if _number(self._traced(array.inputs[0])) != site.sizes.old:
            return False
        site.edit(SetSize(array.node.name, 0, source))
        return True

    def _count_to_the_batch(
        self, site: Site, index: int, source: SizeSource | None
    ) -> None:
        """Let the numbers of all elements go up to the size of the batch."""
        numbers = site.producers[index]
        if numbers is None or numbers.node.op != "Range" or source is None:
            return
        if site.shape(index) == (site.sizes.old,):
            site.edit(SetSize(numbers.node.name, 1, source))
            site.plan.growing.add(numbers.node.name)
        dtype = site.operands[index].dtype
        site.operands[index] = site.probing.placeholder(dtype, [site.sizes.probe])

    def _source_of(self, array: ScopeNode | None) -> SizeSource | None:
        for frame in self._frames.values():
            if any(array is written for written in frame.written):
                return frame.source
        return None


def _is_merge(entry: ScopeNode | None) -> bool:
    return entry is not None and entry.node.op == "Merge"


def _number(entry: ScopeNode | None) -> int | None:
    """Return the value of a constant, None of anything else."""
    if entry is None or entry.node.op != "Const":
        return None
    value = constant_value(entry.node)
    is_one = value.ndim == 0 and tf.as_dtype(value.dtype) == tf.int32
    return int(value) if is_one else None


def _refuse_constant(site: Site, frame_name: str, array: str) -> None:
    site.problem(
        f"the loop '{frame_name}' takes an element of '{array}', which is filled with "
        "constants, for each row of the batch",
        "let them be computed from the input",
    )
