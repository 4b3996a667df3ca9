"""Loops over the rows of a batch: they run once for each row, on lists that long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from geutil.graph.types import Tensor
from geutil.graph.walks import node_name
from geutil.model.batch_size.batch_axes import (
    Scope,
    ScopeNode,
    SizeSource,
    constant_value,
)
from geutil.model.batch_size.batch_edits import SetConstant, SetSize
from geutil.model.batch_size.sites import Site

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
    """Tell whether an op may take less than all along the first axis."""
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
