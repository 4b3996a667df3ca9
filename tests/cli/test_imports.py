"""TensorFlow starts without Keras, and Keras without what draws and tabulates."""

from __future__ import annotations

import json
import subprocess
import sys

CODE = """
import json, sys
from geutil.cli.imports import import_keras, import_tensorflow
names = ("tensorflow", "keras", "pandas", "matplotlib")
found = []
import_tensorflow()
found.append([name for name in names if name in sys.modules])
import_keras()
found.append([name for name in names if name in sys.modules])
import tensorflow as tf
# Keras is whole: what was skipped while TensorFlow started is there when asked for.
optimizer = type(tf.keras.optimizers.Adam()).__name__
try:
    import matplotlib.pyplot
    drawn = True
except ModuleNotFoundError:
    drawn = False
print(json.dumps([*found, optimizer, drawn]))
"""


def test_modules_that_no_command_needs_are_not_imported():
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, check=True, text=True
    )
    started, with_keras, optimizer, drawn = json.loads(done.stdout)
    assert started == ["tensorflow"]
    assert with_keras == ["tensorflow", "keras"]
    assert optimizer == "Adam"
    try:
        import matplotlib.pyplot
    except ModuleNotFoundError:
        assert not drawn
    else:
        assert drawn
        assert matplotlib.pyplot
