"""The algorithm on numpy arrays, without TensorFlow."""

import gc
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import geutil as ge
from geutil.errors import TapeError
from geutil.gradients.tape import Tape, TapeEntry, imperative_grad, numpy_vspace
from tests.gradients.tape.programs import SIZE, programs, sources
from tests.thorough import thorough

STEP = 1e-6
quick = settings(max_examples=150, deadline=None)


def differences(program, xs, targets, weights):
    """Return the central differences of the weighted sum of targets by the sources."""

    def total(arrays):
        made = program.run(arrays)
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
    xs = sources(seed)
    tape = Tape()
    arrays = program.run(xs, tape)
    ys = [arrays[i % len(arrays)] for i in targets]
    rng = np.random.default_rng(seed)
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


@quick
@given(programs(), st.integers(0, 40), st.integers(0, 40))
def test_when_gradients_are_added_up_makes_no_difference(program, target, source):
    xs = sources()

    def take(**options):
        tape = Tape()
        arrays = program.run(xs, tape)
        y, x = arrays[target % len(arrays)], arrays[source % len(arrays)]
        return imperative_grad(numpy_vspace(), tape, [y], [x, *xs], **options)

    late = take(min_aggregate_bytes=10**9)
    early = take(min_aggregate_count=2, min_aggregate_bytes=0)
    assert [g is None for g in early] == [g is None for g in late]
    for a, b in zip(early, late, strict=True):
        if a is not None:
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


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


def test_a_target_that_another_depends_on_has_its_own_gradient_too(sample):
    (gradient,) = sample.grad([sample.z, sample.y], [sample.x])
    np.testing.assert_allclose(gradient, 3 * sample.x**2 + 2 * sample.x)


def test_a_source_stops_the_walk(sample):
    by_y, by_x = sample.grad([sample.z], [sample.y, sample.x])
    np.testing.assert_allclose(by_y, sample.x)
    np.testing.assert_allclose(by_x, sample.y)


def test_a_target_that_is_a_source_has_the_gradient_that_is_given(sample):
    seed = np.array([4.0, 5.0, 6.0])
    (gradient,) = sample.grad([sample.y], [sample.y], [seed])
    np.testing.assert_array_equal(gradient, seed)


def test_targets_and_sources_may_be_named_twice(sample):
    a, b = sample.grad([sample.z, sample.z], [sample.x, sample.x])
    np.testing.assert_allclose(a, 6 * sample.x**2)
    assert a is b


def test_what_is_not_on_the_tape_has_no_gradient(sample):
    assert sample.grad([sample.z], [np.ones(3)]) == [None]


def test_a_source_that_no_target_depends_on_has_no_gradient(sample):
    assert sample.grad([sample.y], [sample.z]) == [None]


def test_nothing_from_nothing(sample):
    assert sample.grad([sample.z], []) == []
    assert Sample().grad([], [sample.x]) == [None]


def test_the_tape_is_used_up(sample):
    assert len(sample.tape) == 2
    sample.grad([sample.y], [sample.x])
    assert len(sample.tape) == 0
    assert sample.tape.export() == ({}, {})


def test_what_is_exported(sample):
    assert sample.z in sample.tape
    assert sample.x not in sample.tape
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


# -- what is refused -------------------------------------------------------------------


def test_a_given_gradient_of_another_shape(sample):
    with pytest.raises(TapeError, match=r"output gradient 1 has shape \(2,\).*\(3,\)"):
        sample.grad([sample.y, sample.z], [sample.x], [None, np.ones(2)])
    # Found before anything is used up.
    assert len(sample.tape) == 2


def test_a_number_of_given_gradients(sample):
    with pytest.raises(TapeError, match="1 targets and 2 output gradients"):
        sample.grad([sample.y], [sample.x], [None, None])
    assert len(sample.tape) == 2


def test_a_number_of_gradients_of_inputs(sample):
    w = np.sin(sample.x)
    sample.tape.record("wrong", [w], [sample.x], lambda g: [g, g])
    with pytest.raises(
        TapeError, match=r"'wrong' returned 2 gradient\(s\) for 1 input"
    ):
        sample.grad([w], [sample.x])


def test_an_operation_that_is_recorded_twice(sample):
    with pytest.raises(TapeError, match="'square' made is on the tape already"):
        sample.tape.record("square", [sample.y], [sample.x], lambda g: g)
    assert len(sample.tape) == 2


def test_sums_of_one(sample):
    with pytest.raises(TapeError, match="pass 2 or more"):
        sample.grad([sample.y], [sample.x], min_aggregate_count=1)
    with pytest.raises(ge.ArgumentTypeError, match="is a number"):
        sample.grad([sample.y], [sample.x], min_aggregate_count=2.5)


def test_errors_of_the_tape_are_value_errors():
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
    tape, x, y, seen = forked([(2, 5)])
    imperative_grad(numpy_vspace(), tape, [y], [x])
    ((_, first, second),) = seen
    np.testing.assert_array_equal(first, np.zeros((2, 5)))
    np.testing.assert_array_equal(second, np.zeros(3))


def test_the_last_zeros_are_used_again():
    counted = []
    tape, x, y, seen = forked([(3,)] * 5)
    imperative_grad(with_zeros(counted), tape, [y], [x])
    assert counted == [((3,), "float64")]
    assert all(g[1] is seen[0][1] and g[2] is seen[0][1] for g in seen)


def test_zeros_of_another_shape_are_made_anew():
    counted = []
    tape, x, y, _ = forked([(7,), (3,)])
    imperative_grad(with_zeros(counted), tape, [y], [x])
    assert counted == [((3,), "float64"), ((7,), "float64"), ((3,), "float64")]


def test_where_none_is_accepted_no_zeros_are_made():
    counted = []
    tape, x, y, seen = forked([(3,)], "FusedBatchNormV3")
    imperative_grad(with_zeros(counted), tape, [y], [x])
    assert counted == []
    assert seen[0][1:] == (None, None)


def test_what_no_gradient_arrives_at_is_not_called(sample):
    y = sample.x + 1
    z = y * 2
    sample.tape.record("stop", [y], [sample.x], lambda g: pytest.fail("called"))
    sample.tape.record("last", [z], [y], lambda g: None)
    assert sample.grad([z], [sample.x]) == [None]


# -- early sums ------------------------------------------------------------------------


class Counted:
    """The space of numpy arrays that counts the gradients it holds."""

    def __init__(self):
        self.sums = []

    def space(self):
        space = numpy_vspace()

        def aggregate(gradients):
            self.sums.append(len(gradients))
            return space.aggregate_fn(gradients)

        return space._replace(aggregate_fn=aggregate)


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


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_no_more_gradients_wait_than_are_added_up(count):
    counted = Counted()
    tape, x, y = fan(64, 10)
    (gradient,) = imperative_grad(
        counted.space(),
        tape,
        [y],
        [x],
        min_aggregate_count=count,
        min_aggregate_bytes=79,
    )
    np.testing.assert_array_equal(gradient, 2 * sum(range(64)) * np.ones(10))
    assert max(counted.sums) == count
    assert counted.sums.count(count) >= 63 // (count - 1)


@pytest.mark.parametrize(("size", "early"), [(10, False), (11, True)])
def test_sums_are_made_once_more_bytes_wait(size, early):
    counted = Counted()
    tape, x, y = fan(64, size)
    imperative_grad(counted.space(), tape, [y], [x], min_aggregate_bytes=64 * 10 * 8)
    assert (max(counted.sums) < 64) == early


def test_the_default_is_four_gradients_and_128_mib():
    counted = Counted()
    tape, x, y = fan(5, 4 * 2**20)  # 32 MiB each: of four, not more than 128.
    imperative_grad(counted.space(), tape, [y], [x])
    assert max(counted.sums) == 5
    tape, x, y = fan(5, 4 * 2**20 + 1)
    counted.sums.clear()
    imperative_grad(counted.space(), tape, [y], [x])
    assert max(counted.sums) == 4


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


def seconds(make, count):
    tape, arrays = make(count)
    targets = arrays[-1:] if make is chain else arrays[1:]
    # The collector looks through all that lives, here and in other tests.
    gc.collect()
    gc.disable()
    begin = time.process_time()
    (gradient,) = imperative_grad(numpy_vspace(), tape, targets, arrays[:1])
    taken = time.process_time() - begin
    gc.enable()
    assert gradient[0] == (1 if make is chain else count)
    return taken


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=thorough)])
@pytest.mark.parametrize("make", [chain, star])
def test_many_entries_take_linear_time_and_no_recursion(make, count):
    seconds(make, 1_000)
    # In turns: other processes take parts of the caches for a while, from both.
    pairs = [(seconds(make, count // 10), seconds(make, count)) for _ in range(5)]
    assert min(large / small for small, large in pairs) <= 12
