"""Edits drawn at random, one after another: done whole, or refused and nothing done."""

import random

import pytest

from geutil import tflite
from geutil.errors import GeutilError, VerificationError
from tests.tflite.declared import counter, diamond
from tests.tflite.running import runs
from tests.tflite_files import SAMPLES
from tests.thorough import is_quick

MADE = {"diamond": diamond, "counter": counter}
NAMES = [*SAMPLES, *MADE]


def tensor(m, graph, rng):
    return rng.choice(graph.tensors)


def op(m, graph, rng):
    return rng.choice(graph.ops)


def reroute(m, graph, rng):
    old = tensor(m, graph, rng)
    alike = [t for t in graph.tensors if str(t) == str(old) and t is not old]
    new = rng.choice(alike or graph.tensors)
    readers = [*old.consumers]
    some = rng.choice([None, readers[:1] or None])
    m.reroute(old, new, consumers=some, graph=graph)


def swap(m, graph, rng):
    one = tensor(m, graph, rng)
    alike = [t for t in graph.tensors if str(t) == str(one) and t is not one]
    m.swap(one, rng.choice(alike or graph.tensors), graph=graph)


def bypass(m, graph, rng):
    m.bypass(op(m, graph, rng), graph=graph)


def remove(m, graph, rng):
    m.remove(rng.sample(graph.ops, min(len(graph.ops), rng.randint(1, 3))), graph=graph)


def floating(m, graph, rng):
    """Return a tensor of floats, for which all kernels that are drawn exist."""
    floats = [t for t in graph.tensors if t.dtype == "float32"]
    return rng.choice(floats or graph.tensors)


def insert(m, graph, rng):
    kind = rng.choice(["ABS", "RELU", "NEG", "LOGISTIC"])
    m.insert(floating(m, graph, rng), kind, graph=graph)


def insert_file(m, graph, rng):
    t = floating(m, graph, rng)
    part = tflite.LiteFile()
    x = part.add_input("x", t.dtype, t.shape, quantization=t.quantization)
    y = part.add("RELU", x, name="y", quantization=t.quantization)
    part.set_outputs(y)
    m.insert(t, part, graph=graph)


def replace(m, graph, rng):
    kind = rng.choice(["ABS", "RELU", "RELU6", "TANH"])
    m.replace(floating(m, graph, rng).name, kind, graph=graph)


def replace_by_part(m, graph, rng):
    start = rng.randrange(len(graph.ops))
    some = graph.ops[start : start + rng.randint(1, 3)]
    part = m.cut(ops=some, graph=graph)
    m.replace(some, part, graph=graph)


def expose(m, graph, rng):
    m.expose([tensor(m, graph, rng)], graph=graph)


def rename(m, graph, rng):
    old = tensor(m, graph, rng).name
    m.rename(tensors={old: f"{old}_{rng.randrange(9)}"}, graph=graph)


def strip(m, graph, rng):
    m.strip(names=rng.random() < 0.2)


def cut(m, graph, rng):
    part = m.cut(outputs=tensor(m, graph, rng), graph=graph)
    part.verify()


EDITS = [
    *(reroute, swap, bypass, remove, insert, insert_file, replace, replace_by_part),
    *(expose, rename, strip, cut),
]


@pytest.mark.parametrize("name", NAMES)
def test_edits_are_whole_or_refused(name):
    blob = MADE[name]().to_bytes() if name in MADE else SAMPLES[name]().blob
    done = 0
    for seed in range(6 if is_quick() else 40):
        rng = random.Random(f"{name}{seed}")
        m = tflite.open(blob)
        for _ in range(12):
            edit = rng.choice(EDITS)
            before = m.to_bytes()
            graph = rng.choice(m.graphs)
            if not graph.ops:
                continue
            try:
                edit(m, graph, rng)
            except GeutilError:
                assert m.to_bytes() == before, edit
                continue
            done += 1
            # Kernels for integers may be missing, and scales of inserted ops odd.
            try:
                m.verify()
            except VerificationError as error:
                faults = {v.invariant for v in error.violations}
                assert faults <= {"scales", "kinds"}, (edit, seed, str(error))
            assert tflite.open(m.to_bytes()).to_bytes() == m.to_bytes()
    assert done > 10


@pytest.mark.parametrize("name", ["floats", "attention", "diamond", "counter"])
def test_edited_files_run(name):
    blob = MADE[name]().to_bytes() if name in MADE else SAMPLES[name]().blob
    for seed in range(3 if is_quick() else 30):
        rng = random.Random(f"{name}{seed}")
        m = tflite.open(blob)
        for _ in range(8):
            try:
                rng.choice(EDITS)(m, m.graphs[0], rng)
            except GeutilError:
                continue
        if all(t.buffer.size or t.makers for t in m.graphs[0].outputs):
            runs(m.to_bytes())
