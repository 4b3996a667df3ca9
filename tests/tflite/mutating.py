"""TFLite files with one field changed at random, as a hand or a tool may leave them."""

from dataclasses import replace

from geutil import tflite
from geutil.tflite.kinds import KINDS
from geutil.tflite.parts import Buffer

TYPES = ("float32", "float16", "int8", "int16", "uint8", "int32", "int64", "bool")


def dtype(m, op, rng):
    rng.choice([*op.reads, *op.outputs]).dtype = rng.choice(TYPES)


def size(m, op, rng):
    t = rng.choice([*op.reads, *op.outputs])
    sizes = [*(t.shape or ())]
    if sizes and rng.random() < 0.8:
        at = rng.randrange(len(sizes))
        sizes[at] = max(0, (sizes[at] or 1) + rng.choice([-1, 1, 3]))
    elif sizes:
        sizes.pop()
    else:
        sizes.append(2)
    t.shape = sizes


def option(m, op, rng):
    numbers = [n for n, v in op.options.items() if isinstance(v, int | bool)]
    words = [n for n, v in op.options.items() if isinstance(v, str)]
    if numbers and (not words or rng.random() < 0.7):
        op.options[rng.choice(numbers)] = rng.choice([-1, 0, 1, 2, 5])
    elif words:
        op.options[rng.choice(words)] = rng.choice(["NONE", "RELU", "SAME", "VALID"])


def version(m, op, rng):
    op.version += rng.choice([1, 2])


def kind(m, op, rng):
    op.kind = rng.choice([*KINDS])


def less(m, op, rng):
    op.inputs = op.inputs[:-1]


def more(m, op, rng):
    op.inputs = (*op.inputs, rng.choice(op.graph.tensors))


def left_out(m, op, rng):
    op.set_input(rng.randrange(len(op.inputs)), None)


def other(m, op, rng):
    op.set_input(rng.randrange(len(op.inputs)), rng.choice(op.graph.tensors))


def turned(m, op, rng):
    op.inputs = op.inputs[::-1]


def constant(m, op, rng):
    known = [t for t in op.reads if t.value is not None and t.value.size]
    if known:
        t = rng.choice(known)
        value = t.value.copy()
        value.flat[rng.randrange(value.size)] = rng.choice([0, 1, 3, 9, 100])
        t.value = value


def scale(m, op, rng):
    stepped = [t for t in (*op.reads, *op.outputs) if t.quantization]
    if stepped:
        t = rng.choice(stepped)
        by = rng.choice([0.0, -1.0, 2.0, float("nan")])
        t.quantization = replace(
            t.quantization, scales=tuple(by * s for s in t.quantization.scales)
        )


def zero_point(m, op, rng):
    stepped = [t for t in (*op.reads, *op.outputs) if t.quantization]
    if stepped:
        t = rng.choice(stepped)
        zeros = t.quantization.zero_points
        t.quantization = replace(
            t.quantization, zero_points=tuple(z + rng.choice([1, 300]) for z in zeros)
        )


def no_steps(m, op, rng):
    rng.choice([*op.reads, *op.outputs]).quantization = None


def order(m, op, rng):
    ops = [*op.graph.ops]
    at = rng.randrange(len(ops))
    op.graph.set_ops([*ops[at:], *ops[:at]])


def data(m, op, rng):
    stored = [t for t in op.reads if t.buffer.size]
    if stored:
        t = rng.choice(stored)
        t.buffer = Buffer(t.buffer.data[: t.buffer.size // 2])


def no_data(m, op, rng):
    rng.choice(op.reads).buffer = Buffer()


def variable(m, op, rng):
    rng.choice([*op.reads, *op.outputs]).is_variable = True


MUTATIONS = (
    *(dtype, size, option, version, kind, less, more, left_out, other, turned),
    *(constant, scale, zero_point, no_steps, order, data, no_data, variable),
)


def mutant(blob, rng):
    """Return the name of a mutation, and the file."""
    m = tflite.open(blob)
    change = rng.choice(MUTATIONS)
    op = rng.choice([op for op in m.graphs[0].ops if op.reads])
    change(m, op, rng)
    return change.__name__, op.kind, m
