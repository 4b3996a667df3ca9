"""The interpreter of TFLite files: LiteRT's where that is installed.

`tf.lite.Interpreter` is deprecated in favour of the package `ai_edge_litert` (the extra
`litert`). Files are the same.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module, metadata
from typing import Any


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
    """Return an interpreter of a file, whose tensors are not allocated yet."""
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
