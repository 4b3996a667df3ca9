"""Functions of models, and `model.fit`, in replicas of a strategy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from tests.batchnorm.calibrated import with_random_norms
from tests.distribute.model_steps import net
from tests.distribute.programs import results_of
from tests.settings import needs_eager

pytestmark = needs_eager


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A net in files of several formats, with a checkpoint of other weights."""
    path = tmp_path_factory.mktemp("models")
    keras.utils.set_random_seed(1)
    built = with_random_norms(net())
    built.save(path / "net.keras")
    opened = model.open(built)
    opened.save(path / "saved")
    frozen = opened.freeze().graph.as_graph_def()
    (path / "frozen.pb").write_bytes(frozen.SerializeToString())
    variables = model.open(path / "saved").variables
    values = {name: v.numpy() * 1.25 for name, v in variables.items()}
    write_checkpoint(path / "other_weights", values)
    return path


def write_checkpoint(path, values):
    """Write a checkpoint by names, as version 1 does."""
    with tf.Graph().as_default():
        variables = {
            name: tf.compat.v1.get_variable(name, initializer=value)
            for name, value in values.items()
        }
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            tf.compat.v1.train.Saver(variables).save(session, str(path))


def test_each_replica_has_a_copy_of_the_variables(folder):
    sources = ("keras", "saved", "pb")
    jobs = [f"{source} {kind}" for source in sources for kind in ("one", "two")]
    results = results_of("model_steps", folder, *jobs)
    for source, one, two in zip(sources, results[::2], results[1::2], strict=True):
        copies = [key for key in two if key.startswith("copy/0/")]
        assert len(copies) >= 4, source
        for key in copies:
            other = key.replace("copy/0/", "copy/1/")
            assert np.array_equal(two[key], two[other]), (source, key)
        assert set(one) < set(two), source
        for key, value in one.items():
            np.testing.assert_allclose(
                two[key], value, rtol=2e-6, atol=1e-6, err_msg=f"{source} {key}"
            )
        assert np.array_equal(two["y/before"], two["y/run"]), source
        np.testing.assert_allclose(two["y/saved"], two["y/run"], rtol=1e-6)


def test_calibration_in_a_scope_sets_all_copies_and_what_differs_is_refused(folder):
    jobs = ("calibrated two", "outside two", "moving two")
    numbers, outside, moving = results_of("model_steps", folder, *jobs)
    assert np.array_equal(numbers["without"], numbers["within"])
    assert numbers["copies"]
    for first, second in numbers["copies"]:
        assert np.array_equal(first, second)
    assert len(numbers["replicas"]) == 2
    for values in numbers["replicas"]:
        np.testing.assert_array_equal(values, numbers["within"])
    assert "the replicas of the MirroredStrategy in scope would share" in outside
    assert "by what a replica of the MirroredStrategy in scope sees" in moving


def test_checkpointed_fit_on_two_devices_equals_plain_fit():
    """Norms take the statistics of their replica in both."""
    jobs = ("fit two plain", "fit two checkpointed")
    expected, found = results_of("model_steps", ".", *jobs)
    assert found.pop("recomputed")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        # Rounding adds up over the steps.
        atol = 2e-6 * max(np.abs(value).max(), 1e-3)
        np.testing.assert_allclose(found[key], value, rtol=0, atol=atol, err_msg=key)
