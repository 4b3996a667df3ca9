"""The error of everything that opens, reads or writes models."""

from __future__ import annotations

from geutil.errors import GeutilError


class ModelError(GeutilError, ValueError):
    """A model cannot be opened, read or written as asked.

    The message names what was found (the file, the node, the signature) and what is
    accepted.
    """
