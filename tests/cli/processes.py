"""The command in a process of its own, as a shell starts it."""

import os
import sys

from tests.processes import ROOT

COMMAND = [sys.executable, "-c", "from geutil.cli.main import main; main()"]


def environment(**variables):
    """Return this process's environment, with geutil importable from anywhere."""
    inherited = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    return inherited | {"PYTHONPATH": str(ROOT)} | variables
