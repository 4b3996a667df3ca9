from __future__ import annotations

import pytest
import tensorflow as tf

from geutil.graph.state import flags_as_noted, is_trainable, set_trainable
from tests.settings import V1

pytestmark = pytest.mark.skipif(V1, reason="about eager variables")


def test_a_note_changes_the_variable_in_the_block_only():
    one, two, three = (tf.Variable(1.0, trainable=i < 2) for i in range(3))
    set_trainable(one, False)
    set_trainable(three, True)
    assert [is_trainable(v) for v in (one, two, three)] == [False, True, False]
    with pytest.raises(KeyError), flags_as_noted([one, two, three]):
        assert [v.trainable for v in (one, two, three)] == [False, True, False]
        raise KeyError
    assert [v.trainable for v in (one, two, three)] == [True, True, False]
    set_trainable(one, True)
    assert is_trainable(one)
