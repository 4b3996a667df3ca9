"""Processes that a server forks do what those do that are started."""

import os
import subprocess
import sys

import pytest

from tests.processes import ROOT, run_python

SCRIPTS = {
    "prints": "import sys; print(*sys.argv, __name__); print('x', file=sys.stderr)",
    "fails": "raise ValueError('no')",
    "exits": "import sys; sys.exit(3)",
    "says why": "import sys; sys.exit('why')",
    "is killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "imports": "import os, tests.thorough; print(os.environ['NEW'], os.getcwd())",
    "reads": "import sys; print(repr(sys.stdin.read()))",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_does_what_python_does(name):
    environment = os.environ | {"NEW": "1"}
    arguments = ["-c", SCRIPTS[name], "a", "b"]
    found = run_python(*arguments, environment=environment)
    expected = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert found.returncode == expected.returncode
    assert found.stdout == expected.stdout
    assert found.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]


def test_it_starts_with_tensorflow_and_without_geutil():
    code = "import sys; print(*({'tensorflow', 'geutil'} & set(sys.modules)))"
    assert run_python("-c", code).stdout.split() == [b"tensorflow"]
    # What the last one imported or set is not there any more.
    run_python("-c", "import geutil, os; os.environ['NEW'] = '1'")
    assert run_python("-c", code).stdout.split() == [b"tensorflow"]
    code = "import os; print(os.environ.get('NEW'))"
    assert run_python("-c", code).stdout.split() == [b"None"]


def test_what_is_read_at_the_start_is_heeded():
    code = "import sys; print('tensorflow' in sys.modules, hash('geutil'))"
    other = os.environ | {"PYTHONHASHSEED": "1"}
    runs = [run_python("-c", code, environment=other).stdout for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0].startswith(b"False")


def test_a_module_is_run():
    done = run_python("-m", "json.tool", "--help")
    assert done.returncode == 0
    assert b"json" in done.stdout
