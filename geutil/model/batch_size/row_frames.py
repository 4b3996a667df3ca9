"""Loops of version 1 over the rows of a batch: they run once for each row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import tensorflow as tf

from geutil.graph.walks import node_name
from geutil.model.batch_size.batch_axes import (
    Scope,
    ScopeNode,
    SizeSource,
    constant_value,
)
from geutil.model.batch_size.batch_edits import SetSize
from geutil.model.batch_size.row_loops import BOUNDS, COPIES, READS, is_along_first_axis
from geutil.model.batch_size.sites import Site, attribute_of_shape

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
        """Tell whether an op takes an array with an element for each row."""
        array = site.producers[0] if site.producers else None
        return array is not None and array.node.name in self._arrays_of_rows

    def _scatter(self, site: Site, array: ScopeNode) -> None:
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
