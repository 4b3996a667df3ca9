"""The zoo: its table, its processes, its page, and the quick ones of its models."""

import ast
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.processes import run_python
from tests.thorough import chosen, is_quick, thorough
from zoo import page
from zoo.models import (
    MODELS,
    applications,
    functions,
    images,
    legacy,
    mixed,
    text,
    version1,
)
from zoo.results import DIED, NONE, OK, REFUSED, Cell, judged, none, ok
from zoo.running import Row, read_row, run, take
from zoo.values import apart, arrays, noise, slopes_apart

ROOT = Path(__file__).parents[2]
FAMILIES = (applications, functions, images, legacy, mixed, text, version1)
PLAIN = ("plain.py", "ptq.py", "subject.py", "values.py", "tflite.py", "models")
"""What the process of plain TensorFlow imports."""


def imported(path):
    """Return the packages that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_plain_tensorflow_knows_nothing_of_geutil():
    places = [ROOT / "zoo" / name for name in PLAIN]
    files = [f for p in places for f in ([p] if p.is_file() else sorted(p.iterdir()))]
    names = {n for f in files if f.suffix == ".py" for n in imported(f)}
    ours = {name for name in names if name.split(".")[0] == "zoo"}
    assert not any(name.split(".")[0] == "geutil" for name in names)
    allowed = ("zoo.models", "zoo.subject", "zoo.values")
    assert all(name == "zoo" or name.startswith(allowed) for name in ours)


def test_no_model_hides_another():
    assert len(MODELS) == sum(len(family.BUILDERS) for family in FAMILIES)
    assert len(MODELS) >= 45


def test_how_far_outputs_are_apart():
    for found, wanted, expected in (
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.5),
        ([np.nan, 2.0], [np.nan, 2.0], 0.0),
        ([np.nan, 2.0], [1.0, 2.0], np.inf),
        ([3.0], [2.0], 0.5),
        ([np.inf, 1.0, 3.0], [np.inf, 1.0, 2.0], 1.0),
        ([b"a"], [b"b"], np.inf),
        ([1.0], [1.0, 2.0], np.inf),
    ):
        found, wanted = np.array(found), np.array(wanted)
        assert apart({"y": found}, {"y": wanted}) == expected, (found, wanted)
    # Outputs of other names are paired in order.
    a, b = np.array([1.0, 2.0]), np.array([5.0, 7.0])
    assert apart({"p": a, "q": b}, {"y": a, "z": b}) == 0.0
    with pytest.raises(ValueError, match="instead of"):
        apart({"y": a}, {"y": a, "z": b})


def test_arrays_are_in_the_order_of_their_numbers():
    # A SavedModel's signature gives them in another order in each process.
    names = [f"output_{i}" for i in range(11)]
    shuffled = {name: tf.constant(1.0) for name in [*names[::-2], *names[1::2]]}
    assert list(arrays(shuffled)) == names


def test_gradients_of_one_entry_have_no_range():
    large, small = np.array([100.0, -50.0]), np.array(2.0)
    pairs = [(large, large), (small + 1e-6, small)]
    assert slopes_apart(pairs) == pytest.approx(5e-7, rel=1e-3)
    assert slopes_apart([(np.array([np.nan]), np.array([1.0]))]) == np.inf
    assert slopes_apart([]) == 0.0


def test_noise_is_by_variance():
    wanted = [{"y": np.array([0.0])}, {"y": np.array([2.0])}]
    found = [{"y": np.array([0.5])}, {"y": np.array([2.5])}]
    assert noise(found, wanted) == 0.25
    assert noise([{"y": np.array([1])}], [{"y": np.array([2])}]) is None


def test_the_page_shows_what_is_wrong(tmp_path):
    cells = {
        "open": ok("ok, 3 ways"),
        "fold": none("no norm"),
        "int8": judged(False, "noise 1.0e-02", "4 float ops"),
        "fit": Cell(REFUSED, REFUSED, "ModelError: 'a|b' is\n*not*"),
    }
    Row("Cond", cells=cells, day="2026-01-03", sources=["a"]).write(tmp_path)
    failed = Row("Scan", failed="ValueError: no", day="2026-01-02", sources=["a", "b"])
    failed.write(tmp_path)
    written = page.page(tmp_path)
    assert "Run from 2026-01-02 to 2026-01-03, with 2 states of the sources." in written
    assert "2 models, 4 journeys: 1 as they must be, 1 with nothing to do" in written
    assert "| Cond | ok, 3 ways | no norm |  |  | **noise 1.0e-02** (2) |" in written
    assert "2. Cond, int8: 4 float ops" in written
    assert "3. Cond, fit: ModelError: 'a\\|b' is \\*not\\*" in written
    assert "| Scan | not made (1) |" in written


def test_a_row_comes_back_and_is_not_run_again(tmp_path):
    row = Row("Cond", cells={"open": Cell(DIED, "x"), "int8": judged(False, "x", "y")})
    row.write(tmp_path)
    assert read_row(tmp_path, "Cond") == row
    assert run("Cond", ["open", "int8"], tmp_path) == row


def test_a_model_has_a_limit_of_time(tmp_path):
    row = run("Cond", ["open"], tmp_path, seconds=0.0)
    assert row.failed == "TensorFlow itself took over 0 s"
    assert read_row(tmp_path, "Cond") == row


@thorough
@pytest.mark.parametrize("journeys", [["open"], ["open", "fold"]])
def test_a_process_that_dies_is_a_cell(journeys, tmp_path):
    cells = take("no model", tmp_path, journeys, 100.0, lambda _: None)
    assert list(cells) == journeys
    assert {(c.state, c.text) for c in cells.values()} == {(DIED, "ended with 1")}
    assert cells["open"].note == "KeyError: 'no model'"


QUICK = {
    "UNet": ("open", "fold", "strip", "fit"),
    "WhileV1": ("open", "memory"),
    "Signatures": ("open", "batch size", "speed"),
    "GroupNorm": ("open", "strip", "memory"),
}


@pytest.mark.parametrize("name", chosen(QUICK, "WhileV1"))
def test_quick_models(name, tmp_path):
    entry = MODELS[name]
    if entry.missing:
        pytest.skip(f"{entry.needs} is not installed: it is in the extra zoo")
    journeys = QUICK[name][:1] if is_quick() else QUICK[name]
    done = run_python("-m", "tests.zoo.forked_run", name, tmp_path, *journeys)
    assert done.returncode == 0, done.stderr.decode()
    row = read_row(tmp_path, name)
    wrong = {n: c for n, c in row.cells.items() if c.state not in (OK, NONE)}
    assert not row.failed
    assert not wrong
    assert set(row.cells) == set(journeys)
