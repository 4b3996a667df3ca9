"""TFLite's own interpreter and schema, with which results are compared."""

import warnings

try:
    from ai_edge_litert import interpreter as _litert
    from ai_edge_litert import schema_py_generated as schema
except ImportError:
    from tensorflow.lite.python import interpreter as _litert
    from tensorflow.lite.python import schema_py_generated as schema

__all__ = ["has_floats", "new_interpreter", "schema"]


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


def has_floats(op):
    """Tell whether an op of a file reads or writes floats."""
    tensors = [t for t in (*op.inputs, *op.outputs) if t is not None]
    return any(t.dtype.startswith("float") for t in tensors)
