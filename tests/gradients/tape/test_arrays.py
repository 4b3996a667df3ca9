"""The algorithm on numpy arrays, without TensorFlow."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import geutil as ge
from geutil.errors import TapeError
from geutil.gradients.tape import Tape, TapeEntry, imperative_grad, numpy_vspace
from tests.call_counts import count_calls
from tests.thorough import examples, length

SIZE, COUNT = 4, 2
"""How many elements an array has, and how many sources there are."""


def product(x, y):
    slope = 1 - np.tanh(x * y) ** 2
    return [np.tanh(x * y)], lambda g: [g * y * slope, g * x * slope]


def halves(x):
    half = SIZE // 2

    def back(first, second):
        return np.concatenate([g[:half] + g[half:] for g in (first, second)])

    return [np.resize(x[:half], SIZE), np.resize(x[half:], SIZE)], back


# How many arrays each reads; it returns what it makes, and its backward function.
OPERATIONS = {
    "sin": (1, lambda x: ([np.sin(x)], lambda g: [g * np.cos(x)])),
    "product": (2, product),
    "difference": (2, lambda x, y: ([x - y], lambda g: (g, -g))),
    "halves": (1, halves),
}


def run(program, sources, tape=None):
    """Return all arrays of a program: the sources, and what the operations made."""
    arrays = list(sources)
    for kind, reads in program:
        inputs = [arrays[i % len(arrays)] for i in reads]
        outputs, backward = OPERATIONS[kind][1](*inputs)
        if tape is not None:
            tape.record(kind, outputs, inputs, backward)
        arrays += outputs
    return arrays


@st.composite
def programs(draw):
    """Draw operations, each with the positions of what it reads."""
    operations = []
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(sorted(OPERATIONS)))
        reads = [draw(st.integers(0, 30)) for _ in range(OPERATIONS[kind][0])]
        operations.append((kind, reads))
    return operations


STEP = 1e-6
quick = examples(150)


def differences(program, xs, targets, weights):
    """Return the central differences of the weighted sum of targets by the sources."""

    def total(arrays):
        made = run(program, arrays)
        return sum(
            float(np.sum(made[i % len(made)] * w))
            for i, w in zip(targets, weights, strict=True)
        )

    found = []
    for k in range(len(xs)):
        slope = np.zeros(SIZE)
        for i in range(SIZE):
            ends = []
            for sign in (1, -1):
                moved = [a.copy() for a in xs]
                moved[k][i] += sign * STEP
                ends.append(total(moved))
            slope[i] = (ends[0] - ends[1]) / (2 * STEP)
        found.append(slope)
    return found


@quick
@given(
    programs(),
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
    st.booleans(),
    st.integers(2, 5),
    st.integers(0, 1000),
)
def test_random_programs(program, targets, weighted, count, seed):
    rng, tape = np.random.default_rng(seed), Tape()
    xs = list(rng.uniform(-1, 1, (COUNT, SIZE)))
    arrays = run(program, xs, tape)
    ys = [arrays[i % len(arrays)] for i in targets]
    weights = [rng.normal(size=SIZE) if weighted else np.ones(SIZE) for _ in ys]
    actual = imperative_grad(
        numpy_vspace(),
        tape,
        ys,
        xs,
        weights if weighted else None,
        min_aggregate_count=count,
        min_aggregate_bytes=8 * SIZE,
    )
    expected = differences(program, xs, targets, weights)
    for a, e in zip(actual, expected, strict=True):
        if a is None:
            np.testing.assert_array_equal(e, 0)
        else:
            np.testing.assert_allclose(a, e, rtol=1e-6, atol=1e-7)


class Sample:
    """`x` squared is `y`, and `y` times `x` is `z`."""

    def __init__(self):
        self.tape, self.x = Tape(), np.array([1.0, 2.0, 3.0])
        x = self.x
        self.y = y = x * x
        self.z = y * x
        self.tape.record("square", [y], [x], lambda g: 2 * x * g)
        self.tape.record("product", [self.z], [y, x], lambda g: [g * x, g * y])

    def grad(self, target, source, *given, **options):
        return imperative_grad(
            numpy_vspace(), self.tape, target, source, *given, **options
        )


@pytest.fixture
def sample():
    return Sample()


def test_targets_and_sources():
    """Each is a tape of its own: it is used up."""
    seed, one = np.array([4.0, 5.0, 6.0]), Sample()
    x, y = one.x, one.y
    cases = {
        # A target that another depends on has its own gradient, too.
        "two targets": (("z", "y"), ("x",), None, [3 * x**2 + 2 * x]),
        "a source stops the walk": (("z",), ("y", "x"), None, [x, y]),
        "a target that is a source": (("y",), ("y",), [seed], [seed]),
        "named twice": (("z", "z"), ("x", "x"), None, 2 * [6 * x**2]),
        "not on the tape": (("z",), ("other",), None, [None]),
        "no way to it": (("y",), ("z",), None, [None]),
        "no sources": (("z",), (), None, []),
        "no targets": ((), ("x",), None, [None]),
    }
    wrong = {}
    for name, (targets, xs, seeds, expected) in cases.items():
        one = Sample()
        one.other = np.ones(3)
        ends = [[getattr(one, n) for n in names] for names in (targets, xs)]
        found = one.grad(*ends, seeds)
        same = [np.array_equal(f, e) for f, e in zip(found, expected, strict=True)]
        if not all(same) or (name == "named twice" and found[0] is not found[1]):
            wrong[name] = found
    assert wrong == {}


def test_what_is_exported_and_that_the_tape_is_used_up(sample):
    assert sample.z in sample.tape
    assert sample.x not in sample.tape
    assert len(sample.tape) == 2
    number = numpy_vspace().tensor_id
    makers, entries = sample.tape.export()
    assert makers == {number(sample.y): 0, number(sample.z): 1}
    entry = entries[1]
    assert isinstance(entry, TapeEntry)
    assert entry.op_type == "product"
    assert entry.input_ids == (number(sample.y), number(sample.x))
    assert entry.output_ids == (number(sample.z),)
    assert entry.output_shape_and_dtype == (((3,), np.dtype(float)),)
    assert sample.z not in sample.tape
    other = Sample()
    other.grad([other.y], [other.x])
    assert len(other.tape) == 0
    assert other.tape.export() == ({}, {})


# -- what is refused -------------------------------------------------------------------


def test_refusals(sample):
    x, y, z = sample.x, sample.y, sample.z
    given = r"output gradient 1 has shape \(2,\).*\(3,\)"
    refused = [
        (given, lambda: sample.grad([y, z], [x], [None, np.ones(2)])),
        ("1 targets and 2 output grad", lambda: sample.grad([y], [x], [None, None])),
        ("pass 2 or more", lambda: sample.grad([y], [x], min_aggregate_count=1)),
        (
            "'square' made is on the tape already",
            lambda: sample.tape.record("square", [y], [x], lambda g: g),
        ),
    ]
    for message, call in refused:
        with pytest.raises(TapeError, match=message):
            call()
        # Found before anything is used up.
        assert len(sample.tape) == 2
    with pytest.raises(ge.ArgumentTypeError, match="is a number"):
        sample.grad([y], [x], min_aggregate_count=2.5)
    w = np.sin(x)
    sample.tape.record("wrong", [w], [x], lambda g: [g, g])
    wanted = r"'wrong' returned 2 gradient\(s\) for 1 input"
    with pytest.raises(TapeError, match=wanted):
        sample.grad([w], [x])
    assert issubclass(TapeError, ge.GeutilError)
    assert issubclass(TapeError, ValueError)


# -- zeros -----------------------------------------------------------------------------


def with_zeros(counted):
    space = numpy_vspace()

    def zeros(shape, dtype):
        counted.append((tuple(shape), np.dtype(dtype).name))
        return np.zeros(shape, dtype)

    return space._replace(zeros=zeros)


def forked(shapes, op_type="fork"):
    """Return what makes arrays of shapes of one, a chain of such forks, and a log."""
    tape, x, seen = Tape(), np.ones(2), []
    h = x
    for shape in shapes:
        made = [h * 2, np.ones(shape), np.ones(3)]

        def back(*gradients):
            seen.append(gradients)
            return gradients[0] * 2

        tape.record(op_type, made, [h], back)
        h = made[0]
    return tape, x, h, seen


def test_missing_gradients_are_zeros_of_the_shape_and_dtype():
    """The last ones are used again; where None is accepted none are made."""
    tape, x, y, seen = forked([(2, 5)])
    imperative_grad(numpy_vspace(), tape, [y], [x])
    ((_, first, second),) = seen
    np.testing.assert_array_equal(first, np.zeros((2, 5)))
    np.testing.assert_array_equal(second, np.zeros(3))
    wide, narrow = ((7,), "float64"), ((3,), "float64")
    wrong = {}
    for shapes, op_type, made in (
        ([(3,)] * 5, "fork", [narrow]),
        ([(7,), (3,)], "fork", [narrow, wide, narrow]),
        ([(3,)], "FusedBatchNormV3", []),
    ):
        counted = []
        tape, x, y, seen = forked(shapes, op_type)
        imperative_grad(with_zeros(counted), tape, [y], [x])
        if len(made) == 1:
            assert all(g[1] is seen[0][1] and g[2] is seen[0][1] for g in seen)
        if not made:
            assert seen[0][1:] == (None, None)
        if counted != made:
            wrong[op_type, len(shapes)] = counted
    assert wrong == {}


def test_what_no_gradient_arrives_at_is_not_called(sample):
    y = sample.x + 1
    z = y * 2
    sample.tape.record("stop", [y], [sample.x], lambda g: pytest.fail("called"))
    sample.tape.record("last", [z], [y], lambda g: None)
    assert sample.grad([z], [sample.x]) == [None]


# -- early sums ------------------------------------------------------------------------


def fan(branches, size):
    """Return a tape of branches off one array, joined by one sum."""
    tape, x = Tape(), np.ones(size)
    hub = x * 2
    tape.record("hub", [hub], [x], lambda g: 2 * g)
    ends = [hub * i for i in range(branches)]
    for i, end in enumerate(ends):
        tape.record("branch", [end], [hub], lambda g, i=i: i * g)
    y = np.add.reduce(ends)
    tape.record("join", [y], ends, lambda g: [g] * branches)
    return tape, x, y


def sums_of_fan(branches, size, **options):
    """Return how many gradients each sum of a fan had."""
    sums, space = [], numpy_vspace()

    def aggregate(gradients):
        sums.append(len(gradients))
        return space.aggregate_fn(gradients)

    tape, x, y = fan(branches, size)
    counted = space._replace(aggregate_fn=aggregate)
    (gradient,) = imperative_grad(counted, tape, [y], [x], **options)
    np.testing.assert_array_equal(gradient, 2 * sum(range(branches)) * np.ones(size))
    return sums


def test_sums_are_made_once_more_bytes_wait():
    for size, early in ((10, False), (11, True)):
        sums = sums_of_fan(64, size, min_aggregate_bytes=64 * 10 * 8)
        assert (max(sums) < 64) == early
    # By default four gradients and 128 MiB: of 32 MiB each, not more than that.
    assert max(sums_of_fan(5, 4 * 2**20)) == 5
    assert max(sums_of_fan(5, 4 * 2**20 + 1)) == 4


# -- cost ------------------------------------------------------------------------------


def chain(count):
    tape, x = Tape(), np.ones(1)
    arrays = [x]
    for _ in range(count):
        arrays.append(arrays[-1] + 0.0)
        tape.record("step", [arrays[-1]], [arrays[-2]], lambda g: g)
    return tape, arrays


def star(count):
    tape, x = Tape(), np.ones(1)
    arrays = [x, *(x * 1.0 for _ in range(count))]
    for end in arrays[1:]:
        tape.record("branch", [end], [x], lambda g: g)
    return tape, arrays


@pytest.mark.parametrize("make", [chain, star])
def test_many_entries_take_linear_work_and_no_recursion(make):
    def calls(count):
        tape, arrays = make(count)
        targets = arrays[-1:] if make is chain else arrays[1:]
        work, (gradient,) = count_calls(
            lambda: imperative_grad(numpy_vspace(), tape, targets, arrays[:1])
        )
        assert gradient[0] == (1 if make is chain else count)
        return work

    count = length(100_000)
    first, second, third = (calls(part * count // 4) for part in (1, 2, 3))
    assert third - second == pytest.approx(second - first, rel=0.001)
    assert second - first > 0.95 * first
