"""Files run by the interpreter, and files that TensorFlow's converter makes.

Of `runs` the interpreter is in another process, one for all: a crash is a failure.

`python -m tests.tflite.running` is the process: it answers each job that comes.
"""

import atexit
import functools
import pickle
import subprocess
import sys
from dataclasses import dataclass

import numpy as np

from tests.interpreter import new_interpreter
from tests.processes import ROOT


@dataclass
class Run:
    """One run: its inputs and outputs by name, and the tensors that were kept."""

    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]
    kept: dict[int, np.ndarray]


@functools.cache
def _process():
    command = [sys.executable, "-m", "tests.tflite.running"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    atexit.register(process.kill)
    return process


def runs(blob, feeds=None, *, count=2, kept=()):
    """Run a file several times in turn, with arrays by name or with random ones.

    Args:
        blob: the file.
        feeds: the inputs of each run by name; random ones if None.
        count: how often it runs with these.
        kept: the places of tensors inside to read after each run.
    """
    process = _process()
    pickle.dump((blob, feeds, count, [*kept]), process.stdin)
    process.stdin.flush()
    try:
        answer = pickle.load(process.stdout)
    except EOFError:
        _process.cache_clear()
        raise AssertionError("the interpreter died of the file") from None
    assert isinstance(answer, list), answer
    return [Run(*one) for one in answer]


def _answer(blob, feeds, count, kept):
    interpreter = new_interpreter(blob, keep_tensors=bool(kept))
    interpreter.allocate_tensors()
    ends = interpreter.get_input_details()
    answer = []
    for i in range(count) if feeds is None else range(len(feeds)):
        random = np.random.default_rng(i)
        feed = {end["name"]: _random(end, random) for end in ends}
        feed = feed if feeds is None else feeds[i]
        for end in ends:
            interpreter.set_tensor(end["index"], feed[end["name"]])
        interpreter.invoke()
        outputs = {
            end["name"]: interpreter.get_tensor(end["index"]).copy()
            for end in interpreter.get_output_details()
        }
        tensors = {place: interpreter.get_tensor(place).copy() for place in kept}
        answer.append((feed, outputs, tensors))
    return answer


def _random(end, random):
    if np.issubdtype(end["dtype"], np.floating):
        return random.random(end["shape"]).astype(end["dtype"])
    return random.integers(1, 5, end["shape"]).astype(end["dtype"])


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
    import tensorflow as tf

    traced = tf.function(body).get_concrete_function(*specs)
    return tf.lite.TFLiteConverter.from_concrete_functions([traced]).convert()


def quantized(body, spec, reach, ends=None):
    """Return a file of int8 whose input reaches from -reach to reach."""
    import tensorflow as tf

    traced = tf.function(body).get_concrete_function(spec)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([traced])
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.inference_input_type = converter.inference_output_type = ends or tf.int8
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    values = np.random.default_rng(9).uniform(-reach, reach, spec.shape)
    values.flat[0], values.flat[1] = -reach, reach
    converter.representative_dataset = lambda: iter([[values.astype(np.float32)]])
    return converter.convert()


def main():
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = _answer(*job)
        except (RuntimeError, ValueError) as error:
            answer = str(error)
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
