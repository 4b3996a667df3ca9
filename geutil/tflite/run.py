"""The schema of TFLite files and their interpreter: LiteRT's where that is installed.

`tf.lite.Interpreter` is deprecated in favour of the package `ai_edge_litert` (the extra
`litert`), and the generated flatbuffer classes move with it. Files are the same.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any

import numpy as np

_IDENTIFIER = b"TFL3"
_SCHEMA = "tensorflow.lite.python.schema_py_generated"


@cache
def schema() -> Any:
    """Return the module of the flatbuffer classes that are generated for TFLite.

    TensorFlow is not imported for it: the module needs flatbuffers and numpy alone.
    """
    try:
        return import_module("ai_edge_litert.schema_py_generated")
    except ImportError:
        return _schema_of_tensorflow()


@cache
def type_names() -> dict[int, str]:
    """Return the names of the types of tensors, such as "INT8", by their numbers."""
    return {
        value: name
        for name, value in vars(schema().TensorType).items()
        if name.isupper()
    }


@cache
def kind_names() -> dict[int, str]:
    """Return the names of the kinds of ops, such as "CONV_2D", by their numbers."""
    return {
        value: name
        for name, value in vars(schema().BuiltinOperator).items()
        if name[0] != "_"
    }


def _schema_of_tensorflow() -> Any:
    """Load the module from its file, since importing its package takes seconds."""
    package = util.find_spec("tensorflow")
    places = () if package is None else package.submodule_search_locations or ()
    for place in places:
        file = Path(place, *_SCHEMA.split(".")[1:]).with_suffix(".py")
        spec = util.spec_from_file_location("geutil_tflite_schema", file)
        if file.exists() and spec is not None and spec.loader is not None:
            module = util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    return import_module(_SCHEMA)


@cache
def _interpreter_module() -> Any:
    try:
        return import_module("ai_edge_litert.interpreter")
    except ImportError:
        return None


def runtime_name() -> str:
    """Return which runtime runs files: "LiteRT", or "TensorFlow Lite"."""
    return "TensorFlow Lite" if _interpreter_module() is None else "LiteRT"


def runtime_version() -> tuple[int, int]:
    """Return the major and the minor number of the runtime's version."""
    package = "tensorflow" if _interpreter_module() is None else "ai_edge_litert"
    major, minor = metadata.version(package).split(".")[:2]
    return int(major), int(minor)


def new_interpreter(
    blob: bytes,
    *,
    delegates: bool = False,
    keep_tensors: bool = False,
    reference: bool = False,
    threads: int = 1,
) -> Any:
    """Return an interpreter of a file, whose tensors are not allocated yet.

    Args:
        blob: the file.
        delegates: whether ops may go to the delegate that runs by default, XNNPACK, as
            in an app; else each runs on TFLite's own kernel.
        keep_tensors: whether every tensor can be read after a run.
        reference: whether ops run on TFLite's reference kernels, which are slow and
            need few temporary buffers, like those of microcontrollers.
        threads: how many threads one op may take.

    Raises:
        ValueError, RuntimeError: it is no TFLite file.
    """
    module = _interpreter_module()
    if module is None:
        import tensorflow as tf

        resolvers, make = tf.lite.experimental.OpResolverType, tf.lite.Interpreter
    else:
        resolvers, make = module.OpResolverType, module.Interpreter
    resolver = (
        resolvers.AUTO if delegates else resolvers.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    )
    with warnings.catch_warnings():
        # Without LiteRT there is no other interpreter to take.
        warnings.filterwarnings("ignore", ".*tf.lite.Interpreter is deprecated")
        return make(
            model_content=bytes(blob),
            num_threads=threads,
            experimental_preserve_all_tensors=keep_tensors,
            experimental_op_resolver_type=(
                resolvers.BUILTIN_REF if reference else resolver
            ),
        )


def is_tflite(blob: bytes) -> bool:
    """Tell whether bytes are a TFLite file."""
    return bytes(blob[4:8]) == _IDENTIFIER


def unpacked(blob: bytes) -> Any:
    """Return a file as objects that can be changed: the schema's `ModelT`.

    Raises:
        ValueError: it is no TFLite file.

    Cost: linear in the file; some 20 us for each tensor and op.
    """
    if not is_tflite(blob):
        raise ValueError("these bytes are no TFLite file")
    root = schema().Model.GetRootAs(bytes(blob), 0)
    model = schema().ModelT.InitFromObj(root)
    for graph in model.subgraphs:
        graph.operators = graph.operators or []
        for part in (graph, *graph.operators):
            for field in ("inputs", "outputs"):
                ends = getattr(part, field)
                # They are views of the file, which cannot be written to.
                setattr(part, field, np.array(() if ends is None else ends, np.int32))
    return model


def packed(model: Any) -> bytes:
    """Return the file of a `ModelT`."""
    import flatbuffers

    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(model.Pack(builder), _IDENTIFIER)
    return bytes(builder.Output())
