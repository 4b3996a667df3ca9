"""Files declared in Python for tests of edits."""

import numpy as np

from geutil import tflite


def chain(*kinds, shape=(2, 4)):
    """Return a file whose ops follow one another; their tensors are called t0, t1..."""
    m = tflite.LiteFile()
    t = m.add_input("x", "float32", shape)
    for i, kind in enumerate(kinds):
        t = m.add(kind, [t], name=f"t{i}")
    m.set_outputs([t])
    m.add_signature("serve", {"image": "x"}, {"scores": t})
    return m


def buffer_of(data):
    """Return bytes as metadata of a file are held."""
    tensor = tflite.LiteTensor("notes", "uint8", [len(data)])
    tensor.value = np.frombuffer(data, np.uint8)
    return tensor.buffer


def diamond():
    """Return a file of two branches behind one op, added up, with a weight."""
    m = tflite.LiteFile()
    x = m.add_input("x", "float32", [1, 4])
    stem = m.add("ABS", [x], name="stem")
    w = m.add_constant("w", np.arange(12, dtype=np.float32).reshape(3, 4) / 7)
    left = m.add("FULLY_CONNECTED", [stem, w, None], name="left")
    half = m.add_constant("half", w.value.astype(np.float16))
    whole = m.add("DEQUANTIZE", [half], name="whole")
    right = m.add("FULLY_CONNECTED", [stem, whole, None], name="right")
    m.set_outputs([m.add("ADD", [left, right], name="sum")])
    return m


def counter():
    """Return a file that adds its input to a variable, which a subgraph sets at first.

    The sum is read, doubled, and given.
    """
    m = tflite.LiteFile()
    x = m.add_input("x", "float32", [3])
    setup = m.add_graph("setup")
    named = {"container": "", "shared_name": "total"}
    m.add("CALL_ONCE", [], outputs=(), init_subgraph_index=setup)
    handle = m.add("VAR_HANDLE", [], name="handle", shape=(), dtype="resource", **named)
    old = m.add("READ_VARIABLE", [handle], name="old", shape=[3], dtype="float32")
    new = m.add("ADD", [old, x], name="new")
    m.add("ASSIGN_VARIABLE", [handle, new], outputs=())
    m.set_outputs([m.add("MUL", [new, new], name="squared")])
    there = {"shape": (), "dtype": "resource", "graph": setup}
    handle = m.add("VAR_HANDLE", [], name="handle", **there, **named)
    zeros = m.add_constant("zeros", np.zeros(3, np.float32), graph=setup)
    m.add("ASSIGN_VARIABLE", [handle, zeros], outputs=(), graph=setup)
    return m
