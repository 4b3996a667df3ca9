"""The harness that measures training steps, and the networks it measures."""

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import chunks
from benchmarks.gradients.cases import CASES, DEFAULT, Case
from benchmarks.gradients.child import ChildError, in_a_child
from benchmarks.gradients.peaks import Peak
from benchmarks.gradients.rows import Outcome, StepRow
from benchmarks.gradients.ways import RATE, WAYS, Way, traced
from benchmarks.networks import NETWORKS
from tests.gradients.networks import SMALL, small_step, trace_forward
from tests.thorough import chosen, thorough

CASE = Case("chain", "", DEFAULT, 0.5, 1.4)
MB = 10**6


def row(ours, plain):
    return StepRow(CASE, {"plain": plain, "memory": ours})


def outcome(allocator, steady, seconds):
    return Outcome(Peak(allocator, 2 * steady, steady), seconds)


def test_the_ratios_are_to_plain():
    found = row(outcome(30 * MB, 40 * MB, 1.2), outcome(100 * MB, 50 * MB, 1.0))
    assert found.peak_ratio("memory") == pytest.approx(0.3)
    assert found.resident_ratio("memory") == pytest.approx(0.8)
    assert found.time_ratio("memory") == pytest.approx(1.2)
    assert found.ok
    # Without statistics the resident memory of a later step counts.
    found = row(outcome(None, 40 * MB, 1.2), outcome(None, 100 * MB, 1.0))
    assert found.peak_ratio("memory") == pytest.approx(0.4)


def test_a_row_misses_its_limits_or_has_no_baseline():
    for ours in (
        outcome(51 * MB, MB, 1.2),
        outcome(50 * MB, MB, 1.5),
        Outcome(Peak(MB, MB, MB)),
        Outcome(raised=("ValueError: no",)),
    ):
        assert not row(ours, outcome(100 * MB, MB, 1.0)).ok, ours
    assert not row(outcome(MB, MB, 1.0), Outcome()).ok


def test_all_names_exist():
    assert {case.network for case in CASES} == set(NETWORKS)
    assert {peer for case in CASES for peer in case.peers} < set(WAYS)


@pytest.mark.parametrize("way", ["plain", "memory", "recompute_grad"])
def test_each_way_makes_the_same_step(way):
    step = WAYS[way].make(lambda **wrap: NETWORKS["chain"](**SMALL["chain"], **wrap))
    with tf.GradientTape() as tape:
        loss = step.loss(*step.tensors())
    expected = tape.gradient(loss, step.variables)
    before = [variable.numpy() for variable in step.variables]
    traced(WAYS[way], step, DEFAULT)(*step.tensors())
    for old, variable, reference in zip(before, step.variables, expected, strict=True):
        # The reference is moved as the step moves the variable, rounding included.
        moved = old - np.float32(RATE) * reference.numpy()
        np.testing.assert_allclose(variable, moved, rtol=0, atol=1e-9)


def test_a_way_that_forgets_a_variable_is_no_way():
    way = Way(gradients=lambda loss, xs: [None, *tf.gradients(loss, xs[1:])])
    with pytest.raises(ValueError, match="1 of 12 gradients are None"):
        traced(way, small_step("chain"), DEFAULT)


@thorough
def test_what_a_child_raises_is_told():
    with pytest.raises(ChildError, match=r"^KeyError: 'no such way'$"):
        in_a_child("peak", "chain", DEFAULT, "no such way")


def largest(gradient):
    return tf.reduce_max(tf.abs(tf.convert_to_tensor(gradient)))


def test_every_network_has_a_small_size():
    assert list(SMALL) == list(NETWORKS)


@pytest.mark.parametrize("name", chosen(SMALL, "chain", "encoder"))
def test_gradients_are_finite_and_the_state_is_what_a_step_moves(name):
    step = small_step(name)

    @tf.function(autograph=False)
    def sizes(*batch):
        return [largest(g) for g in tf.gradients(step.loss(*batch), step.variables)]

    before = [v.numpy() for v in (*step.state, *step.variables)]
    values = np.array([size.numpy() for size in sizes(*step.tensors())])
    assert len(values) == len(step.variables) > 0
    assert np.isfinite(values).all()
    assert values.max() > 0
    after = [v.numpy() for v in (*step.state, *step.variables)]
    moved = [not np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
    count = len(step.state)
    # A `Normalization` of EfficientNet's is as it was built.
    still = 3 if name == "EfficientNetB0" else 0
    assert moved == [False] * still + [True] * (count - still) + [False] * len(values)


def test_blocks_can_be_wrapped():
    wrapped = {"chain": [], "U-Net": [], "encoder": []}

    def wrapping(blocks):
        def wrap(block):
            return lambda *args: (blocks.append(block), block(*args))[1]

        return wrap

    for name, blocks in wrapped.items():
        trace_forward(NETWORKS[name](**SMALL[name], wrap=wrapping(blocks)))
    counts = {name: len(blocks) for name, blocks in wrapped.items()}
    assert counts == {"chain": 3, "U-Net": 9, "encoder": 3}


def test_the_encoder_has_what_real_ones_have():
    forward = trace_forward(small_step("encoder"))
    assert forward.loss.shape == []
    assert [t.shape for t in forward.batch] == [x.shape for x in forward.step.batch]
    with forward.graph.as_default():
        gradients = tf.gradients(forward.loss, forward.xs)
    sparse = [g for g in gradients if isinstance(g, tf.IndexedSlices)]
    assert len(sparse) == 2  # The embeddings of tokens and places.
    types = [op.type for op in forward.graph.get_operations()]
    assert types.count("StatelessRandomUniformV2") == 1 + 3 * 3
    tokens = forward.step.batch[0]
    assert (tokens == 0).any()
    assert (tokens[:, 0] != 0).all()


def test_chunks_are_measured_beside_what_is_predicted():
    # Some 3 MB: nothing that was there before has room for a tensor.
    sizes = {"layers": 8, "rows": 4096, "width": 96}
    row = chunks.row_in_a_child("chain", "memory", sizes)
    assert row.buffers <= row.chunks
    assert row.measured == pytest.approx(row.chunks, rel=0.5)
    with pytest.raises(RuntimeError, match="got an unexpected keyword"):
        chunks.row_in_a_child("chain", "memory", {"pixels": 3})
