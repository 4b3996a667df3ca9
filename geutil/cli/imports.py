"""Imports of TensorFlow and Keras that leave out what no command needs.

`import tensorflow` imports Keras, which imports pandas and matplotlib where these are
installed, and Python collects garbage among the millions of objects that stay.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# TensorFlow imports it at its end, and takes that it cannot be imported.
_KERAS = ("keras.src.optimizers", "tf_keras.src.optimizers")
# Keras draws pictures and feeds tables with these, and goes without them.
_OF_KERAS = ("pandas", "matplotlib", "matplotlib.pyplot")
_SELDOM = (50_000, 20, 20)
"""Thresholds of collections: graphs are made of objects that stay. Measured: to open
and copy MobileNetV2 takes 1.6 CPU seconds in the place of 2.1."""


def import_tensorflow() -> None:
    """Import TensorFlow without Keras, which it loads where something asks for it.

    Cost: 1.6 CPU seconds in the place of 3.3.
    """
    with _lean(_KERAS):
        import tensorflow  # noqa: F401


def import_keras() -> None:
    """Import the Keras that `tf.keras` is, behind TensorFlow.

    Cost: 0.2 CPU seconds in the place of 1.1 where pandas and matplotlib are installed.
    """
    with _lean(_OF_KERAS):
        import tensorflow as tf

        # A name of it makes the module load.
        _ = tf.keras.Model


@contextmanager
def _lean(absent: Sequence[str]) -> Iterator[None]:
    """Import as if some modules were not installed, without collections of garbage.

    The objects of the modules imported are no garbage: no later collection looks at
    them.
    """
    hidden = [name for name in absent if name not in sys.modules]
    collects = gc.isenabled()
    gc.disable()
    # A module that is None there is one that cannot be imported.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            if sys.modules.get(name) is None:
                sys.modules.pop(name, None)
        gc.freeze()
        if collects:
            gc.set_threshold(*_SELDOM)
            gc.enable()
