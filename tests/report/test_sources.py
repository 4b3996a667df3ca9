"""The sources of the viewer: modules that import each other in no circle."""

import re
from pathlib import Path

import networkx

SOURCES = Path(__file__).resolve().parents[2] / "web" / "src"
_IMPORT = re.compile(r'^(?:import|export)\b[^;]*?from "\./(\w+)";', re.MULTILINE)


def imports(sources):
    """Return which module imports which, types among what is imported."""
    edges = networkx.DiGraph()
    for name, text in sources.items():
        edges.add_node(name)
        edges.add_edges_from((name, other) for other in _IMPORT.findall(text))
    return edges


def test_modules_import_each_other_in_no_circle():
    sources = {p.stem: p.read_text(encoding="utf-8") for p in SOURCES.glob("*.ts")}
    edges = imports(sources)
    assert edges.number_of_nodes() > 30
    assert edges.number_of_edges() > 80
    assert list(networkx.simple_cycles(edges)) == []


def test_a_circle_is_found():
    sources = {
        "a": 'import { b,\n  c } from "./b";',
        "b": 'import type { A } from "./a";',
    }
    assert list(networkx.simple_cycles(imports(sources))) != []
