"""TensorFlow starts without Keras, and with all that files name; Keras leaves out some.

References are TensorFlow and Keras as `import tensorflow` imports them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

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
REGISTERED = """
import json
from tensorflow.core.framework import op_def_pb2
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.framework import ops, type_spec_registry
from tensorflow.python.saved_model import revived_types
import tensorflow as tf
listed = op_def_pb2.OpList()
everything = pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList())
listed.ParseFromString(everything)
found = {
    "ops": sorted(op.name for op in listed.op),
    "gradients": sorted(ops.gradient_registry.list()),
    "revived": sorted(revived_types._REVIVED_TYPE_REGISTRY),
    "types": sorted(type_spec_registry._NAME_TO_TYPE_SPEC),
}
"""
STARTED = """
from geutil.cli.imports import import_tensorflow, register_all
import_tensorflow()
register_all()
"""
NAMES = """
for place, around in (("tf", tf), ("tf.compat.v1", tf.compat.v1)):
    for name in dir(around):
        module = getattr(around, name)
        if str(getattr(module, "__name__", "")).startswith("tensorflow._api."):
            found[f"{place}.{name}"] = sorted(n for n in dir(module) if n[0] != "_")
"""


def _told(code: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    return json.loads(done.stdout)


def test_modules_that_no_command_needs_are_not_imported():
    started, with_keras, optimizer, drawn = _told(CODE)
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


def test_all_that_a_file_may_name_is_registered():
    """And the public packages have all names, once they are asked for."""
    told = REGISTERED + NAMES + "print(json.dumps(found))"
    found = _told(STARTED + told)
    assert len(found["ops"]) > 1000
    assert len(found) > 100
    assert found == _told("import tensorflow\n" + told)
