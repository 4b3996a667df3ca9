"""The walk over the ops of a graph with a batch of a size that stands out.

A rule for each type of op that bakes a batch size in says how that is seen, and mended.
The walk goes through version 1 loops; functions are `size_change`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import tensorflow as tf

from geutil.graph.types import Tensor
from geutil.graph.walks import node_name
from geutil.model.batch_size.batch_edits import (
    BatchPlan,
    BiasToAdd,
    Grown,
    Scope,
    ScopeNode,
    SetElements,
    SizeSource,
    batch_axis_after_reshape,
    shape_of,
)
from geutil.model.batch_size.row_loops import RowFrames
from geutil.model.batch_size.sites import (
    REFUSALS,
    Probing,
    Site,
    attribute_of_shape,
    source_at,
)


def _slice(site: Site) -> None:
    """Let a slice that took the whole batch go on to do so."""
    shape, axis = site.shape(0), site.axis(0)
    begin = site.probing.dims(site.operands[1])
    size = site.probing.dims(site.operands[2])
    if axis is None or shape is None or begin is None or size is None:
        return
    if begin[axis] == 0 and size[axis] == site.sizes.before(shape[axis] or 0):
        static_sizes = [d for d in size if d is not None]
        if len(static_sizes) == len(size):
            static_sizes[axis] = -1
            site.set_constant(2, static_sizes, static_sizes)


def _strided_slice(site: Site) -> None:
    """Let a slice that took the whole batch go on to do so; refuse to take a row."""
    shape, axis = site.shape(0), site.axis(0)
    if axis is None or shape is None or site.node.name in site.probing.row_reads:
        return
    begin, end, strides = (site.probing.dims(t) for t in site.operands[1:])
    place = _place_in_slice(site.node, axis, len(shape), len(strides or ()))
    if strides is None or place is None:
        return
    # Where shapes are lost in loops of version 1, nothing at all is known of a vector.
    begin, end = begin or [None] * len(strides), end or [None] * len(strides)
    old = site.sizes.before(shape[axis] or 0)
    bit = 1 << place
    from_start = site.node.attr["begin_mask"].i & bit or begin[place] == 0
    is_row = site.node.attr["shrink_axis_mask"].i & bit
    if is_row or (begin[place] is None and not from_start):
        site.problem(*_takes_rows("computed" if begin[place] is None else begin[place]))
        return
    stop = end[place]
    if site.node.attr["end_mask"].i & bit or stop is None or strides[place] != 1:
        return
    if from_start and stop >= old:
        mask = site.node.attr["end_mask"].i | bit
        site.set_attribute("end_mask", tf.compat.v1.AttrValue(i=mask))


def _gather(site: Site) -> None:
    """Refuse to take rows of the batch where constants tell."""
    shape, axis = site.shape(0), site.axis(0)
    if axis is None or shape is None or site.node.name in site.probing.row_reads:
        return
    rows = None if site.probing.grows(site.operands[1]) else site.operands[1]
    along = site.probing.value(site.operands[2])
    if rows is None or along is None or int(along) % len(shape) != axis:
        return
    value = site.probing.value(rows)
    site.problem(*_takes_rows("computed" if value is None else value.tolist()))


def _takes_rows(rows: Any) -> tuple[str, str]:
    return (
        f"it takes row {rows} of the batch"
        if rows != "computed"
        else "it takes rows of the batch by numbers that are computed, as in a loop",
        "let it take a slice, or cut the model in front of it",
    )


def _place_in_slice(node: Any, axis: int, rank: int, length: int) -> int | None:
    """Return which element of a slice's `begin` is about an axis, None if none is."""
    ellipsis, added = node.attr["ellipsis_mask"].i, node.attr["new_axis_mask"].i
    own = sum(not ((ellipsis | added) >> i & 1) for i in range(length))
    at = 0
    for place in range(length):
        if ellipsis >> place & 1:
            at += rank - own
        elif not added >> place & 1:
            if at == axis:
                return place
            at += 1
        if at > axis:
            return None
    return None


def _squeeze(site: Site) -> None:
    """Refuse to squeeze the batch away."""
    shape, axis = site.shape(0), site.axis(0)
    if axis is None or shape is None or site.sizes.before(shape[axis] or 0) != 1:
        return
    dims = [d % len(shape) for d in site.node.attr["squeeze_dims"].list.i]
    if not dims and all(reader == ("BiasAdd", 1) for reader in site.readers):
        return  # The next rule sees to it.
    if not dims or axis in dims:
        site.problem(
            "it squeezes the axis of the batch away, because the batch is 1",
            "name the other axes: tf.squeeze(x, axis=[...])",
        )


def _reshape(site: Site) -> None:
    """Let the axis that takes the batch be -1."""
    shape, axis = site.shape(0), site.axis(0)
    target = site.probing.dims(site.operands[1])
    if axis is None or shape is None or target is None:
        return
    # The target follows the batch already.
    if any(site.sizes.factor(d) for d in target):
        return
    old = [None if d is None else site.sizes.before(d) for d in shape]
    target_shape = _resolved(target, old)
    if target_shape is None:
        if axis == 0 and target[0] == old[0]:
            _set_first(site, target, Grown(site.sizes.factor(shape[0])))
        return
    place = batch_axis_after_reshape(
        [d or 0 for d in old], axis, target_shape, site.sizes.old
    )
    if place is None:
        site.problem(
            f"it reshapes {old} to {target_shape}, which spreads a row of the batch "
            "over several",
            "reshape each row for itself",
        )
        return
    if target[place] == -1:
        return
    changes = {place: -1}
    # A shape has one -1 at most.
    changes |= {i: target_shape[i] for i, d in enumerate(target) if d == -1}
    _set_elements(site, target, changes)


def _resolved(target: list[int | None], old: list[int | None]) -> list[int] | None:
    """Return the target with -1 worked out, None if it depends on unknown values."""
    target_dims = [d for d in target if d is not None]
    if len(target_dims) < len(target):
        return None
    if -1 not in target_dims:
        return target_dims
    old_dims = [d for d in old if d is not None]
    rest = prod(d for d in target_dims if d != -1)
    if len(old_dims) < len(old) or not rest:
        return None
    return [prod(old_dims) // rest if d == -1 else d for d in target_dims]


def _set_elements(
    site: Site, target: list[int | None], changes: dict[int, int]
) -> None:
    """Change elements of a target, in a constant or in the op that packs it."""
    new = [changes.get(i, d) for i, d in enumerate(target)]
    static_dims = [d for d in new if d is not None]
    if len(static_dims) == len(new):
        site.set_constant(1, static_dims, static_dims)
        return
    _pack(site, changes)


def _pack(site: Site, changes: Mapping[int, int]) -> None:
    """Change elements of a target that a Pack makes; refuse other computed targets."""
    vector = site.operands[1].op
    if vector.type != "Pack":
        site.problem(
            "its target is computed, with the old batch size in it",
            "make the target of shape(x)[0] or -1",
        )
        return
    parts = list(vector.inputs)
    for index, value in changes.items():
        parts[index] = site.probing.constant(value, vector.inputs[index].dtype)
    pack = SetElements(
        site.node.name, 1, site.written[1], tuple(sorted(changes.items()))
    )
    site.edit(pack)
    (site.operands[1],) = site.probing.make(vector.node_def, parts)


def _set_first(site: Site, target: list[int | None], grown: Grown) -> None:
    """Let the first element be the batch, where others are not known."""
    static_dims = [d for d in target if d is not None]
    if -1 not in target:
        _set_elements(site, target, {0: -1})
    elif len(static_dims) == len(target):
        site.set_dims(1, (grown, *static_dims[1:]), 0)
    else:
        site.problem(
            "its target mixes the old batch size with what is known at run time only",
            "make the target of shape(x)[0]",
        )


def _broadcast_to(site: Site) -> None:
    """Let the target have the batch where the operand has it."""
    _set_dim(site, 1, 0)


def _input_sizes(site: Site) -> None:
    """Let the size of a transposed convolution's result have the batch."""
    if site.axis(2) == 0:
        _set_dim(site, 0, 2)


def _set_dim(site: Site, index: int, data: int) -> None:
    """Let a size of the shape that is an input be the batch, as data has it."""
    shape, axis = site.shape(data), site.axis(data)
    dims = site.probing.dims(site.operands[index])
    if axis is None or shape is None or dims is None:
        return
    place, dim = len(dims) - len(shape) + axis, shape[axis] or 0
    if not 0 <= place < len(dims) or dims[place] != site.sizes.before(dim):
        return
    new_dims: list[int | Grown] = [d for d in dims if d is not None]
    if len(new_dims) < len(dims):
        site.problem(
            "its shape mixes the old batch size with what is known at run time only",
            "make the shape of shape(x)[0]",
        )
        return
    new_dims[place] = Grown(site.sizes.factor(dim))
    site.set_dims(index, tuple(new_dims), data)


def _bias_add(site: Site) -> None:
    """Let a bias that has the batch be added as it was before a Squeeze."""
    # Keras adds a tensor of shape [1, ..., 1, n] as a bias.
    squeezed = site.operands[1].op
    producer = site.producers[1]
    if squeezed.type != "Squeeze" or site.axis(1) is None or producer is None:
        return
    if site.node.attr["data_format"].s == b"NCHW":
        return
    site.edit(BiasToAdd(site.node.name, producer.written[0]))
    site.operands[1] = squeezed.inputs[0]
    site.replaced |= {1}
    site.node.op = "AddV2"
    del site.node.attr["data_format"]


def _element_shape(index: int) -> Callable[[Site], None]:
    """Return the rule for a list whose elements' shape is input `index`."""
    # TensorFlow checks elements against the shape. In front of it stands the old batch
    # size; it is left open.

    def rule(site: Site) -> None:
        handle, probing = site.operands[0], site.probing
        # Neither are there batches in a list of rows nor in one of constants.
        if probing.is_list_of_rows(handle) or (
            handle.op.type == "TensorListFromTensor" and not probing.grows(handle)
        ):
            return
        dims = site.probing.dims(site.operands[index])
        if not dims or dims[0] != site.sizes.old or None in dims:
            return
        static_dims = [d for d in dims if d is not None]
        probed = [site.sizes.probe, *static_dims[1:]]
        site.set_constant(index, [-1, *static_dims[1:]], probed)

    return rule


def _list_from_rows(site: Site) -> None:
    """Let the elements have the batch where it is another axis than the first."""
    if site.axis(0):
        _element_shape(1)(site)


def _stack_list(site: Site) -> None:
    """Let as many elements be stacked as the batch has rows."""
    if not site.probing.is_list_of_rows(site.operands[0]):
        _element_shape(1)(site)
        return
    if site.node.attr["num_elements"].i == site.sizes.old:
        number = -1 if site.sizes.new is None else site.sizes.new
        site.set_attribute("num_elements", tf.compat.v1.AttrValue(i=number))
    site.node.attr["num_elements"].i = site.sizes.probe


def _array_element_shape(site: Site) -> None:
    """The same for the arrays of version 1, which have it as an attribute."""
    if site.node.name in site.probing.row_reads:
        return
    for name in ("element_shape", "element_shape_except0"):
        dims = [d.size for d in site.node.attr[name].shape.dim]
        if dims and dims[0] == site.sizes.old:
            site.set_attribute(name, attribute_of_shape((None, *dims[1:])))
            probed = attribute_of_shape((site.sizes.probe, *dims[1:]))
            site.node.attr[name].CopyFrom(probed)


def _ensure_shape(site: Site) -> None:
    """Let the shape that is asserted have the new batch size."""
    shape, axis = site.shape(0), site.axis(0)
    dims = [d.size for d in site.node.attr["shape"].shape.dim]
    if axis is None or shape is None or len(dims) != len(shape):
        return
    dim = shape[axis] or 0
    if dims[axis] == site.sizes.before(dim):
        new = site.sizes.new
        size = None if new is None else new * site.sizes.factor(dim)
        listed = [None if d < 0 else d for d in dims]
        site.set_attribute(
            "shape", attribute_of_shape((*listed[:axis], size, *listed[axis + 1 :]))
        )
        probed = (*listed[:axis], dim, *listed[axis + 1 :])
        site.node.attr["shape"].CopyFrom(attribute_of_shape(probed))


_RULES: Mapping[str, Callable[[Site], None]] = {
    "BiasAdd": _bias_add,
    "BroadcastTo": _broadcast_to,
    "Conv2DBackpropInput": _input_sizes,
    "Conv3DBackpropInputV2": _input_sizes,
    "DepthwiseConv2dNativeBackpropInput": _input_sizes,
    "EmptyTensorList": _element_shape(0),
    "EnsureShape": _ensure_shape,
    "GatherV2": _gather,
    "Reshape": _reshape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "StridedSlice": _strided_slice,
    "TensorArrayConcatV3": _array_element_shape,
    "TensorArrayGatherV3": _array_element_shape,
    "TensorArrayV3": _array_element_shape,
    "TensorListFromTensor": _list_from_rows,
    "TensorListGather": _element_shape(2),
    "TensorListGetItem": _element_shape(2),
    "TensorListReserve": _element_shape(0),
    "TensorListScatter": _element_shape(2),
    "TensorListStack": _stack_list,
}
"""The rules by type of op."""


@dataclass
class Walk:
    """A finished walk."""

    values: dict[str, Tensor]  # The tensor in the probing graph of each `node:k`.
    plan: BatchPlan = field(default_factory=BatchPlan)
    source: SizeSource | None = None  # Where the size of the batch can be read.


Starts = Mapping[str, tuple[int, int]]

Caller = Callable[[Site, tuple[str, ...]], "list[Tensor] | None"]
"""Walks through the functions that an op calls; None if it calls none."""


def walk(
    scope: Scope,
    feeds: Mapping[str, Tensor],
    probing: Probing,
    calls: Caller,
    active: tuple[str, ...] = (),
    starts: Starts | None = None,
) -> Walk:
    """Find the changes that a graph or a function body needs."""
    # `starts` has, by the Enter op of a variable of a version 1 loop that has to have
    # the batch from the start, the axis and how many times the batch it is long.
    done = Walk(dict(feeds))
    done.source = _first_source(feeds, probing)
    entries = {entry.node.name: entry for entry in scope.entries}
    readers = scope.readers()
    frames = RowFrames(scope)
    for entry in scope.entries:
        if f"{entry.node.name}:0" in done.values:
            continue
        start = (starts or {}).get(entry.node.name)
        _visit(entry, done, probing, calls, active, entries, readers, start, frames)
    return done


def _first_source(feeds: Mapping[str, Tensor], probing: Probing) -> SizeSource | None:
    for name, t in feeds.items():
        axis = probing.axis(t)
        if axis is not None:
            return source_at(probing, t, name.removesuffix(":0"), axis)
    return None


def _visit(
    entry: ScopeNode,
    done: Walk,
    probing: Probing,
    calls: Caller,
    active: tuple[str, ...],
    entries: Mapping[str, ScopeNode],
    readers: Mapping[str, list[tuple[ScopeNode, int]]],
    start: tuple[int, int] | None,
    frames: RowFrames,
) -> None:
    # The edge that closes a loop has no value yet; the loop keeps the shape it has.
    first = next((done.values[n] for n in entry.inputs if n in done.values), None)
    operands = [done.values.get(name, first) for name in entry.inputs]
    site = Site(
        entry,
        [t for t in operands if t is not None],
        probing,
        done.plan,
        done.source,
        [entries.get(node_name(name)) for name in entry.inputs],
        [(e.node.op, i) for e, i in readers.get(f"{entry.node.name}:0", ())],
    )
    if start is not None:
        site.broadcast(0, *start)
    frames.see(site)
    outputs = calls(site, active)
    if outputs is None:
        outputs = _tried(site)
    if any(name not in done.values for name in entry.inputs):
        # A value that comes round a loop is unknown here; it may depend on the inputs.
        probing.mark(outputs)
    for index, t in enumerate(outputs):
        done.values[f"{entry.node.name}:{index}"] = t
    if any(probing.grows(t) for t in outputs):
        done.plan.growing.add(entry.node.name)
    if done.source is None:
        done.source = site.source()


def _tried(site: Site) -> list[Tensor]:
    """Make an op, mended where its rule says so."""
    rule = _RULES.get(site.node.op)
    if rule is not None:
        rule(site)
    try:
        outputs = site.probing.make(site.node, site.operands)
        _follow_rows(site, outputs)
        return outputs
    except REFUSALS as refusal:
        if not _joined(site):
            return _unknown(site, refusal)
    try:
        return site.probing.make(site.node, site.operands)
    except REFUSALS as refusal:
        return _unknown(site, refusal)


def _follow_rows(site: Site, outputs: list[Tensor]) -> None:
    """Note whether an op makes a list with an element for each row of the batch."""
    made = site.node.op == "TensorListFromTensor" and site.axis(0) == 0
    kept = site.node.op in _SAME_LENGTH and site.probing.is_list_of_rows(
        site.operands[0]
    )
    if made or kept:
        site.probing.mark_list_of_rows(outputs[0])


_SAME_LENGTH = frozenset(("Identity", "TensorListSetItem"))


def _joined(site: Site) -> bool:
    """Repeat operands of the old batch size where they meet one that has the batch."""
    any_repeated = False
    growing = [i for i in range(len(site.operands)) if site.axis(i) is not None]
    for index, t in enumerate(site.operands):
        shape = shape_of(t)
        # A scalar fits any batch, and so does a tensor that follows the input.
        if not shape or site.probing.grows(t):
            continue
        for other in growing:
            like, axis = site.shape(other) or (), site.axis(other) or 0
            place = axis - len(like) + len(shape)
            dim = like[axis]
            if place >= 0 and dim and shape[place] == site.sizes.before(dim):
                factor = site.sizes.factor(dim)
                any_repeated = site.broadcast(index, place, factor) or any_repeated
                break
    return any_repeated


def _unknown(site: Site, refusal: Exception) -> list[Tensor]:
    """Note a refusal, and go on with outputs of unknown shape."""
    reason = str(refusal).partition(" for '{{node")[0].partition("\n")[0]
    site.problem(
        f"TensorFlow refuses it for other batch sizes ({reason})",
        "rewrite this part of the model, or cut the model around it",
    )
    blank = [
        t
        if t.dtype in (tf.resource, tf.variant) or site.probing.value(t) is not None
        else site.probing.placeholder(t.dtype, None, like=[t])
        for t in site.operands
    ]
    outputs = site.probing.make(site.node, blank)
    if any(site.probing.grows(t) for t in site.operands):
        site.probing.mark(outputs)
    return outputs


Walker = Callable[[Starts], Walk]


def walk_loops(scope: Scope, probing: Probing, walker: Walker) -> Walk:
    """Walk until every loop variable that has the batch has it from the start."""
    loops = list(_variables(scope))
    starts: dict[str, tuple[int, int]] = {}
    while True:
        done = walker(starts)
        more = _growing(loops, done, probing)
        if not more:
            break
        starts |= more
    if done.plan.problems:
        guess = starts | _guessed(loops, done, probing)
        if guess.keys() != starts.keys():
            other = walker(guess)
            if not other.plan.problems and _held(loops, other, probing, guess):
                return other
    return done


def _variables(scope: Scope) -> Iterator[tuple[ScopeNode, ScopeNode]]:
    """Yield (Enter, Merge) of each loop variable."""
    entries = {entry.node.name: entry for entry in scope.entries}
    for entry in scope.entries:
        if entry.node.op == "Merge" and len(entry.inputs) == 2:
            enter, back = (entries.get(node_name(name)) for name in entry.inputs)
            ends = (enter and enter.node.op, back and back.node.op)
            if enter is not None and ends == ("Enter", "NextIteration"):
                yield enter, entry


def _ends(merge: ScopeNode, done: Walk) -> tuple[Tensor, Tensor]:
    before, after = (done.values[name] for name in merge.inputs)
    return before, after


def _growing(
    loops: list[tuple[ScopeNode, ScopeNode]], done: Walk, probing: Probing
) -> dict[str, tuple[int, int]]:
    """Return the variables that gain the batch in an iteration."""
    growth_by_enter = {}
    for enter, merge in loops:
        before, after = _ends(merge, done)
        axis, old, new = probing.axis(after), shape_of(before), shape_of(after)
        if axis is None or old is None or new is None or len(old) != len(new):
            continue
        grown = new[axis] or 0
        start = done.values[enter.inputs[0]]
        if old[axis] == probing.sizes.before(grown) and not probing.grows(start):
            growth_by_enter[enter.node.name] = axis, probing.sizes.factor(grown)
    return {
        name: start for name, start in growth_by_enter.items() if not _had(name, done)
    }


def _had(enter: str, done: Walk) -> bool:
    """Return whether a variable was given the batch, or could not be."""
    noted = [e.node for e in done.plan.edits] + [p.node for p in done.plan.problems]
    return enter in noted


def _guessed(
    loops: list[tuple[ScopeNode, ScopeNode]], done: Walk, probing: Probing
) -> dict[str, tuple[int, int]]:
    """Return the variables that look as if they had the batch at their start."""
    growth_by_enter = {}
    for enter, _ in loops:
        start = done.values[enter.inputs[0]]
        shape = shape_of(start)
        if not shape or shape[0] != probing.sizes.old or probing.grows(start):
            continue
        if probing.rows_are_equal(start, 0):
            growth_by_enter[enter.node.name] = 0, 1
    return growth_by_enter


def _held(
    loops: list[tuple[ScopeNode, ScopeNode]],
    done: Walk,
    probing: Probing,
    starts: Starts,
) -> bool:
    """Return whether variables that have the batch at their start keep it."""
    return all(
        probing.axis(t) == starts[enter.node.name][0]
        for enter, merge in loops
        if enter.node.name in starts
        for t in _ends(merge, done)
    )
