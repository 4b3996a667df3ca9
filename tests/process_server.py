"""The server of `tests/processes.py`: run by `python -c`, it forks for each request.

It has imported TensorFlow and done no more with it; it never imports geutil.
"""

from __future__ import annotations

import os
import pickle
import runpy
import sys
import traceback
import types

import tensorflow as tf  # noqa: F401


def main() -> None:
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        child = os.fork()
        if child == 0:
            requests.close()
            replies.close()
            _become(*request)
        _, status = os.waitpid(child, 0)
        pickle.dump(os.waitstatus_to_exitcode(status), replies)
        replies.flush()


def _become(
    arguments: list[str],
    folder: str,
    environment: dict[str, str],
    printed: tuple[str, str],
) -> None:
    """Do what `python` would do with arguments, and end."""
    for descriptor, path in zip((0, 1, 2), (os.devnull, *printed), strict=True):
        flags = os.O_WRONLY | os.O_APPEND if descriptor else os.O_RDONLY
        os.dup2(os.open(path, flags), descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    seed = os.environ["PYTHONHASHSEED"]
    os.environ.clear()
    # The server's seed is that of its forks, whatever they were asked for.
    os.environ.update(environment | {"PYTHONHASHSEED": seed})
    os.chdir(folder)
    given = environment.get("PYTHONPATH", "")
    sys.path[0:1] = ["", *filter(None, given.split(os.pathsep))]
    code = 1
    try:
        _run(*arguments)
        code = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        else:
            code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(how: str, what: str, *arguments: str) -> None:
    sys.argv = [how, *arguments]
    if how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    assert how == "-c", how
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(what, "<string>", "exec", dont_inherit=True), vars(module))


if __name__ == "__main__":
    main()
