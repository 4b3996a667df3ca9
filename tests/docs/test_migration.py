"""Every name of geutil that the guides cite exists; no old one is left out."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from tests.test_public_api import ALIASES, NAMES

DOCS = Path(__file__).parents[2] / "docs"
MIGRATE = DOCS / "migrate"
PAGES = [
    *sorted(MIGRATE.glob("*.md")),
    *sorted((DOCS / "concepts").glob("*.md")),
    DOCS / "notebooks.md",
]
CODE = re.compile(r"`([^`\n]+)`")
CITED = re.compile(r"((?:ge|geutil)(?:\.\w+)+)(?:\(((?:\w+=[^,()]*(?:, )?)*)\))?")
FENCES = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    return FENCES.sub("", page.read_text(encoding="utf-8"))


def rows(page: Path) -> list[list[str]]:
    """Return the cells of all rows whose table has a column called geutil."""
    found = []
    for table in re.findall(r"(?:^\|.*\|\n)+", prose(page), re.MULTILINE):
        lines = [[c.strip() for c in r.split("|")[1:-1]] for r in table.splitlines()]
        if "geutil" in lines[0]:
            assert lines[0][1] == "geutil"
            found += lines[2:]
    return found


def resolve(cited: str) -> Any:
    """Return what a dotted name stands for; a field of a dataclass is its type."""
    parts = re.sub(r"^ge\b", "geutil", cited).split(".")
    element: Any = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], 2):
        if part in getattr(element, "__dataclass_fields__", {}):
            element = element.__dataclass_fields__[part]
        elif hasattr(element, part):
            element = getattr(element, part)
        else:
            element = importlib.import_module(".".join(parts[:index]))
    return element


def unknown_arguments(cited: str, arguments: str | None) -> list[str]:
    named = re.findall(r"(\w+)=", arguments or "")
    if not named:
        return []
    known = inspect.signature(resolve(cited)).parameters
    return [name for name in named if name not in known]


def test_cited_names_exist():
    wrong = []
    for page in PAGES:
        for code in CODE.findall(prose(page)):
            if not re.match(r"(ge|geutil)\.", code):
                continue
            name = re.match(r"[\w.]+", code)[0]
            whole = CITED.fullmatch(code)
            try:
                resolve(name)
                unknown = unknown_arguments(name, whole[2]) if whole else []
            except ModuleNotFoundError as error:
                unknown = [error.name]
            wrong += [(page.name, code, one) for one in unknown]
    assert wrong == []


def test_the_column_of_geutil_holds_names_of_geutil():
    for page in sorted(MIGRATE.glob("*.md")):
        table = rows(page)
        assert len(table) > 10
        for row in table:
            for code in CODE.findall(row[1]):
                assert CITED.fullmatch(code), f"{row[1]} in {page.name}"
            without_code = CODE.sub("", row[1]).strip(", ")
            assert without_code == "", f"{row[1]} in {page.name}"


def test_names_that_do_not_exist_are_found():
    with pytest.raises(ModuleNotFoundError):
        resolve("ge.select_opz")
    with pytest.raises(ModuleNotFoundError):
        resolve("geutil.gradients.Report.peek")
    assert unknown_arguments("ge.copy", "dst_scope=, dst=") == ["dst"]


def test_the_graph_editor_has_a_row_for_each_name():
    listed = [(row[0], row[1]) for row in rows(MIGRATE / "graph_editor.md")]
    for name in sorted(set(ALIASES).union(*NAMES.values())):
        assert listed.count((f"`{name}`", f"`ge.{name}`")) == 1, name


OLD = {
    "quantize": """
    create_training_graph create_eval_graph experimental_create_training_graph
    experimental_create_eval_graph FixedQuantize LastValueQuantize MovingAvgQuantize
    FoldBatchNorms InputToOps ConsumerOperations OpTypePattern OneofPattern GraphMatcher
    match_graph get_op RerouteTensor CreateOrGetQuantizationStep BatchNormGroups
    GetEndpointActivationOp SKIPPED_PREFIXES CopyGraph
    """,
    "memory_saving_gradients": """
    gradients gradients_speed gradients_memory gradients_collection
    MIN_CHECKPOINT_NODE_SIZE capture_ops tf_toposort fast_backward_ops format_ops
    debug_print my_add_control_inputs
    """,
}


def test_the_other_pages_have_a_row_for_each_name():
    for page, old in OLD.items():
        first = " ".join(row[0] for row in rows(MIGRATE / f"{page}.md"))
        missing = [n for n in old.split() if not re.search(rf"[`.]{n}\b", first)]
        assert missing == [], page
