"""Runs the blocks of pages: one namespace and one empty folder for each page.

- `python`: run in order.
- `text`, without a title, behind a block that was run: what that block printed.
- `console`: lines behind `$ ` are run by a shell; lines below one are what it prints.
  It has to exit with 0, unless the next line to run is `echo $?`.

What is printed is compared as in doctests: runs of blanks are one, `...` is anything.
"""

import contextlib
import doctest
import io
import os
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser

from tests.documentation.shell import Shell, asks_for_the_code, sessions
from tests.processes import forked
from tests.settings import V1

DOCS = str(Path(__file__).parents[2] / "docs")
COMPARED = not V1 and tuple(map(int, version("tensorflow").split(".")[:2])) >= (2, 20)
"""Pages show outputs of this version of TensorFlow and of later ones."""

_PAGE = "__page__"
_PRINTED = "__printed__"
_FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def pages(*, compared: bool = True) -> Sybil:
    """Return a Sybil that runs the blocks of pages, and compares their outputs."""
    evaluators: dict[str, Callable[[Example], None]] = {"python": run_python}
    if compared:
        evaluators |= {"text": compare_text, "console": run_console}
    parsers = [CodeBlockParser(*pair) for pair in evaluators.items()]
    return Sybil(parsers, path=DOCS, pattern="*.md", setup=enter, teardown=leave)


def enter(namespace: dict[str, Any]) -> None:
    """Go to an empty folder, and begin anew what Keras counts and draws."""
    import tensorflow as tf

    stack = contextlib.ExitStack()
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="page"))
    stack.callback(os.chdir, Path.cwd())
    os.chdir(folder)
    # Pages measure; a process that starts TensorFlow takes seconds.
    stack.enter_context(forked())
    tf.keras.utils.clear_session(free_memory=False)
    tf.keras.utils.set_random_seed(0)
    namespace.update({_PAGE: stack, "__name__": "page"})


def leave(namespace: dict[str, Any]) -> None:
    """Go back, and remove the folder."""
    stack = namespace[_PAGE]
    namespace.clear()
    stack.close()


def run_python(example: Example) -> None:
    """Run a block; what it prints is kept for the block behind it."""
    # Blank lines put errors, and what autograph reads, on the lines of the page.
    above = "\n" * (example.line + example.parsed.line_offset)
    code = compile(above + example.parsed, example.path, "exec", dont_inherit=True)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, example.namespace)
    example.namespace[_PRINTED] = printed.getvalue()


def compare_text(example: Example) -> None:
    """Compare a block with what the one before it printed."""
    printed = example.namespace.pop(_PRINTED, None)
    if printed is not None:
        _compare(example.parsed, printed, "the block above")


def run_console(example: Example) -> None:
    """Run the lines of a block one by one, and compare what they print."""
    example.namespace.pop(_PRINTED, None)
    code = 0
    with Shell() as shell:
        listed = sessions(example.parsed)
        for (line, expected), (following, _) in zip(
            listed, [*listed[1:], ("", "")], strict=True
        ):
            if asks_for_the_code(line):
                printed = f"{code}\n"
            else:
                printed, code = shell.run(line)
                told = f"`{line}` exits with {code}:\n{printed}"
                assert code == 0 or asks_for_the_code(following), told
            if expected:
                _compare(expected, printed, f"`{line}`")


def _compare(expected: str, printed: str, what: str) -> None:
    checker = doctest.OutputChecker()
    if not checker.check_output(expected, printed, _FLAGS):
        example = doctest.Example("", expected)
        difference = checker.output_difference(example, printed, _FLAGS)
        raise AssertionError(f"{what} prints something else\n{difference}")
