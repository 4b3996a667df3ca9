"""From what shall be measured to a job: what is taken along and what is refused.

No process is started here.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework.function import Defun

from geutil.errors import ArgumentTypeError, MeasurementError
from geutil.memory import measure
from geutil.memory.measurement import GraphJob, MeasureOptions, job_of
from geutil.memory.measurement.child import FunctionStep, SessionStep, initial_values
from tests.memory.refusals import refused
from tests.settings import evaluate

OPTIONS = MeasureOptions(1, 1, None, True, None, False, None)


def job(what, args=(), kwargs=None, session=None, jit_compile=False):
    return job_of(what, args, kwargs or {}, session, jit_compile)[0]


def values_of(a_job: GraphJob):
    return dict(sorted(initial_values(a_job).items()))


@pytest.fixture
def graph():
    """x * v + w, where w has no variable object."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        v = tf.Variable(tf.range(1.0, 3.0) * 2.0, name="v")
        tf.Variable([5.0], name="not_read")
        handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[2], shared_name="w")
        w = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
        tf.add(tf.multiply(x, v, name="product"), w, name="y")
        tf.py_function(lambda: 1.0, [], tf.float32, name="python")
        return graph


def test_variables_start_with_their_initial_values(graph):
    values = values_of(job((graph, "y:0", {"x:0": [1, 1]})))
    assert {key: value.tolist() for key, value in values.items()} == {
        "v": [2.0, 4.0],
        "w": [0.0, 0.0],
    }


def test_variables_have_the_values_of_a_session(graph):
    with tf.compat.v1.Session(graph=graph) as session:
        (variable, _) = graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
        variable.load([7.0, 8.0], session)
        with_session = job((graph, "y:0", {"x:0": [1, 1]}), session=session)
    assert values_of(with_session)["v"].tolist() == [7.0, 8.0]


def test_reference_variables():
    with tf.Graph().as_default() as graph:
        v = tf.compat.v1.Variable([1.0, 2.0], use_resource=False, name="v")
        doubled = tf.compat.v1.assign(v, v * 2.0)
    a_job = job((graph, doubled, None))
    step = SessionStep(a_job, OPTIONS, initial_values(a_job))
    step()
    step()
    nodes = {node.name for part in step.trace().partition_graphs for node in part.node}
    assert "v" in nodes


def test_only_what_the_fetches_need_is_taken_along(graph):
    version = graph.version
    a_job = job((graph, graph.get_operation_by_name("product"), {"x:0": [1, 1]}))
    assert "y" not in a_job.op_types
    assert "not_read" not in a_job.op_types
    assert [spec.op for spec in a_job.variables] == ["v"]
    assert a_job.fetches == ("product",)
    assert graph.version == version


def test_a_func_graph_brings_its_captures():
    weights = tf.Variable([1.0, 2.0])
    constant = tf.constant([3.0, 4.0])

    @tf.function
    def f(x):
        return x * weights + constant

    func_graph = f.get_concrete_function(tf.TensorSpec([2])).graph
    a_job = job((func_graph, func_graph.outputs, [(func_graph.inputs[0], [1, 1])]))
    (value,) = values_of(a_job).values()
    assert value.tolist() == [1.0, 2.0]
    fed = sorted(value.tolist() for value in a_job.feeds.values())
    assert fed == [[1.0, 1.0], [3.0, 4.0]]
    SessionStep(a_job, OPTIONS, values_of(a_job))()


class Doubler(tf.Module):
    def __init__(self):
        super().__init__()
        self.factor = tf.Variable(2.0)

    @tf.function
    def double(self, x, *, plus=1.0):
        return self.factor * x["value"] + plus


def test_arguments_are_those_of_the_function():
    module = Doubler()
    a_job = job(module.double, [{"value": tf.constant([3.0])}], {"plus": 5.0})
    assert [value.tolist() for value in a_job.feeds.values()] == [[3.0]]
    assert a_job.as_function
    defaults = job(module.double, [{"value": tf.constant([3.0])}])
    assert len(defaults.feeds) == 1
    FunctionStep(a_job, OPTIONS, values_of(a_job))()


def _sum_of_all(first, *others, factor=1.0, **more):
    return first + sum(others) * factor + sum(more.values())


def test_any_number_of_arguments():
    for args, kwargs, expected in (
        ([1.0, 2.0, 3.0], {}, 6.0),
        ([1.0], {}, 1.0),
        ([1.0, 2.0], {"factor": 3.0}, 7.0),
        ([1.0, 2.0], {"factor": 3.0, "z": 4.0, "a": 5.0}, 16.0),
    ):
        args = [tf.constant(value) for value in args]
        kwargs = {name: tf.constant(value) for name, value in kwargs.items()}
        given = sorted(t.numpy() for t in (*args, *kwargs.values()))
        f = tf.function(_sum_of_all)
        assert f(*args, **kwargs).numpy() == expected
        for what in (f, f.get_concrete_function(*args, **kwargs)):
            a_job = job(what, args, kwargs)
            assert sorted(a_job.feeds.values()) == given
            FunctionStep(a_job, OPTIONS, values_of(a_job))()


def test_a_variable_as_argument():
    @tf.function
    def f(variable):
        return variable * 2.0

    a_job = job(f, [tf.Variable([4.0])])
    (value,) = values_of(a_job).values()
    assert value.tolist() == [4.0]


def test_a_function_that_xla_compiles_is_known():
    compiled = tf.function(lambda x: x + 1.0, jit_compile=True)
    plain = tf.function(lambda x: x + 1.0)
    assert job_of(compiled, [1.0], {}, None, False)[1]
    assert not job_of(plain, [1.0], {}, None, False)[1]


def test_virtual_cpus_are_counted():
    with tf.Graph().as_default() as graph, tf.device("/device:CPU:1"):
        y = tf.random.uniform([2])
    assert job((graph, y, None)).cpus == 2


def test_functions_that_are_not_called_stay_behind():
    def branch():
        return tf.cond(tf.random.uniform([]) > 0.5, lambda: 1.0, lambda: 2.0)

    with tf.Graph().as_default() as graph:
        wanted, _ = branch(), branch()
        one = Defun(tf.float32, tf.float32, func_name="one")(lambda x, dy: dy)
        more = Defun(tf.float32, func_name="more", grad_func=one)(lambda x: x + 1.0)
        called = more(wanted)
    whole = len(graph.as_graph_def().library.function)
    for fetch, gradient_count in ((wanted, 0), (called, 1)):
        graph_def = job((graph, fetch, None)).graph_def
        library = tf.compat.v1.GraphDef.FromString(graph_def).library
        assert 0 < len(library.function) < whole
        assert len(library.gradient) == gradient_count


def test_the_gradient_of_a_function_goes_along():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [], name="x")
        five = Defun(tf.float32, tf.float32, func_name="five")(lambda x, dy: 5.0 * dy)
        square = Defun(tf.float32, func_name="square", grad_func=five)(lambda x: x * x)
        (slope,) = tf.gradients(square(x), x)
    graph_def = job((graph, slope, {x: 3.0})).graph_def
    with tf.Graph().as_default() as part:
        tf.import_graph_def(tf.compat.v1.GraphDef.FromString(graph_def), name="")
    assert evaluate(part, [slope.name], {"x:0": 3.0}) == [5.0]


REFUSED = [
    ("", {"x:0": [1, 1]}, ArgumentTypeError, "'' is no op or tensor"),
    ([], None, ArgumentTypeError, "nothing to fetch"),
    ([None], None, ArgumentTypeError, "leave out unconnected gradients"),
    ("z:0", None, ArgumentTypeError, "'z:0' is no op or tensor"),
    ("y:0", None, MeasurementError, r"\['x'\]; feed them"),
    ("y:0", {"x": [1, 1]}, ArgumentTypeError, "feed a tensor.*'x:0'"),
    ("y:0", {"x:0": [1]}, MeasurementError, "does not fit 'x:0'"),
    ("y:0", ["x:0"], ArgumentTypeError, "feeds are a mapping"),
    ("python:0", None, MeasurementError, "'python'.*calls Python"),
]


def test_refused_graphs(graph):
    version = graph.version
    for fetches, feeds, error, message in REFUSED:
        with refused(error, message):
            measure((graph, fetches, feeds))
    with tf.Graph().as_default():
        other = tf.zeros([], name="other")
    with pytest.raises(ArgumentTypeError, match="'other:0' belongs to another graph"):
        measure((graph, other, None))
    assert graph.version == version


def test_values_that_only_this_process_has_are_refused():
    with tf.Graph().as_default() as graph:
        handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=None, shared_name="w")
        y = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
    with pytest.raises(MeasurementError, match=r"'VarHandleOp'.*no initial value"):
        measure((graph, y, None))
    keys = tf.lookup.KeyValueTensorInitializer([1, 2], [3, 4])
    table = tf.lookup.StaticHashTable(keys, 0)
    with pytest.raises(MeasurementError, match="resources that are no variables"):
        measure(tf.function(table.lookup), [tf.constant([1])])

    @tf.function(autograph=False)
    def outer(x):
        inner = tf.function(lambda: x + 1.0).get_concrete_function()
        with pytest.raises(MeasurementError, match="of another graph"):
            measure((inner.graph, inner.graph.outputs, None))
        return x

    outer(tf.constant(1.0))


def importable():
    return 1


def test_callables_that_another_process_cannot_import():
    def local():
        return importable()

    for function in (lambda: 1, local, functools.partial(local)):
        with pytest.raises(MeasurementError, match="put it at the top level of a mod"):
            measure(function)


def test_a_callable_of_the_main_script(monkeypatch):
    import __main__

    monkeypatch.setattr(__main__, "importable", importable, raising=False)
    monkeypatch.setattr(importable, "__module__", "__main__")
    monkeypatch.setattr(importable, "__qualname__", "importable")
    with pytest.raises(MeasurementError, match=r"'importable'.*in the main script"):
        measure(functools.partial(importable))


def test_wrong_arguments():
    function = tf.function(lambda x: x).get_concrete_function(tf.TensorSpec([2]))
    graph = tf.Graph()
    for args, kwargs, message in (
        ((3,), {}, "cannot measure a builtins.int; pass"),
        (((graph, "y"),), {}, r"expected \(graph, fetches, feeds\)"),
        ((("g", "y", None),), {}, r"got a tuple of \(builtins.str"),
        (((graph, "y", None), [1]), {}, "args and kwargs go with a callable"),
        ((importable,), {"session": 1}, "session goes with"),
        ((importable,), {"jit_compile": True}, "jit_compile goes with"),
        ((function, [np.ones(2, np.float32), 1]), {}, "do not fit the function"),
    ):
        with refused(ArgumentTypeError, message):
            measure(*args, **kwargs)
    with pytest.raises(MeasurementError, match="steps=0: at least one"):
        measure(importable, steps=0)
