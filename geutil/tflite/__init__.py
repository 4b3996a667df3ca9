"""L1, TFLite files as data: opened, inspected, edited and saved without TensorFlow.

The names are imported when they are first used.
"""

import typing

from geutil import lazy

__all__ = [
    "BrokenFileError",
    "LiteFile",
    "LiteGraph",
    "LiteOp",
    "LiteSignature",
    "LiteTensor",
    "Quantization",
    "open",
]

if typing.TYPE_CHECKING:
    from geutil.tflite.file import LiteFile, open
    from geutil.tflite.flatbuffer import BrokenFileError
    from geutil.tflite.parts import (
        LiteGraph,
        LiteOp,
        LiteSignature,
        LiteTensor,
        Quantization,
    )
else:
    __getattr__, __dir__ = lazy.names_of(
        __name__,
        {
            "file": ["LiteFile", "open"],
            "parts": [
                "LiteGraph",
                "LiteOp",
                "LiteSignature",
                "LiteTensor",
                "Quantization",
            ],
            "flatbuffer": ["BrokenFileError"],
        },
    )
