"""A process of its own for what TensorFlow does, so that its death is told.

Some files end the process that reads them: TensorFlow's own checks abort. The command
goes on in a child once it needs TensorFlow, and says in one line what the child was at
when it died.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextvars import ContextVar
from pathlib import Path

PARENT = ContextVar("PARENT", default=False)
"""Whether this is the command as it was started, which may go on in a child."""
_VARIABLE = "GEUTIL_COMMAND_IS_AT"
_CODE = "from geutil.cli.main import main; main()"


def is_child() -> bool:
    """Tell whether this process is such a child."""
    return _VARIABLE in os.environ


def note(what: str) -> None:
    """Note what this process is at, if it is a child."""
    if is_child():
        Path(os.environ[_VARIABLE]).write_text(what)


def go_on_in_a_child() -> None:
    """Run the whole command in a child, and end with its exit code.

    Nothing may have been printed before. A process that is no command stays as it is.
    """
    if not PARENT.get():
        return
    with tempfile.NamedTemporaryFile() as noted:
        child = subprocess.Popen(
            [sys.executable, "-c", _CODE, *sys.argv[1:]],
            env={**os.environ, _VARIABLE: noted.name},
        )
        # What stops both is told by the child.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            code = child.wait()
        finally:
            signal.signal(signal.SIGINT, before)
        if code < 0:
            print(_told(-code, noted.read().decode()), file=sys.stderr)
            code = 1
    sys.exit(code)


def _told(number: int, what: str) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = str(number)
    return (
        f"geutil: TensorFlow ended the process ({name}) while {what or 'starting'}; "
        "--verbose shows what it said"
    )
