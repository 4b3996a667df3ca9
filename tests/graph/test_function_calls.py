"""Functions of a GraphDef get names that no different function of the process has."""

import itertools

import pytest
import tensorflow as tf

from geutil.graph import function_calls
from geutil.graph.function_calls import (
    readable_name,
    unused_name,
    with_unique_functions,
)

_numbers = itertools.count()
SPEC = tf.TensorSpec([2])


def named(prefix="registry_test"):
    return f"{prefix}_{next(_numbers)}"


def library_of(function, names):
    """Return a GraphDef that calls a function, with functions renamed.

    No function of these names is known to the process.
    """
    concrete = tf.function(function, autograph=False).get_concrete_function(SPEC)
    with tf.Graph().as_default() as graph:
        tf.identity(concrete(tf.compat.v1.placeholder(tf.float32, [2], "x")), "y")
    graph_def = graph.as_graph_def()
    new = {}
    for definition in graph_def.library.function:
        part = next(part for part in names if part in definition.signature.name)
        new[definition.signature.name] = names[part]
        definition.signature.name = names[part]
    bodies = [f.node_def for f in graph_def.library.function]
    for node in itertools.chain(graph_def.node, *bodies):
        if "f" in node.attr:
            node.attr["f"].func.name = new[node.attr["f"].func.name]
    return graph_def


def names_in(graph_def):
    return [f.signature.name for f in graph_def.library.function]


def test_functions_that_nothing_holds_are_forgotten(monkeypatch):
    gone, held = (library_of(tf.sin, {"sin": named()}) for _ in range(2))
    other = library_of(tf.cos, {"cos": named()})
    with_unique_functions(gone)
    with_unique_functions(held)
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(held)
    names = {*names_in(gone), *names_in(held)}
    assert names <= function_calls._known.keys()
    monkeypatch.setattr(function_calls, "_SLACK", -len(function_calls._known))
    with_unique_functions(other)
    assert names & function_calls._known.keys() == set(names_in(held))
    assert graph._is_function(*names_in(held))


def test_a_new_name_and_the_same_definition_stay():
    name = named()
    graph_def = library_of(tf.sin, {"sin": name})
    before = type(graph_def)()
    before.CopyFrom(graph_def)
    for again in (graph_def, library_of(tf.sin, {"sin": name}), graph_def):
        assert with_unique_functions(again) == {}
        assert names_in(again) == [name]
    assert graph_def.library == before.library


def test_another_definition_gets_a_name_of_its_own_once():
    name = named()
    with_unique_functions(library_of(tf.sin, {"sin": name}))
    renamed = []
    for _ in range(2):
        graph_def = library_of(tf.cos, {"cos": name})
        mapping = with_unique_functions(graph_def)
        assert list(mapping) == [name]
        (new,) = names_in(graph_def)
        assert mapping[name] == new != name
        assert readable_name(new) == name
        assert [n.attr["f"].func.name for n in graph_def.node if "f" in n.attr] == [new]
        renamed.append(new)
    assert renamed[0] == renamed[1]


def test_callers_of_a_renamed_function_are_renamed():
    def nest(inner_function):
        inner = tf.function(inner_function, autograph=False)
        inner._name = "inner"

        def outer(x):
            return inner(x) + 1.0

        return outer

    names = {"inner": named("callee"), "outer": named("caller")}
    assert with_unique_functions(library_of(nest(tf.sin), names)) == {}
    graph_def = library_of(nest(tf.cos), names)
    mapping = with_unique_functions(graph_def)
    assert set(mapping) == set(names.values())
    called = [
        n.attr["f"].func.name
        for f in graph_def.library.function
        for n in f.node_def
        if "f" in n.attr
    ]
    assert called == [mapping[names["inner"]]]
    # Callees come first.
    assert names_in(graph_def) == [mapping[names["inner"]], mapping[names["outer"]]]


def test_a_traced_function_of_the_process_counts():
    concrete = tf.function(tf.sin).get_concrete_function(SPEC)
    name = concrete.name
    name = name.decode() if isinstance(name, bytes) else name
    graph_def = library_of(tf.cos, {"cos": name})
    assert list(with_unique_functions(graph_def)) == [name]
    assert name not in names_in(graph_def)


def test_functions_that_nothing_calls_are_left_out():
    graph_def = library_of(tf.sin, {"sin": named()})
    extra = library_of(tf.cos, {"cos": named()})
    graph_def.library.function.extend(extra.library.function)
    with_unique_functions(graph_def)
    assert len(graph_def.library.function) == 1


def test_calls_forget_gradients_of_traces_only():
    graph_def = library_of(tf.sin, {"sin": named()})
    (call,) = (n for n in graph_def.node if "f" in n.attr)
    call.attr["_gradient_op_type"].s = b"PartitionedCall-12"
    with_unique_functions(graph_def)
    assert "_gradient_op_type" not in call.attr
    call.attr["_gradient_op_type"].s = b"Mine"
    with_unique_functions(graph_def)
    assert call.attr["_gradient_op_type"].s == b"Mine"


@pytest.mark.parametrize("name", ["f", "while_body_3", "__inference_f_12", "a__geutil"])
def test_readable_names(name):
    first, second = unused_name(name), unused_name(name)
    assert first != second
    assert readable_name(first) == readable_name(second) == readable_name(name) == name
    assert readable_name(unused_name(first)) == name
