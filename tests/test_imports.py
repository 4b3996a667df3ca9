"""What `import geutil` imports, and when."""

import ast
import functools
import importlib
import importlib.metadata
import json
import re
import subprocess
import sys

import pytest

import geutil as ge
from tests.processes import ROOT, run_python

PACKAGES = ["batchnorm", "gradients", "memory", "model", "quantize"]


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def needed_by(*distributions):
    """Return the names of distributions and of all that they need, extras apart."""
    found, waiting = set(), list(distributions)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        found.add(name)
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        waiting += [re.match(r"[\w.-]+", n)[0] for n in needs if "extra ==" not in n]
    return found


@functools.cache
def modules_of_extras():
    """Return the modules of what only the extras of geutil need."""
    needs = importlib.metadata.requires("geutil")
    extras = [re.match(r"[\w.-]+", n)[0] for n in needs if "extra ==" in n]
    only = needed_by(*extras) - needed_by("tensorflow", "numpy")
    by_module = importlib.metadata.packages_distributions()
    return {
        module
        for module, owners in by_module.items()
        if {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners} <= only
    }


def test_the_modules_of_extras_are_found():
    assert {"typer", "matplotlib", "networkx", "hypothesis"} <= modules_of_extras()
    assert not {"tensorflow", "numpy", "keras"} & modules_of_extras()


def test_no_extra_is_imported():
    told = "print(json.dumps([m.partition('.')[0] for m in sys.modules]))\n"
    # What TensorFlow and Keras import by themselves, if it is there, is theirs.
    code = "import sys, json, tensorflow as tf, keras\ntf.lite, tf.keras.Model\n"
    code += f"{told}import geutil\n"
    code += "".join(f"import geutil.{name}\n" for name in PACKAGES)
    code += f"[getattr(geutil, name) for name in geutil.__all__]\n{told}"
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr.decode()
    by_tensorflow, found = (set(json.loads(s)) for s in done.stdout.splitlines()[-2:])
    assert "geutil" not in by_tensorflow
    assert {"tensorflow", "geutil"} <= found
    assert (found - by_tensorflow) & modules_of_extras() == set()


def test_geutil_alone_imports_neither_tensorflow_nor_numpy():
    code = "import sys, geutil\nprint(*sys.modules)"
    found = set(run(code).split())
    assert not {"tensorflow", "numpy"} & found
    assert {m for m in found if m.startswith("geutil.")} <= {
        "geutil.errors",
        "geutil.lazy",
        "geutil.version",
    }


def test_with_tensorflow_there_it_looks_for_sessions():
    code = """
import tensorflow
from tensorflow.python.client.session import BaseSession
import geutil
print(hasattr(BaseSession._extend_graph, "__wrapped__"))
"""
    assert run_python("-c", code).stdout.split() == [b"True"]


def test_type_checkers_see_the_names_where_they_are_found():
    tree = ast.parse((ROOT / "geutil" / "__init__.py").read_text())
    seen = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    seen |= {
        node.targets[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    # What the root itself is made with is no name of its users.
    assert sorted(seen - {"__all__", "lazy"}) == sorted(ge.__all__)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module != "geutil":
            home = importlib.import_module(node.module)
            for alias in node.names:
                assert getattr(ge, alias.name) is getattr(home, alias.name)


def test_dir_lists_the_names_before_they_are_used():
    code = "import geutil\nprint(*dir(geutil))"
    assert set(ge.__all__) <= set(run(code).split())


@pytest.mark.parametrize("name", ["nonsense", "__wrapped__", "_private"])
def test_other_names_are_no_attributes(name):
    with pytest.raises(AttributeError, match=f"'geutil' has no attribute '{name}'"):
        getattr(ge, name)


def test_a_name_that_is_not_there_imports_nothing():
    code = "import sys, geutil\nprint(hasattr(geutil, 'nonsense'), *sys.modules)"
    answer, *found = run(code).split()
    assert answer == "False"
    assert "tensorflow" not in found


def test_the_planner_needs_no_tensorflow():
    code = """
import sys
from geutil.gradients.planner import Problem, solve
problem = Problem([1.0] * 4, [1] * 4, [(0, 1), (1, 2), (2, 3), (0, 3)])
print(solve(problem, 3, time_limit=1.0).status, "tensorflow" in sys.modules)
"""
    assert run(code).split() == ["optimal", "False"]
