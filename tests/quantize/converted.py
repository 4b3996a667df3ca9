"""Small functions, quantized, calibrated and converted: what TFLite makes of them."""

import functools
import itertools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil import model, tflite
from geutil.errors import QuantizeError
from geutil.quantize import calibrate, compare_int8, quantize, to_tflite
from geutil.quantize.tflite.runner import Runner
from tests.interpreter import has_floats
from tests.thorough import is_quick


def is_simulated(op):
    return op.type.startswith("FakeQuant")


def decibels(exact, other):
    """Return the signal-to-noise ratio, infinite where values are the same."""
    with np.errstate(divide="ignore"):
        return 10 * np.log10(np.var(exact) / np.mean((exact - other) ** 2))


def refused(call, *words):
    with pytest.raises(QuantizeError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


def both_results(m, blob, data):
    """Return by output what model and file make of the same stored inputs, as values.

    Args:
        m: the model.
        blob: its file.
        data: a sample, or several.
    """
    runner = Runner(blob, list(m.inputs), list(m.outputs))
    found = {name: [] for name in m.outputs}
    for sample in [data] if isinstance(data, dict) else data:
        stored = runner.stored(sample)
        simulated = m.run(**runner.values(stored))
        for name, value in runner.results(runner.run(stored)).items():
            found[name].append((simulated[name], value))
    return {
        name: tuple(np.concatenate(side) for side in zip(*pairs, strict=True))
        for name, pairs in found.items()
    }


def stored_weights(blob):
    """Return the constants that ops of a file read second, as (type of op, tensor).

    Of an op that reads them through others, such as DEQUANTIZE, too.
    """
    found = []
    for op in tflite.open(blob).ops:
        tensor = op.reads[1] if len(op.reads) > 1 else None
        while tensor is not None and tensor.producer is not None:
            tensor = next(iter(tensor.producer.reads), None)
        if tensor is not None and tensor.value is not None:
            found.append((op.kind, tensor))
    return found


def types_of(op):
    """Return the types of what an op of a file reads and makes, in order."""
    return tuple(t.dtype for t in (*op.reads, *op.outputs))


def spec(*shape, name=None, dtype=tf.float32):
    return tf.TensorSpec(shape, dtype, name)


def samples(inputs, low=-3.0, high=3.0, seed=0, unknown=2):
    """Return random values for the inputs of a model; `unknown` for unknown sizes."""
    random = np.random.default_rng(seed)
    found = {}
    for name, tensor in inputs.items():
        shape = [unknown if size is None else size for size in tensor.shape.as_list()]
        if tensor.dtype.is_floating:
            found[name] = random.uniform(low, high, shape).astype(np.float32)
        else:
            found[name] = random.integers(0, 5, shape, tensor.dtype.as_numpy_dtype)
    return found


def alternate(*lists, every=2):
    """Return the product of lists; where it has to be quick, every second row."""
    rows = itertools.product(*(enumerate(one) for one in lists))
    return [
        tuple(value for _, value in row)
        for row in rows
        if not is_quick() or sum(place for place, _ in row) % every == 0
    ]


def opened(function, *specs):
    """Return a function as a model; inputs without a name are a, b and so on."""
    named = [
        tf.TensorSpec(s.shape, s.dtype, s.name or "abcdef"[i])
        for i, s in enumerate(specs)
    ]
    traced = tf.function(function, input_signature=named, autograph=False)
    return model.open(traced)


@dataclass
class Part:
    """One of several functions that are outputs of one model: what is made of it.

    Attributes:
        kinds: the types of its ops in the TFLite file, in order.
        floats: of those of them that compute in float.
        most: how many steps its results are apart at most.
        shares: of each result, the share of values that are at most one step apart.
        coverage: the share of its ops that are quantized, of those with kernels.
        types: the types of its quantized ops.
        skipped: the entries of its ops that are not quantized.
        rewritten: the lines about what was written in another form.
    """

    kinds: list[str]
    floats: list[str]
    most: int
    shares: list[float]
    coverage: float
    types: list[str]
    skipped: list[Any]
    rewritten: list[str]

    @property
    def is_int8(self):
        return self.coverage == 1.0 and not self.floats and not self.skipped


class Together:
    """Independent functions as outputs of one model, converted and run once.

    Each has inputs and a name scope of its own, so that it is converted as it would be
    alone, and all that is told can be told of it.

    Attributes:
        cases: the functions by name.
        traced: the function that computes them all.
        model: the quantized model.
        report: what quantization says of it.
        data: what it was calibrated with.
        blob: the TFLite file.
    """

    def __init__(self, cases, method="min_max", **choices):
        """Quantize functions and calibrate and convert what was made.

        Args:
            cases: the functions by name, each with the specs of its inputs, and perhaps
                the ends of its data.
            method: how ranges are found.
            choices: as `quantize` takes them.
        """
        self._scopes = {name: re.sub(r"\W", "_", name) for name in cases}
        assert len(set(self._scopes.values())) == len(cases)
        self.cases = cases
        specs = [
            tf.TensorSpec(s.shape, s.dtype, f"{self._scopes[name]}_in{i}")
            for name, case in cases.items()
            for i, s in enumerate(case[1])
        ]
        self.traced = tf.function(self._compute, input_signature=specs, autograph=False)
        self.model = model.open(self.traced)
        self.report = quantize(
            self.model, **{"is_training": False, "overrides": {}, **choices}
        )
        ge.verify(self.model.graph)
        self.data = {}
        for name, (_, _, *ends) in cases.items():
            named = {n: t for n, t in self.model.inputs.items() if self.is_of(n, name)}
            self.data |= samples(named, **(ends[0] if ends else {}))
        # By its data each layer would have weights of its own.
        calibrate(self.model, self.data, method, rounding="nearest")
        self.blob = to_tflite(self.model, scheme=choices.get("scheme"))

    def _compute(self, *given):
        given, made = list(given), {}
        for name, (function, specs, *_) in self.cases.items():
            with tf.name_scope(self._scopes[name]):
                results = tf.nest.flatten(function(*given[: len(specs)]))
                del given[: len(specs)]
            for index, result in enumerate(results):
                made[f"{self._scopes[name]}_out{index}"] = result
        return made

    def is_of(self, name, case):
        """Tell whether an op, an input or an output is of a function."""
        return re.match(rf"{self._scopes[case]}(/|_in\d|_out\d)", name) is not None

    @functools.cached_property
    def file(self):
        """The file."""
        return tflite.open(self.blob)

    def _part_of_file(self, name):
        (signature,) = self.file.signatures.values()
        wanted = {t for n, t in signature.outputs.items() if self.is_of(n, name)}
        found = []
        for op in reversed(signature.graph.ops):
            if wanted.intersection(op.outputs):
                wanted.update(op.reads)
                found.append(op)
        return found[::-1], wanted

    def ops(self, name):
        """Return the ops of the file that make the results of a function, in order."""
        return self._part_of_file(name)[0]

    def tensors(self, name):
        """Return the tensors that these ops read or make."""
        return self._part_of_file(name)[1]

    def results(self):
        """Return by function what model and file make, as values, of the same data."""
        found = both_results(self.model, self.blob, self.data)
        return {
            case: [pair for n, pair in found.items() if self.is_of(n, case)]
            for case in self.cases
        }

    def rounded(self, name):
        """Return the types of ops of a function whose results are rounded.

        Parameters are left out.
        """
        return [
            op.inputs[0].op.type
            for op in self.model.graph.get_operations()
            if is_simulated(op) and self.is_of(op.name, name)
            if "weights_quant" not in op.name
        ]

    def parts(self):
        """Return what is made of each function, by name."""
        outputs = compare_int8(self.model, self.blob, self.data).outputs
        return {name: self._part(name, outputs) for name in self.cases}

    def part(self):
        """Return what is made of the only function."""
        (part,) = self.parts().values()
        return part

    def _part(self, name, outputs):
        ops = self.ops(name)
        outputs = [o for o in outputs if self.is_of(o.output, name)]
        quantized, skipped = (
            [e for e in entries if self.is_of(e.op, name)]
            for entries in (self.report.quantized, self.report.skipped)
        )
        missed = sum(entry.has_kernel for entry in skipped)
        scope = self._scopes[name]
        return Part(
            [op.kind for op in ops],
            [op.kind for op in ops if has_floats(op)],
            max(output.most for output in outputs),
            [output.share(1) for output in outputs],
            len(quantized) / max(len(quantized) + missed, 1),
            [entry.op_type for entry in quantized],
            skipped,
            [line for line in self.report.rewritten if line.startswith(f"'{scope}/")],
        )
