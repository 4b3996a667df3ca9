"""Rules for op types that hard-code a batch size: how to detect and repair it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import tensorflow as tf

from geutil.model.batch_size.batch_edits import (
    BiasToAdd,
    Grown,
    SetElements,
    batch_axis_after_reshape,
)
from geutil.model.batch_size.sites import Site, attribute_of_shape


def slice_(site: Site) -> None:
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


def strided_slice(site: Site) -> None:
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


def gather(site: Site) -> None:
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


def squeeze(site: Site) -> None:
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


def reshape(site: Site) -> None:
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


def broadcast_to(site: Site) -> None:
    """Let the target have the batch where the operand has it."""
    _set_dim(site, 1, 0)


def input_sizes(site: Site) -> None:
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


def bias_add(site: Site) -> None:
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


def element_shape(index: int) -> Callable[[Site], None]:
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


def list_from_rows(site: Site) -> None:
    """Let the elements have the batch where it is another axis than the first."""
    if site.axis(0):
        element_shape(1)(site)


def stack_list(site: Site) -> None:
    """Let as many elements be stacked as the batch has rows."""
    if not site.probing.is_list_of_rows(site.operands[0]):
        element_shape(1)(site)
        return
    if site.node.attr["num_elements"].i == site.sizes.old:
        number = -1 if site.sizes.new is None else site.sizes.new
        site.set_attribute("num_elements", tf.compat.v1.AttrValue(i=number))
    site.node.attr["num_elements"].i = site.sizes.probe


def array_element_shape(site: Site) -> None:
    """The same for the arrays of version 1, which have it as an attribute."""
    if site.node.name in site.probing.row_reads:
        return
    for name in ("element_shape", "element_shape_except0"):
        dims = [d.size for d in site.node.attr[name].shape.dim]
        if dims and dims[0] == site.sizes.old:
            site.set_attribute(name, attribute_of_shape((None, *dims[1:])))
            probed = attribute_of_shape((site.sizes.probe, *dims[1:]))
            site.node.attr[name].CopyFrom(probed)


def ensure_shape(site: Site) -> None:
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


RULES: Mapping[str, Callable[[Site], None]] = {
    "BiasAdd": bias_add,
    "BroadcastTo": broadcast_to,
    "Conv2DBackpropInput": input_sizes,
    "Conv3DBackpropInputV2": input_sizes,
    "DepthwiseConv2dNativeBackpropInput": input_sizes,
    "EmptyTensorList": element_shape(0),
    "EnsureShape": ensure_shape,
    "GatherV2": gather,
    "Reshape": reshape,
    "Slice": slice_,
    "Squeeze": squeeze,
    "StridedSlice": strided_slice,
    "TensorArrayConcatV3": array_element_shape,
    "TensorArrayGatherV3": array_element_shape,
    "TensorArrayV3": array_element_shape,
    "TensorListFromTensor": list_from_rows,
    "TensorListGather": element_shape(2),
    "TensorListGetItem": element_shape(2),
    "TensorListReserve": element_shape(0),
    "TensorListScatter": element_shape(2),
    "TensorListStack": stack_list,
}
"""The rules by type of op."""
