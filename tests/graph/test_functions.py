import pytest
import tensorflow as tf

from geutil.graph import call_graph, functions


@tf.function(autograph=False)
def inner(x):
    return x * 2.0


@tf.function(autograph=False)
def inner_of_branch(x):
    return x + 5.0


@tf.function(autograph=False)
def unused(x):
    return x - 1.0


@pytest.fixture
def graph(control_flow_v2):
    """A While whose body calls a function, a Case, and a function nobody wants."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [], name="x")
        i = tf.compat.v1.placeholder(tf.int32, [], name="i")
        tf.while_loop(lambda a: a < 9.0, inner, [x], name="loop")
        branches = [lambda: inner_of_branch(x), lambda: x, lambda: inner(x)]
        tf.switch_case(i, branches, name="case")
        unused(x)
    return graph


def the_op(graph, *types):
    (op,) = [op for op in graph.get_operations() if op.type in types]
    return op


def attribute_names(op, *attributes):
    """Return what the op's definition says, read without geutil."""
    found = []
    for attribute in attributes:
        value = op.node_def.attr[attribute]
        found += [f.name for f in value.list.func] or [value.func.name]
    return sorted(found)


def reachable(graph, names):
    """Return the names of the functions reachable from some, by another road."""
    library = {f.signature.name: f for f in graph.as_graph_def().library.function}
    found, stack = set(), list(names)
    while stack:
        name = stack.pop()
        if name not in found:
            found.add(name)
            text = str(library[name].node_def)
            stack += [other for other in library if f'"{other}"' in text]
    return found


def held(library):
    return [function.signature.name for function in library.function]


WHILE = ("While", "StatelessWhile")
CASE = ("Case", "StatelessCase")


def test_functions_of_attributes():
    node = tf.compat.v1.NodeDef()
    node.attr["f"].func.name = "one"
    node.attr["none"].func.name = ""
    node.attr["text"].s = b"no_function"
    for name in ("two", "", "two"):
        node.attr["list"].list.func.add(name=name)
    found = call_graph.functions_of_attributes(node.attr)
    assert sorted(found) == ["one", "two", "two"]


def test_functions_that_attributes_of_functions_name():
    node = tf.compat.v1.NodeDef(op="f")
    node.attr["one"].func.name = "outer"
    node.attr["one"].func.attr["in"].list.func.add(name="inner")
    found = call_graph.names_of_functions(node)
    assert list(found) == ["f", "outer", "inner"]
    call_graph.rename_called(node, {"f": "g", "inner": "new"})
    assert list(call_graph.names_of_functions(node)) == ["g", "outer", "new"]


def test_rename_functions():
    node = tf.compat.v1.NodeDef()
    node.attr["f"].func.name = "one"
    for name in ("two", "three"):
        node.attr["list"].list.func.add(name=name)
    call_graph.rename_functions(node, {"one": "1", "two": "2"})
    assert node.attr["f"].func.name == "1"
    assert [f.name for f in node.attr["list"].list.func] == ["2", "three"]


@pytest.mark.parametrize("types", [WHILE, CASE], ids=str)
def test_library_holds_nested_functions_and_no_other(graph, types):
    called, renamed = functions.calls_of([the_op(graph, *types)])
    library, fresh = functions.library_for_copies(graph, called, renamed)
    needed = reachable(graph, renamed)
    assert len(needed) > len(renamed)  # a PartitionedCall in a body
    # The bodies under their new names only, what they call under its own.
    expected = [*(needed - set(renamed)), *fresh.values()]
    assert sorted(held(library)) == sorted(expected)
    assert sorted(fresh) == sorted(renamed)
    whole = {f.signature.name for f in graph.as_graph_def().library.function}
    assert needed < whole
    assert not set(fresh.values()) & whole


@pytest.fixture
def nested(control_flow_v2):
    """A loop in a loop."""

    def outer(a):
        (b,) = tf.while_loop(lambda b: b < 5.0, lambda b: [b + 1.0], [a])
        return [inner(b)]

    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [], name="x")
        tf.while_loop(lambda a: a < 40.0, outer, [x], name="loop")
    return graph


def test_bodies_of_loops_in_loops_are_renamed_too(nested):
    called, renamed = functions.calls_of([the_op(nested, *WHILE)])
    assert len(renamed) == 2
    library, fresh = functions.library_for_copies(nested, called, renamed)
    assert len(fresh) == 4
    names = set(held(library))
    for function in library.function:
        for node in function.node_def:
            if node.op not in WHILE:
                continue
            bodies = {node.attr[a].func.name for a in ("cond", "body")}
            assert bodies <= names
            copied = function.signature.name in fresh.values()
            assert bodies <= (set(fresh.values()) if copied else set(fresh))
    # What is merely called is shared.
    assert not any("inner" in name for name in fresh)


@pytest.mark.parametrize("called", [[], ["no_such_function"], ["Placeholder"]], ids=str)
def test_library_of_nothing(graph, called):
    library, fresh = functions.library_for_copies(graph, called, [])
    assert held(library) == []
    assert fresh == {}


def test_functions_that_are_merely_called_keep_their_names():
    @tf.function(autograph=False)
    def outer(x):
        return inner(inner_of_branch(x))

    graph = outer.get_concrete_function(tf.TensorSpec([], tf.float32)).graph
    calls = [op for op in graph.get_operations() if "PartitionedCall" in op.type]
    assert len(calls) == 2
    for op in calls:
        called, renamed = functions.calls_of([op])
        assert renamed == []
        library, fresh = functions.library_for_copies(graph, called, renamed)
        assert held(library) == attribute_names(op, "f")
        assert fresh == {}
