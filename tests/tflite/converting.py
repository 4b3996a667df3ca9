"""Runs of TFLite files, and files of int8 that TensorFlow's converter makes."""

import numpy as np
import tensorflow as tf

from geutil.tflite.run import new_interpreter


def run(blob, *feeds):
    """Return the outputs of a file."""
    interpreter = new_interpreter(blob)
    ends = interpreter.get_input_details()
    for end, value in zip(ends, feeds, strict=True):
        if tuple(end["shape"]) != value.shape:
            interpreter.resize_tensor_input(end["index"], value.shape)
    interpreter.allocate_tensors()
    for end, value in zip(ends, feeds, strict=True):
        interpreter.set_tensor(end["index"], value)
    interpreter.invoke()
    return [
        interpreter.get_tensor(e["index"]) for e in interpreter.get_output_details()
    ]


def drawn(blob, batch=1):
    """Return inputs of a file, the same each time."""
    feeds, random = [], np.random.default_rng(5)
    for end in new_interpreter(blob).get_input_details():
        shape, dtype = [batch, *end["shape"][1:]], end["dtype"]
        if np.issubdtype(dtype, np.floating):
            feeds.append(random.normal(size=shape).astype(dtype))
        else:
            least, most = (0, 256) if dtype == np.uint8 else (-128, 128)
            feeds.append(random.integers(least, most, shape).astype(dtype))
    return feeds


def float_file(body, *specs):
    """Return the file of a function."""
    traced = tf.function(body).get_concrete_function(*specs)
    return tf.lite.TFLiteConverter.from_concrete_functions([traced]).convert()


def quantized(body, spec, reach, ends=tf.int8):
    """Return a file of int8 whose input reaches from -reach to reach."""
    traced = tf.function(body).get_concrete_function(spec)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([traced])
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.inference_input_type = converter.inference_output_type = ends
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    values = np.random.default_rng(9).uniform(-reach, reach, spec.shape)
    values.flat[0], values.flat[1] = -reach, reach
    converter.representative_dataset = lambda: iter([[values.astype(np.float32)]])
    return converter.convert()
