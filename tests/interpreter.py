"""TFLite's own interpreter and schema, with which results are compared."""

import warnings

import numpy as np

try:
    from ai_edge_litert import interpreter as _litert
    from ai_edge_litert import schema_py_generated as schema
except ImportError:
    from tensorflow.lite.python import interpreter as _litert
    from tensorflow.lite.python import schema_py_generated as schema

__all__ = ["has_floats", "new_interpreter", "run_on_values", "schema"]


def new_interpreter(blob, *, delegates=False, keep_tensors=False):
    """Return the interpreter of a file, with no delegate unless asked for."""
    kinds = _litert.OpResolverType
    kind = kinds.AUTO if delegates else kinds.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*tf.lite.Interpreter is deprecated")
        return _litert.Interpreter(
            model_content=bytes(blob),
            experimental_preserve_all_tensors=keep_tensors,
            experimental_op_resolver_type=kind,
            num_threads=1,
        )


def run_on_values(blob, samples):
    """Return what a file makes of each sample by name, in values where it has steps."""
    run = new_interpreter(blob).get_signature_runner()
    ends, found = run.get_output_details(), []
    for sample in samples:
        given = {
            name: _stored(sample[name], detail)
            for name, detail in run.get_input_details().items()
        }
        found.append({n: _value(v, ends[n]) for n, v in run(**given).items()})
    return found


def _stored(value, detail):
    scale, zero = detail["quantization"]
    if scale:
        ends = np.iinfo(detail["dtype"])
        value = np.clip(np.round(value / np.float32(scale)) + zero, ends.min, ends.max)
    return np.asarray(value).astype(detail["dtype"])


def _value(stored, detail):
    scale, zero = detail["quantization"]
    return (stored.astype(np.float32) - zero) * np.float32(scale) if scale else stored


def has_floats(op):
    """Tell whether an op of a file reads or writes floats."""
    tensors = [t for t in (*op.inputs, *op.outputs) if t is not None]
    return any(t.dtype.startswith("float") for t in tensors)
