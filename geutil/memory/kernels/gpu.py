"""Buffers of TensorFlow's GPU kernels: tensors in host memory, and scratch memory."""

# Ops that have no kernel for a GPU run on the CPU beside it, and kernels read and make
# shapes and most integers in the host's memory. cuDNN's workspaces are not counted:
# which algorithm it takes is found on the card. The rest is read off conv_ops_impl.h,
# conv_grad_*_ops.cc and fused_batch_norm_op.cc of TensorFlow 2.21.

from __future__ import annotations

import tensorflow as tf

from geutil.graph.runtime import RegisteredKernel, kernel_of
from geutil.graph.types import Operation, Tensor, bytes_of_shape, dims_of
from geutil.memory.kernels.cpu import DimsOf, Pairs

_KIND = "GPU"
_CPU = "CPU:"
_NCHW_COPIES = {
    # How many images a kernel in training copies to read or write channels first.
    "FusedBatchNorm": 2,
    "FusedBatchNormV2": 2,
    "FusedBatchNormV3": 2,
    "FusedBatchNormGrad": 3,
    "FusedBatchNormGradV2": 3,
    "FusedBatchNormGradV3": 3,
}
_FILTER_PLACE = {"Conv2D": 1, "Conv2DBackpropInput": 1}
_IMAGES = {
    # The tensors of a convolution that are images: inputs by place, -1 is the output.
    "Conv2D": (0, -1),
    "Conv2DBackpropInput": (2, -1),
    "Conv2DBackpropFilter": (0, 2),
}


def is_in_host_memory(tensor: Tensor) -> bool:
    """Return whether a tensor of a step on a GPU never is in the GPU's memory."""
    # One that the host makes is sent to the GPU as soon as it is made if an op there
    # reads it. Cost: some 10 us, and as much for each reader of a tensor that the host
    # makes.
    if not _is_made_on_host(tensor):
        return False
    for reader in tensor.consumers():
        at = _kernel_on_gpu(reader)
        if at is None:
            continue
        places = [i for i, t in enumerate(reader.inputs) if t is tensor]
        if not at.host_inputs.issuperset(places):
            return False
    return True


def without_copies(op: Operation, aliases: Pairs) -> Pairs:
    """Return the outputs of an op that are an input's buffer, in the same memory."""
    # Tensors that pass between the GPU and an op of the host are copied.
    if not aliases or _kernel_on_gpu(op) is not None:
        return aliases
    return [
        (out, place)
        for out, place in aliases
        if _is_made_on_host(op.inputs[place]) and is_in_host_memory(op.outputs[out])
    ]


def _is_made_on_host(tensor: Tensor) -> bool:
    kernel = _kernel_on_gpu(tensor.op)
    return kernel is None or tensor.value_index in kernel.host_outputs


def _kernel_on_gpu(op: Operation) -> RegisteredKernel | None:
    """Return the kernel of an op on the GPU; None if it runs on the CPU."""
    return None if _CPU in op.device else kernel_of(op, _KIND)


def temporary_bytes(op: Operation, dims: DimsOf = dims_of) -> int:
    """Return the bytes that an op's kernel allocates for itself."""
    # cuDNN computes on channels first: kernels copy images of channels last, except
    # those of convolutions in half precision or TensorFloat-32, which copy their
    # filters alone.
    if op.type in _NCHW_COPIES:
        return _copies_of_batch_norm(op, dims)
    if op.type not in _IMAGES or op.get_attr("data_format") != b"NHWC":
        return 0
    tensors = [*op.inputs, op.outputs[0]]
    filters = tensors[_FILTER_PLACE.get(op.type, -1)]
    sides = dims(filters)
    stride = max(op.get_attr("strides"))
    if sides and len(sides) == 4 and tuple(sides[:2]) == (1, 1) and stride == 1:
        # One product of matrices.
        return 0
    copied = [filters]
    if op.outputs[0].dtype == tf.float32 and not (
        tf.config.experimental.tensor_float_32_execution_enabled()
    ):
        copied += [tensors[place] for place in _IMAGES[op.type]]
    return sum(_bytes(t, dims) for t in copied)


def _copies_of_batch_norm(op: Operation, dims: DimsOf) -> int:
    if not op.get_attr("is_training") or op.get_attr("data_format") != b"NHWC":
        return 0
    return _NCHW_COPIES[op.type] * _bytes(op.inputs[0], dims)


def _bytes(tensor: Tensor, dims: DimsOf) -> int:
    return bytes_of_shape(tensor.dtype, dims(tensor)) or 0
