"""A model of more than 2 GiB: more than one protobuf holds."""

import shutil

import pytest
import tensorflow as tf

from geutil import model
from tests.thorough import thorough

# 6 GiB of memory; `test_freezing.py` has the refusal with a smaller limit.
pytestmark = thorough

ROWS = 2**19 + 1
COLUMNS = 2**10
"""Float32: 2 GiB and 4 KiB."""


@pytest.fixture(scope="module")
def large():
    table = tf.Variable(tf.zeros([ROWS, COLUMNS]), name="table")
    table.scatter_nd_update([[ROWS - 1, 0]], [7.0])

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32, name="row")])
    def look_up(row):
        return {"y": tf.gather(table, row)[:, :2]}

    m = model.open(look_up)
    m.keep = table
    return m


def test_it_is_saved_and_opened(large, tmp_path, request):
    large.save(tmp_path / "m")
    request.addfinalizer(lambda: shutil.rmtree(tmp_path))
    assert (tmp_path / "m" / "saved_model.pb").stat().st_size < 2**20
    again = model.open(tmp_path / "m")
    assert again.run(row=[ROWS - 1])["y"].tolist() == [[7.0, 0.0]]
    assert large.cut(outputs=["y"]).run(row=[0])["y"].tolist() == [[0.0, 0.0]]


def test_it_cannot_be_frozen(large):
    with pytest.raises(model.ModelError, match=r"2,147,483,647.*SavedModel"):
        large.freeze()
