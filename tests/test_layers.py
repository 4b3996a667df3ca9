"""Modules import downwards only, and one package alone touches TensorFlow's insides.

One module of it imports TensorFlow's private names. Read from the source with `ast`:
nothing here imports geutil.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.house import import_circles, private_imports, read_modules

ROOT = Path(__file__).parents[1] / "geutil"

LAYERS = {
    "graph": 0,
    "tflite": 1,
    "select": 1,
    "reroute": 2,
    "transform": 3,
    "rewrite": 3,
    "bodies": 3,
    "gradients": 4,
    "batchnorm": 4,
    "quantize": 4,
    "model": 4,
    # Below what plans by its predictions: partitions, and memory-saving gradients.
    "memory": 2,
    # Built on clients.
    "pipeline": 5,
    "capabilities": 5,
    "jobs": 5,
    "report": 6,
    "cli": 6,
}
HIGHEST = max(LAYERS.values())
# Predicts and measures, but changes nothing: looks only.
HIGHEST_IMPORT = {"memory": 1}
FOR_ALL = {
    "child_processes",
    "data_files",
    "errors",
    "formats",
    "lazy",
    "progress",
    "sizes",
    "version",
}
# Clients do not know each other, with one exception: the rewriters of old fold batch
# norms and then insert FakeQuant ops, so one module puts the two together.
COMPOSITIONS = {"quantize.contrib": {"batchnorm"}}
# Rooms whose names can be imported from where they were, too: looked up when asked for.
FORMER_HOMES = {
    "gradients": {"pipeline"},
    "model": {"capabilities", "jobs"},
    "transform": {"pipeline"},
    "transform.rewrite": {"rewrite"},
    "transform.rewrite.rules": {"rewrite"},
}
# Names of tf.contrib.graph_editor's modules: imports, aliases and __all__ only.
FACADES = {"edit", "match", "subgraph", "util"}
# Where TensorFlow's private API may be used, and where its names are imported.
PRIVATE_ROOM = "graph"
PRIVATE_SEAM = "graph._tf"

# Underscored attributes that are geutil's own and are used on another object than self,
# by module: TensorFlow has a `_graph` and an `_ops`, too.
VIEW = {"_assign_from", "_input_ts", "_output_ts", "_passthrough_ts"}
OWN_PRIVATE = {
    # Methods of SubGraphView that make a new view.
    "select.subgraph": VIEW | {"_graph", "_ops", "_lookups"},
    # Functions that update a view in place.
    "reroute.views": VIEW,
    # The place of a table in a flatbuffer, which the generated classes call so.
    "tflite.flatbuffer": {"_tab"},
    # What notebooks ask for, by that name.
    "report.pages": {"_repr_html_"},
    # A public method of every NamedTuple.
    "gradients.segments": {"_replace"},
    "gradients.tape.engine": {"_replace"},
    # And one of a tape's own, in a function that makes a tape.
    "gradients.tape.entries": {"_add", "_replace"},
    # A public function of `os`: the end of a process that was forked.
    "child_processes": {"_exit"},
    "cli.guard": {"_exit"},
    # And of one that TensorFlow would keep waiting.
    "memory.measurement.cluster": {"_exit"},
    # The tensors of a finished copy, from its TransformerInfo.
    "transform.op_copies": {"_transformed_ts"},
}


parsed = functools.cache(ast.parse)


@functools.cache
def walked(source: str) -> list[ast.AST]:
    """Return all nodes of a source, for several checks."""
    return list(ast.walk(parsed(source)))


def module_name(path: Path) -> str:
    """Return "select.walks" for geutil/select/walks.py, and "" for the root."""
    parts = [*path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str) -> Iterator[str]:
    """Yield every module that may be imported, anywhere in the source."""
    for node in walked(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports are not used"
            # With the names: it may be `from geutil import graph`.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(imported: list[str]) -> Iterator[str]:
    """Yield what is imported from geutil, as names of packages and top modules."""
    for name in imported:
        top, *rest = name.split(".")
        if top == "geutil" and rest:
            yield rest[0]


def layer_faults(name: str, source: str) -> list[str]:
    """Return what is wrong with the imports of the module called `name`."""
    package = name.split(".", 1)[0]
    if not package:
        return []  # geutil/__init__.py exports all layers.
    faults = []
    everything = list(imports(source))
    if "geutil" in everything or "geutil.*" in everything:
        faults.append("imports all of geutil")
    for imported in own_imports(everything):
        if imported in FOR_ALL or imported == package:
            continue
        if imported in {*COMPOSITIONS.get(name, ()), *FORMER_HOMES.get(name, ())}:
            continue
        if package in FOR_ALL:
            faults.append(f"imports {imported}: nothing may")
        elif package in FACADES:
            if imported not in LAYERS or LAYERS[imported] > 3:
                faults.append(f"imports {imported}: a facade shows layers 0 to 3")
        elif package not in LAYERS:
            faults.append(f"is in no layer: add '{package}' to LAYERS")
        elif imported in FACADES:
            if LAYERS[package] < HIGHEST:
                faults.append(f"imports {imported}, a facade for users")
        elif imported not in LAYERS:
            if LAYERS[package] < HIGHEST:
                faults.append(f"imports {imported}, which is in no layer")
        elif LAYERS[imported] == LAYERS[package] == HIGHEST:
            continue
        elif LAYERS[imported] >= LAYERS[package]:
            faults.append(f"imports {imported}, of layer {LAYERS[imported]}")
        elif LAYERS[imported] > HIGHEST_IMPORT.get(package, HIGHEST):
            faults.append(f"imports {imported}: it may only look")
    return faults


def private_faults(name: str, source: str) -> list[str]:
    """Return the uses of TensorFlow's private API outside their places."""
    faults = []
    if name != PRIVATE_SEAM:
        imported = private_imports(walked(source))
        faults = [f"imports {n}: {PRIVATE_SEAM} alone may" for n in imported]
    if name.split(".", 1)[0] == PRIVATE_ROOM:
        return faults
    allowed = OWN_PRIVATE.get(name, set())
    for node in walked(source):
        if isinstance(node, ast.Attribute):
            if node.attr in {"python", "core"} and ast.unparse(node.value) == "tf":
                faults.append(f"line {node.lineno}: {ast.unparse(node)}")
            own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
            if is_private(node.attr) and not own and node.attr not in allowed:
                faults.append(f"line {node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            # getattr(op, "_private") is the same thing in disguise.
            constants = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
            if node.func.id in {"getattr", "setattr", "hasattr", "delattr"} and any(
                isinstance(c, str) and is_private(c) and c not in allowed
                for c in constants
            ):
                faults.append(f"line {node.lineno}: {ast.unparse(node)}")
    return faults


def is_private(attribute: str) -> bool:
    return attribute.startswith("_") and not attribute.startswith("__")


def facade_faults(name: str, source: str) -> list[str]:
    """Return the logic in a module that shall only hold names."""
    if name not in FACADES | {""}:
        return []
    allowed = is_of_names if name else is_of_lazy_names
    return [
        f"line {node.lineno}: {ast.unparse(node)[:60]}"
        for node in parsed(source).body
        if not allowed(node)
    ]


def is_of_names(node: ast.stmt) -> bool:
    """Tell whether a statement is an import, a docstring, an alias or `__all__`."""
    if isinstance(node, ast.Assign):
        exports = (
            ast.unparse(node.targets[0]) == "__all__"
            and isinstance(node.value, ast.List)
            and all(isinstance(e, ast.Constant) for e in node.value.elts)
        )
        return exports or isinstance(node.value, ast.Name)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, ast.Import | ast.ImportFrom)


def is_of_lazy_names(node: ast.stmt) -> bool:
    """Tell the same of the root, whose names are lists for type checkers and calls."""
    if isinstance(node, ast.If):
        return (
            ast.unparse(node.test) == "typing.TYPE_CHECKING"
            and all(map(is_of_names, node.body))
            and all(map(calls_lazy, node.orelse))
        )
    return is_of_names(node) or calls_lazy(node)


def calls_lazy(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Assign | ast.Expr)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).startswith("lazy.")
    )


def statement_faults(name: str, source: str) -> list[str]:
    """Return uses of `print` (the command line's apart) and `assert`."""
    speaks = name.split(".", 1)[0] in {"cli", "demo"}
    faults = []
    for node in walked(source):
        if isinstance(node, ast.Assert):
            faults.append(f"line {node.lineno}: assert")
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id
            in ({"exec", "eval"} if speaks else {"print", "exec", "eval"})
        ):
            faults.append(f"line {node.lineno}: {node.func.id}(")
        elif isinstance(node, ast.ImportFrom) and any(
            a.name == "*" for a in node.names
        ):
            faults.append(f"line {node.lineno}: wildcard import")
    return faults


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
CHECKS = [layer_faults, private_faults, facade_faults, statement_faults]


def test_the_modules_are_found():
    assert {"", "errors", "graph.edits", "select.walks", "reroute.tensors"} <= set(
        MODULES
    )
    assert set(MODULES) >= FACADES


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_modules(check):
    found = {name: check(name, path.read_text()) for name, path in MODULES.items()}
    assert {name: faults for name, faults in found.items() if faults} == {}


def test_modules_do_not_import_each_other():
    # Neither in functions nor for types: what two modules need is a third one.
    assert import_circles(read_modules(ROOT.parent)) == []


WRONG = {
    layer_faults: [
        ("graph.order", "from geutil.select.walks import get_walks_union_ops"),
        ("select.walks", "import geutil.reroute"),
        ("select.walks", "from geutil import reroute"),
        ("reroute.tensors", "def f():\n    from geutil.transform import copy"),
        ("reroute.tensors", "import geutil as ge"),
        ("reroute.tensors", "from geutil.edit import detach"),
        ("gradients.plan", "from geutil.batchnorm import fold"),
        ("batchnorm.apply", "from geutil.quantize import insert"),
        ("quantize.single_insertion", "from geutil.batchnorm import FoldReport"),
        ("quantize.contrib", "from geutil.gradients import gradients"),
        ("batchnorm.fold", "from geutil.quantize import rewriters"),
        ("model.file_writers", "from geutil.report import text"),
        ("memory.predict", "from geutil.reroute import swap_ts"),
        ("errors", "from geutil.graph.types import is_op"),
        ("version", "from geutil.graph.types import is_op"),
        ("edit", "from geutil.gradients import gradients"),
        ("surprise.module", "from geutil.graph.types import is_op"),
    ],
    private_faults: [
        ("select.walks", "from tensorflow.python.framework import ops"),
        ("graph.order", "from tensorflow.python.framework import ops"),
        ("graph.order", "def f():\n    import tensorflow.core.framework"),
        ("select.walks", "from tensorflow import python"),
        ("select.walks", "import tensorflow.core.framework.graph_pb2"),
        ("transform.op_copies", "op._update_input(0, t)"),
        ("transform.op_copies", "self.op._id"),
        ("transform.op_copies", "getattr(op, '_id')"),
        ("reroute.views", "session._graph"),
        ("", "x = tf.python.framework"),
    ],
    facade_faults: [
        ("edit", "def detach(): pass"),
        ("util", "x = [1]"),
        ("", "if True:\n    import os"),
        ("", "if typing.TYPE_CHECKING:\n    x = [1]"),
        ("", "if typing.TYPE_CHECKING:\n    a = b\nelse:\n    c = d()"),
        ("edit", "x = lazy.names()"),
        ("match", "ph = make()"),
        ("", "__all__ = [n for n in dir()]"),
    ],
    statement_faults: [
        ("graph.order", "def f():\n    print(1)"),
        ("graph.order", "assert True"),
        ("graph.order", "exec('1')"),
        ("graph.order", "from os import *"),
    ],
}


def test_the_checks_can_fail():
    passed = {
        check.__name__: [row for row in listed if not check(*row)]
        for check, listed in WRONG.items()
    }
    assert {name: rows for name, rows in passed.items() if rows} == {}


RIGHT = {
    layer_faults: [
        ("graph.order", "from geutil.errors import GeutilError"),
        ("graph.order", "from geutil.graph.types import Graph"),
        ("transform.op_copies", "from geutil.graph.types import Graph"),
        ("gradients.plan", "from geutil.transform import copy"),
        ("memory.predict", "from geutil.select.walks import x"),
        ("quantize.contrib", "from geutil.batchnorm import FoldReport"),
        ("report.text", "from geutil.model import opening"),
        ("cli.main", "from geutil.report import text"),
        ("edit", "from geutil.reroute.views import detach"),
        ("select.walks", "import os\nfrom collections import abc"),
    ],
    private_faults: [
        ("graph._tf", "from tensorflow.python.framework import ops"),
        ("graph.order", "op._id"),
        ("select.walks", "import tensorflow as tf\ntf.Graph()"),
        ("select.walks", "self._ops\ncls._made\nx.__name__"),
        ("reroute.views", "view._assign_from(other)"),
    ],
    facade_faults: [
        ("edit", "'''Names.'''\nfrom a import b\nc = b\n__all__ = ['c']"),
        ("graph.order", "def f(): pass"),
        ("", "if typing.TYPE_CHECKING:\n    a = b\nelse:\n    c = lazy.x()"),
    ],
    statement_faults: [
        ("cli.main", "print(1)"),
        ("graph.order", "def f():\n    '''print(1)'''"),
    ],
}


def test_the_checks_allow_what_is_right():
    refused = {
        check.__name__: [row for row in listed if check(*row)]
        for check, listed in RIGHT.items()
    }
    assert {name: rows for name, rows in refused.items() if rows} == {}
