"""Starts TensorFlow when a command needs it, and not before.

Importing it takes seconds, and its C++ part writes to stderr while it starts, whatever
its logging is set to; that of older releases also while it converts to TFLite.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from geutil.cli.output import working

_STDERR = 2


def start_tensorflow() -> None:
    """Import TensorFlow; what it says is told only if that fails."""
    if "tensorflow" in sys.modules:
        return
    with working("starting TensorFlow"), held_back(told_after_errors=True):
        import tensorflow  # noqa: F401


@contextmanager
def held_back(*, told_after_errors: bool = False) -> Iterator[None]:
    """Hold back what TensorFlow's C++ part writes to the process's stderr."""
    with tempfile.TemporaryFile() as held:
        kept = os.dup(_STDERR)
        os.dup2(held.fileno(), _STDERR)
        try:
            yield
        except BaseException:
            if told_after_errors:
                held.seek(0)
                os.write(kept, held.read())
            raise
        finally:
            os.dup2(kept, _STDERR)
            os.close(kept)
