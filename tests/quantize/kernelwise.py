"""The kernels of a TFLite file one by one, each compared on what it was given."""

from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tests.interpreter import new_interpreter


@dataclass
class Kernel:
    """An op of the file.

    Attributes:
        kind: its type.
        name: what it makes, in the quantized graph.
        most: how many steps its values are apart from the FakeQuant op's at most.
        differ: the share of values that differ.
    """

    kind: str
    name: str
    most: int
    differ: float


def kernels_apart(model, blob, sample):
    """Compare all kernels whose results the quantized graph has under the same name.

    The graph is run with the values of the file in place of all FakeQuant results, so
    that no difference is carried on.
    """
    frozen = model.freeze()
    made = _made(blob, sample)
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(frozen.graph.as_graph_def(), name="")
        points = {
            op.inputs[0].op.name: op
            for op in graph.get_operations()
            if op.type.startswith("FakeQuant") and "weights_quant" not in op.name
        }
        feed = {
            graph.get_tensor_by_name(t.name): sample[name]
            for name, t in frozen.inputs.items()
        }
        rows = []
        for kind, detail, value in made:
            op = _point(detail["name"], points, {op.name for _, op, *_ in rows})
            scale, zero = detail["quantization"]
            # Of an Einsum the file may hold another order of axes.
            if op is None or not scale or not _fits(op, value):
                continue
            rows.append((kind, op, value, scale, zero))
            feed[op.outputs[0]] = np.float32(scale) * (value.astype(np.float32) - zero)
        with tf.compat.v1.Session(graph=graph) as session:
            wanted = session.run([op.inputs[0] for _, op, *_ in rows], feed)
    return [
        _compared(kind, op.name, value, want, scale, zero)
        for (kind, op, value, scale, zero), want in zip(rows, wanted, strict=True)
    ]


def _point(made, points, met):
    """Return the FakeQuant op of a result of the file, by the names it goes by.

    Where weights have the name of the result already, it has a number behind it.
    """
    names = [name.partition(":")[0] for name in made.split(";")]
    op = next((points[name] for name in names if name in points), None)
    if op is None:
        plain = (name.rstrip("0123456789") for name in names)
        op = next((points[name] for name in plain if name in points), None)
        return None if op is None or op.name in met else op
    return op


def _fits(op, value):
    return op.outputs[0].shape.is_compatible_with(value.shape)


def _compared(kind, name, value, want, scale, zero):
    levels = np.clip(np.round(want / np.float32(scale)) + zero, -128, 127)
    apart = np.abs(levels - value)
    return Kernel(kind, name, int(apart.max()), float(np.mean(apart > 0)))


def ran(blob, sample):
    """Return an interpreter that ran a file of one input, and keeps all tensors."""
    interpreter = new_interpreter(blob, keep_tensors=True)
    (detail,) = interpreter.get_input_details()
    (value,) = map(np.asarray, sample.values())
    interpreter.resize_tensor_input(detail["index"], value.shape)
    interpreter.allocate_tensors()
    scale, zero = detail["quantization"]
    levels = np.clip(np.round(value / np.float32(scale)) + zero, -128, 127)
    interpreter.set_tensor(detail["index"], levels.astype(np.int8))
    interpreter.invoke()
    return interpreter


def _made(blob, sample):
    """Return type, tensor and value of each result of the file, in order."""
    interpreter = ran(blob, sample)
    details = {detail["index"]: detail for detail in interpreter.get_tensor_details()}
    return [
        (op["op_name"], details[index], interpreter.get_tensor(index))
        for op in interpreter._get_ops_details()
        for index in op["outputs"]
    ]
