"""Edits in the replicas of tf.distribute, against one device on the whole batch."""

import numpy as np
import tensorflow as tf

from geutil.batchnorm import fold_batch_norms
from tests.distribute.programs import results_of
from tests.settings import needs_eager

pytestmark = needs_eager
TOLERANCES = {"loss/": 1e-6, "range/0/": 1e-6, "variable/": 1e-6}
# A rounded value may fall on the other side of a step.
QUANTIZED = {**TOLERANCES, "gradient/": 1e-5}
FOLDED = {"loss/": 1e-6, "variable/": 2e-5, "gradient/": 2e-5}
# Keras takes variances here as a difference of squares.
SYNCHRONIZED = {"loss/": 1e-6, "variable/": 1e-5, "gradient/": 5e-5}


def close(one, two, tolerances):
    for start, tolerance in tolerances.items():
        keys = [key for key in one if key.startswith(start)]
        assert keys, start
        for key in keys:
            size = max(np.abs(one[key]).max(), 1e-3)
            np.testing.assert_allclose(
                two[key], one[key], rtol=0, atol=tolerance * size, err_msg=key
            )


def heads(numbers, about=""):
    """Return the beginnings of the reports, of those about something."""
    lines = [report.splitlines()[0] for report in numbers["reports"]]
    return sorted(line for line in lines if about in line)


def test_replicas_equal_one_device_on_the_whole_batch():
    edits = "fold,delayed,speed"
    one, two = results_of("steps", f"one conv {edits}", f"two conv {edits}")
    close(one, two, QUANTIZED)
    # Copies of a range stay equal.
    first = {k.removeprefix("range/0/"): v for k, v in two.items() if "range/0/" in k}
    other = {k.removeprefix("range/1/"): v for k, v in two.items() if "range/1/" in k}
    assert first.keys() == other.keys()
    assert all(np.array_equal(first[key], other[key]) for key in first)
    # Each replica is looked at alone, and new ops are where it is.
    assert sorted(heads(one) * 2) == heads(two)
    assert not any("replica_1" in key for key in two)
    assert two["misplaced"] == []
    assert all(one["recomputed"] + two["recomputed"])
    # Steps are counted once for all replicas.
    assert two["step"] == 4


def test_norms_folded_for_training_are_those_of_each_replica():
    plain, folded = results_of("steps", "two conv train", "two conv train,one_pass")
    assert [head[:8] for head in heads(folded)] == ["2 of 2 b"] * 2
    close(plain, folded, FOLDED)
    assert folded["misplaced"] == []


def test_folds_of_synchronized_norms_change_no_step():
    """Frozen, they equal those of one device on the whole batch."""
    jobs = "two train", "two train,one_pass,freeze", "one train,freeze"
    plain, frozen, one = results_of(
        "steps", *(job.replace(" ", " synchronized ") for job in jobs)
    )
    before = {
        f"{kind}/{step}": 2e-5 for kind in ("loss", "gradient") for step in range(2)
    }
    close(plain, frozen, before)
    refused = [report for report in frozen["reports"] if report.startswith("0 of 2")]
    assert len(refused) == 2
    for report in refused:
        assert report.startswith("0 of 2 batch norm(s) folded, 2 refused")
        assert report.count("pass statistics='exact'") == 2
    assert [h[:8] for h in heads(one)] == ["2 of 2 b"]
    assert [h[:8] for h in heads(frozen)] == ["0 of 2 b"] * 2 + ["2 of 2 b"] * 2
    close(one, frozen, SYNCHRONIZED)
    # They freeze at the same step.
    assert frozen["step"] == 4
    assert frozen["misplaced"] == []


def test_workers_equal_one_device_on_the_whole_batch():
    edits = "synchronized train,exact,quantize"
    one, workers = results_of("steps", f"one {edits}", f"workers {edits},memory")
    assert len(workers) == 2
    for numbers in workers:
        assert [h[:8] for h in heads(numbers, "norm")] == ["2 of 2 b"]
        close(one, numbers, SYNCHRONIZED | {"range/0/": 1e-5})
        assert numbers["misplaced"] == []
        assert all(numbers["recomputed"])


def test_steps_of_a_coordinator_equal_those_of_one_device():
    jobs = "one_pass,memory plain", "exact,quantize exact,quantize"
    (folded, plain), (quantized, one) = results_of("parameter_server", *jobs)
    close(plain, folded, {"loss/": 1e-5, "variable/": 1e-4})
    # Ranges are on the parameter server.
    close(one, quantized, {"loss/": 1e-6, "variable/": 1e-6, "range/": 1e-6})
    assert quantized["step"] == one["step"] == 4
    assert quantized["places"] == {"/job:ps/replica:0/task:0/device:CPU:0"}


def test_outside_of_strategies_there_is_no_replica():
    with tf.Graph().as_default() as graph, tf.name_scope("replica_1"):
        y = tf.nn.conv2d(tf.ones([1, 4, 4, 3]), tf.ones([1, 1, 3, 2]), 1, "SAME")
        channels = [tf.constant([1.0, 2.0]) for _ in range(4)]
        tf.compat.v1.nn.fused_batch_norm(y, *channels, is_training=False)
    before = graph.get_operations()
    assert len(fold_batch_norms(graph).folded) == 1
    made = graph.get_operations()[len(before) :]
    assert {op.device for op in made} == {""}
