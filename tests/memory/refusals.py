"""Refusals in tables: a failure names its case."""

import contextlib

import pytest


@contextlib.contextmanager
def refused(error, reason, case=""):
    """Expect an error with a reason, as `pytest.raises` does."""
    try:
        with pytest.raises(error, match=reason):
            yield
    except pytest.fail.Exception as failed:
        pytest.fail(f"{reason} {case}: {failed}")
