"""Batches: what becomes of each model, whatever the others do."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
)
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from parameterized import parameterized

from geutil import model
from geutil.cli import batch_child
from geutil.errors import ArgumentTypeError, GeutilError, ModelError
from geutil.formats import format_by_name
from geutil.graph.tflite_runtime import new_interpreter
from geutil.model import BatchEntry, BatchReport, RayExecutor, batch
from geutil.model.batch_jobs import executors, processes, sources, steps
from geutil.model.batch_jobs.batching import LOCK
from geutil.quantize.calibration.calibrating import BEST
from geutil.quantize.calibration.observers import METHODS
from geutil.quantize.schemes import SCHEMES
from geutil.report.rows import rows_of
from tests.model import batch_steps
from tests.processes import ROOT
from tests.settings import needs_eager
from tests.thorough import thorough

pytestmark = [needs_eager]

PATIENCE = 240
"""Seconds that a process may take here; one takes some four."""


def save_affine(path, output="y", factor=2.0):
    """Save a model of y = factor * x + 1."""

    @tf.function(input_signature=[tf.TensorSpec([None, 2], name="x")])
    def function(x):
        return {output: factor * x + 1.0}

    path.parent.mkdir(parents=True, exist_ok=True)
    model.open(function).save(path, format_by_name(path))


# The text of a pipeline.


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("fold,quantize,tflite", ["fold", "quantize", "tflite"]),
        (["fold", "tflite:float16"], ["fold", "tflite:scheme=float16"]),
        ("tflite=float16:order=least_memory", ["tflite:scheme=float16:order=least_me"]),
        ("batch-size=1", ["batch-size:size=1"]),
        (" fold : strict ".replace(" : ", ":"), ["fold:strict=True"]),
        ("fold:strict=false", ["fold:strict=False"]),
        # Options come in one order, so that equal steps have equal text.
        (
            "quantize:rounding=gptq:weight_bits=4",
            ["quantize:weight_bits=4:rounding=gptq"],
        ),
    ],
)
def test_steps_as_text(text, wanted):
    assert [str(step)[:36] for step in steps.steps_of(text)] == [w[:36] for w in wanted]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the pipeline is empty"),
        ([], "the pipeline is empty"),
        ("folds", "there is no step 'folds'; the steps are fold, strip"),
        ("batch-size", "needs its size, as in 'batch-size=1'"),
        ("batch-size=0", "takes size as a number from 1"),
        ("quantize:weight_bits=17", "takes weight_bits as a number from 2 to 16"),
        ("quantize:int4", "takes scheme as one of int8, int8x4"),
        ("quantize:scheme=int8:int8x4", "gives scheme twice"),
        ("fold:strict=maybe", "takes strict as true or false"),
        ("strip:all", "has no option 'all'; its options: none"),
        ("fold:scope=x", "has no option 'scope'; its options: strict"),
    ],
)
def test_steps_that_are_none(text, said):
    with pytest.raises(ModelError, match=said):
        steps.steps_of(text)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (3, "a pipeline is text"),
        ([3], "a pipeline is text"),
        (lambda m: m, "cannot import .*it cannot be pickled"),
    ],
)
def test_pipelines_of_other_types(value, said):
    with pytest.raises(ArgumentTypeError, match=said):
        steps.steps_of(value)


def test_a_function_of_the_main_script_is_refused(monkeypatch):
    def function(model):
        pass

    function.__module__ = function.__qualname__ = "__main__"
    monkeypatch.setattr(sys.modules["__main__"], "__main__", function, raising=False)
    with pytest.raises(ArgumentTypeError, match="defined in the main script"):
        steps.steps_of(function)


@pytest.mark.parametrize(
    ("text", "with_data", "said"),
    [
        ("fold,quantize,tflite", False, "needs ranges of activations; pass data="),
        ("quantize:int16x8,tflite", False, "needs ranges of activations"),
        ("tflite:int8", False, "put 'quantize' before it"),
        ("quantize:dynamic_range:rounding=gptq", False, "rounds by data"),
        ("fold,tflite", True, "no step of the pipeline reads data"),
    ],
)
def test_pipelines_that_cannot_work(text, with_data, said):
    with pytest.raises(ModelError, match=said):
        steps.check_order(steps.steps_of(text), with_data=with_data)


@parameterized.expand(
    [
        ("fold,quantize,tflite", True),
        ("quantize:dynamic_range,tflite", False),
        ("quantize", False),
        ("tflite:float16", False),
        ("tflite", False),
    ]
)
def test_pipelines_that_can_work(text, with_data):
    steps.check_order(steps.steps_of(text), with_data=with_data)


def test_the_tables_of_steps_agree():
    options = steps.OPTIONS
    assert set(options) == set(batch_child.STEPS)
    assert set(options["tflite"]["scheme"]) == set(SCHEMES)
    assert set(steps.SCHEMES) == {n for n, s in SCHEMES.items() if not s.is_float}
    ranged = {n for n, s in SCHEMES.items() if s.activation_bits is not None}
    assert set(steps._RANGED) == ranged
    assert set(options["quantize"]["method"]) == {BEST, *METHODS}


def test_the_source_of_a_function_is_a_part_of_its_identity(monkeypatch):
    (one,) = steps.steps_of(batch_steps.fault)
    monkeypatch.setattr(steps.inspect, "getsource", lambda function: "another one")
    (other,) = steps.steps_of(batch_steps.fault)
    assert one.pickled == other.pickled
    assert one.identity != other.identity
    (bound,) = steps.steps_of(partial(batch_steps.kill_worker, marker="x"))
    (other,) = steps.steps_of(partial(batch_steps.kill_worker, marker="y"))
    assert bound.identity != other.identity


# What is found.


def found(*paths, leave_out="nowhere"):
    return {
        source.name: source.why_not
        for source in sources.sources_of(list(paths), Path(leave_out))
    }


@pytest.fixture
def tree(tmp_path):
    for name in ("a.pb", "a.keras", "b.pb", "b/c.h5", "d.pbtxt", "e.txt", ".f.pb"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 20)
    (tmp_path / "g.tflite").write_bytes(b"0000TFL3")
    (tmp_path / "h" / "variables").mkdir(parents=True)
    (tmp_path / "h" / "saved_model.pb").write_bytes(b"")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old.pb").write_bytes(b"")
    return tmp_path


def test_a_folder_is_gone_through(tree):
    listed = found(tree, leave_out=tree / "out")
    # Names without suffixes, but where two would be in one folder.
    assert list(listed) == ["a.keras", "a.pb", "b.pb", "b/c", "d", "e", "g", "h"]
    assert listed.pop("e").startswith("a '.txt' file, not one of .h5")
    assert listed.pop("g").startswith("a TensorFlow Lite model")
    assert set(listed.values()) == {""}


def test_patterns_and_lists(tree):
    assert list(found(str(tree / "*.pb"))) == ["a", "b"]
    assert list(found(str(tree / "**" / "*.h5"))) == ["c"]
    assert list(found(tree / "b" / "c.h5", tree / "h", tree / "b" / "c.h5")) == [
        "b/c",
        "h",
    ]
    # It is named, so opening says what it is.
    assert found(tree / "e.txt") == {"e": ""}


@pytest.mark.parametrize("paths", ["nowhere", "nowhere/*.pb", []])
def test_nothing_to_do(paths):
    with pytest.raises(ModelError, match="there is nothing at"):
        sources.sources_of(paths, Path("out"))


@pytest.mark.parametrize("paths", [3, [3]])
def test_what_is_no_path(paths):
    with pytest.raises(ArgumentTypeError):
        sources.sources_of(paths, Path("out"))


def test_data_for_each_model_or_for_all(tree):
    models = sources.sources_of(tree / "b", Path("out"))
    of = partial(sources.data_of, sources=models)
    assert of(None) == {}
    assert of("random")["c"].drawn
    assert of(batch_steps.drawn_data)["c"].pickled
    data = tree / "data"
    data.mkdir()
    assert of(data)["c"].path == data
    (data / "c.npz").write_bytes(b"")
    assert of(data)["c"].path == data / "c.npz"
    # A model that a folder has nothing for gets nothing of the others.
    both = sources.sources_of([tree / "b", tree / "d.pbtxt"], Path("out"))
    (data / "d.npz").write_bytes(b"")
    told = sources.data_of(data, both)
    assert told["b/c"] is None
    assert told["d"].path == data / "d.npz"
    with pytest.raises(ModelError, match="there is no data at"):
        of("nowhere.npz")
    with pytest.raises(ArgumentTypeError, match="data is the path"):
        of(3)


# Plans, with an executor that runs nothing.


class Noted(Executor):
    """Notes jobs, and says of each what it is told to."""

    def __init__(self, *answers):
        self.jobs = []
        self.answers = list(answers)

    def submit(self, fn, /, job):
        self.jobs.append(job.entry.name)
        answer = self.answers.pop(0) if self.answers else None
        future = Future()
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            entry = dataclasses.replace(job.entry, action="done", reason="")
            place = job.output / entry.name
            place.mkdir(parents=True, exist_ok=True)
            (place / "report.json").write_text("{}")
            (place / "result").write_text("it")
            future.set_result(dataclasses.replace(entry, files={"result": 2}))
        return future


@pytest.fixture
def three(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name in "cab":
        (folder / f"{name}.pb").write_bytes(b"model")
    return folder


def plan(three, executor, pipeline="fold", output="out", **options):
    return batch(three, pipeline, three.parent / output, executor=executor, **options)


def test_entries_are_in_the_order_of_names(three):
    report = plan(three, Noted())
    assert [entry.name for entry in report.entries] == ["a", "b", "c"]
    assert BatchReport.load(three.parent / "out") == report
    assert [row.what for row in rows_of(report).rows] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("change", "again"),
    [
        (lambda three: None, []),
        (lambda three: (three / "a.pb").write_bytes(b"other model"), ["a"]),
        (lambda three: os.utime(three / "b.pb", (1, 1)), ["b"]),
        (lambda three: (three.parent / "out" / "c" / "result").unlink(), ["c"]),
        (lambda three: (three / "d.pb").write_bytes(b"model"), ["d"]),
    ],
    ids=["nothing", "content", "time", "result", "new"],
)
def test_what_is_done_is_left_out(three, change, again):
    plan(three, Noted())
    change(three)
    executor = Noted()
    report = plan(three, executor)
    assert executor.jobs == again
    actions = {entry.name: entry.action for entry in report.entries}
    assert {n for n, action in actions.items() if action == "done"} == set(again)
    assert {actions[n] for n in actions if n not in again} <= {"done before"}
    assert len(report.done) == len(report.entries)


def test_what_else_lets_all_be_done_again(three, tmp_path):
    plan(three, Noted())
    for options in (
        {"pipeline": "fold:strict"},
        {"pipeline": batch_steps.fault},
        {"resume": False},
        {"signature": "serve"},
    ):
        executor = Noted()
        plan(three, executor, **options)
        assert executor.jobs == ["a", "b", "c"]


def test_what_failed_is_done_again(three):
    lost = RuntimeError("the worker died")
    report = plan(three, Noted(lost, None, None, lost, lost))
    assert [entry.action for entry in report.entries] == ["lost", "done", "done"]
    assert report.entries[0].reason == (
        "lost 3 times by its worker; RuntimeError: the worker died"
    )
    assert [entry.name for entry in report.undone] == ["a"]
    executor = Noted()
    assert not plan(three, executor).undone
    assert executor.jobs == ["a"]


def test_a_lost_job_begins_again_and_the_report_says_so(three):
    report = plan(three, Noted(None, RuntimeError("the worker died")))
    assert [entry.tries for entry in report.entries] == [1, 2, 1]
    assert report.notes == ("'b' was begun 2 times (RuntimeError: the worker died)",)
    assert "note: 'b' was begun 2 times" in str(report)


def test_data_that_is_missing_for_one_model(three, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.npz").write_bytes(b"")
    executor = Noted()
    report = plan(three, executor, "quantize", data=data)
    assert executor.jobs == ["a"]
    assert report.entries[1].reason == "the folder of data has no b.npz"


def test_a_listed_path_that_is_not_there(three):
    executor = Noted()
    paths = [three / "a.pb", three / "missing.pb"]
    report = batch(paths, "fold", three.parent / "out", executor=executor)
    assert [e.action for e in report.entries] == ["done", "failed"]
    assert executor.jobs == ["a"]


def test_a_broken_pool_is_no_loss_of_what_was_not_begun(three, monkeypatch):
    rest = Noted()
    monkeypatch.setattr(
        executors.JobRunner, "_submit_here", lambda self, job: rest.submit(None, job)
    )
    broken = BrokenExecutor("it broke")
    report = plan(three, Noted(None, broken, broken))
    assert [entry.tries for entry in report.entries] == [1, 1, 1]
    assert rest.jobs == ["b", "c"]
    assert len(report.notes) == 1
    assert report.notes[0].startswith("the executor broke (BrokenExecutor: it broke)")


def test_the_folder_of_results_may_be_among_the_models(three):
    executor = Noted()
    output = three / "results"
    batch(three, "fold", output, executor=executor)
    (output / "a" / "a.pb").write_bytes(b"a result")
    assert len(batch(three, "fold", output, executor=Noted()).entries) == 3


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"executor": "ray"}, ArgumentTypeError, "executor= is an executor"),
        ({"executor": Noted(), "workers": 2}, ModelError, "the executor has its own"),
        ({"workers": 0}, ModelError, "at least one is needed"),
        ({"timeout": 0}, ModelError, "pass seconds, or None"),
        ({"pipeline": "tflite:int8"}, ModelError, "put 'quantize' before"),
        ({"data": "random"}, ModelError, "no step of the pipeline reads data"),
    ],
)
def test_refusals(three, options, error, said):
    given = {"pipeline": "fold", **options}
    with pytest.raises(error, match=said):
        batch(three, given.pop("pipeline"), three.parent / "out", **given)
    assert not (three.parent / "out").exists()


def test_what_is_no_result_is_not_replaced(three):
    place = three.parent / "out" / "b"
    place.mkdir(parents=True)
    (place / "precious").write_text("it")
    executor = Noted()
    with pytest.raises(ModelError, match="is no result of a batch"):
        plan(three, executor)
    assert executor.jobs == []
    assert (place / "precious").read_text() == "it"


def test_two_calls_do_not_write_to_one_folder(three):
    output = three.parent / "out"
    output.mkdir()
    with (output / LOCK).open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match="another batch writes to"):
            plan(three, Noted())
    assert not plan(three, Noted()).undone
    assert not (output / LOCK).exists()


PARTS = st.sampled_from(["a", "b", "a.b", "a.pb", "b.a"])
SUFFIXES = st.sampled_from([".pb", ".h5", ".keras", ".b.pb", ".pb.keras", ".pb.pb"])


@settings(deadline=None)
@given(
    st.sets(
        st.tuples(st.lists(PARTS, max_size=3), PARTS, SUFFIXES).map(
            lambda parts: Path("/top", *parts[0], parts[1] + parts[2])
        ),
        min_size=1,
    )
)
def test_the_folder_of_one_model_is_not_in_that_of_another(paths):
    # No file is a folder, too.
    files = [path for path in paths if not any(path in p.parents for p in paths)]
    names = sources._names(sorted(files))
    places = [Path(name) for name in names.values()]
    assert len(set(places)) == len(files)
    assert not any(one in other.parents for one in places for other in places)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("nonsense", "is no report of a batch"),
        ("[]", "is no report of a batch"),
        ('{"kind": "geutil batch", "version": 9}', "a report of version 9"),
        ('{"kind": "geutil batch", "version": 1}', "a damaged report"),
    ],
)
def test_reports_that_are_none(tmp_path, content, said):
    (tmp_path / "batch.json").write_text(content)
    with pytest.raises(ModelError, match=said):
        BatchReport.load(tmp_path)
    with pytest.raises(ModelError, match="there is no report of a batch"):
        BatchReport.load(tmp_path / "elsewhere")


# Processes.


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """Return a folder with good models, bad ones and what is none."""
    folder = tmp_path_factory.mktemp("zoo")
    save_affine(folder / "good", factor=2.0)
    save_affine(folder / "sub" / "good.pb", factor=3.0)
    for name in batch_steps.FAULTS:
        save_affine(folder / name, name)
    (folder / "damaged.pb").write_bytes(b"nonsense")
    (folder / "notes.txt").write_text("it")
    return folder


@pytest.fixture(scope="module")
def outcome(zoo, tmp_path_factory):
    """Return the report of a batch over it, two at once, and the folder."""
    output = tmp_path_factory.mktemp("results") / "out"
    pipeline = [
        batch_steps.fault,
        "strip,tflite,save=graph_def",
        batch_steps.text_bytes,
    ]
    return batch(zoo, pipeline, output, workers=2, timeout=30), output


def test_each_model_has_its_entry_whatever_the_others_do(outcome):
    report, output = outcome
    told = {entry.name: (entry.action, entry.step) for entry in report.entries}
    fault = "tests.model.batch_steps.fault"
    assert told == {
        "abort": ("crashed", fault),
        "damaged": ("failed", "open"),
        "good": ("done", ""),
        "hang": ("timed out", fault),
        "notes": ("not a model", ""),
        "refuse": ("failed", fault),
        "sub/good": ("done", ""),
    }
    by_name = {entry.name: entry for entry in report.entries}
    assert by_name["abort"].reason.startswith("the process was ended by SIGABRT")
    assert by_name["refuse"].reason == "ModelError: it is refused"
    assert "longer than 30 s" in by_name["hang"].reason
    assert 30 <= by_name["hang"].seconds < 2 * 30
    assert "damaged.pb" in by_name["damaged"].reason
    assert "2 of 6 model(s) done, 1 crashed, 2 failed, 1 timed out" in str(report)
    # TensorFlow alone takes more than 100 MB.
    assert all(e.peak_bytes > 1e8 for e in report.entries if e.name != "notes")


def test_files_compute_what_the_models_do(outcome):
    report, output = outcome
    x = np.array([[0.5, -2.0]], np.float32)
    for name, factor in (("good", 2.0), ("sub/good", 3.0)):
        place = output / name
        interpreter = new_interpreter((place / "good.tflite").read_bytes())
        interpreter.allocate_tensors()
        interpreter.set_tensor(interpreter.get_input_details()[0]["index"], x)
        interpreter.invoke()
        y = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
        np.testing.assert_allclose(y, factor * x + 1.0)
        y = model.open(place / "good.pb").run(x=x)
        np.testing.assert_allclose(*y.values(), factor * x + 1.0)
        assert (place / "good.bin").read_bytes() == b"some text"


def test_what_is_written(outcome):
    report, output = outcome
    for entry in report.entries:
        there = output / entry.name
        if entry.action == "not a model":
            assert not there.exists()
            continue
        written = {path.name for path in there.iterdir()}
        assert written == {"log.txt", "report.json", *entry.files}
        assert {n: (there / n).stat().st_size for n in entry.files} == entry.files
        told = json.loads((there / "report.json").read_text())
        assert told["action"] == entry.action
        assert [step["name"] for step in told["steps"]] == [s.name for s in entry.steps]
    assert "it is refused" in (output / "refuse" / "log.txt").read_text()
    assert BatchReport.load(output) == report
    assert not (output / ".batch").exists()


def test_the_steps_of_an_entry(outcome):
    entry = next(e for e in outcome[0].entries if e.name == "good")
    assert [step.name for step in entry.steps] == [
        "open",
        "tests.model.batch_steps.fault",
        "strip",
        "tflite",
        "save:format=graph_def",
        "tests.model.batch_steps.text_bytes",
    ]
    assert entry.steps[2].text == "nothing to strip"
    assert sum(step.seconds for step in entry.steps) < entry.seconds


def test_quantized_with_data_for_each_model_and_a_page(tmp_path):
    save_affine(tmp_path / "in" / "good")
    report = batch(
        tmp_path / "in",
        "quantize:method=min_max",
        tmp_path / "out",
        data=batch_steps.drawn_data,
        pages=True,
    )
    (entry,) = report.entries
    assert entry.action == "done", entry
    assert list(entry.files) == ["good", "report.html"]
    assert "range(s) set, min_max of 1 batch(es)" in entry.steps[1].text
    assert "warning" not in entry.steps[1].text
    quantized = model.open(tmp_path / "out" / "good" / "good")
    kinds = {op.type for op in quantized.graph.get_operations()}
    assert any(kind.startswith("FakeQuant") for kind in kinds)
    assert "as it was" in (tmp_path / "out" / "good" / "report.html").read_text()


def test_random_data_is_told_of(tmp_path):
    save_affine(tmp_path / "in" / "good")
    report = batch(
        tmp_path / "in",
        ["quantize", batch_steps.number],
        tmp_path / "out",
        data="random",
    )
    (entry,) = report.entries
    assert "warning: its ranges are those of random inputs" in entry.steps[1].text
    assert entry.action == "failed"
    assert "returned a int; return a model, bytes" in entry.reason


def test_a_users_threads(tmp_path):
    save_affine(tmp_path / "in" / "good")
    with ThreadPoolExecutor(1) as executor:
        report = batch(tmp_path / "in", "strip", tmp_path / "out", executor=executor)
        assert executor.submit(sum, [1, 2]).result() == 3
    assert [entry.action for entry in report.entries] == ["done"]


def killing(folder, count):
    """Save models, one of which has its worker killed; return pipeline and marker."""
    for index in range(count):
        save_affine(folder / f"m{index:02}", "kill" if index == 1 else "y", index)
    marker = folder.parent / "marker"
    return [partial(batch_steps.kill_worker, marker=str(marker)), "tflite"], marker


def check_killed(report, marker, count):
    assert [entry.action for entry in report.entries] == ["done"] * count, report
    assert report.entries[1].tries == 2
    assert any(note.startswith("'m01' was begun 2 times") for note in report.notes)
    # The process did not outlive its worker.
    child, worker = map(int, marker.read_text().split())
    assert not is_running(child)
    assert not is_running(worker)


def is_running(pid):
    with contextlib.suppress(OSError):
        # A process that ended may wait for its parent, as a zombie.
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    return False


def test_a_server_of_processes_that_is_killed(tmp_path):
    pipeline, marker = killing(tmp_path / "in", 2)
    report = batch(tmp_path / "in", pipeline, tmp_path / "out", workers=1)
    check_killed(report, marker, 2)


def test_processes_without_a_server(tmp_path, monkeypatch):
    monkeypatch.setattr(executors, "can_fork", lambda: False)
    save_affine(tmp_path / "in" / "good")
    report = batch(tmp_path / "in", "strip", tmp_path / "out")
    assert [entry.action for entry in report.entries] == ["done"]


def test_a_server_with_threads_does_not_fork(tmp_path):
    code = (
        "import pathlib, socket, sys, threading, time\n"
        "from geutil.model.batch_jobs.processes import serve\n"
        "if sys.argv[2] == 'threads':\n"
        "    threading.Thread(target=time.sleep, args=[600], daemon=True).start()\n"
        "serve(socket.socket(fileno=int(sys.argv[1])), print)\n"
    )
    for threads in ("threads", "none"):
        address = str(tmp_path / threads)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            number = listener.fileno()
            server = subprocess.Popen(
                [sys.executable, "-c", code, str(number), threads],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                pass_fds=[number],
            )
        if threads == "threads":
            with pytest.raises(ConnectionError, match="does not fork"):
                processes.ForkedProcess(tmp_path, address)
        else:
            process = processes.ForkedProcess(tmp_path, address)
            while process.code is None:
                process.wait(1.0)
            process.close()
            assert process.code == 0
            assert (tmp_path / "log.txt").read_text().strip() == str(tmp_path)
        server.stdin.close()
        assert server.wait(PATIENCE) == 0


def test_what_no_server_is_at_is_started(tmp_path):
    with pytest.raises(OSError):
        processes.ForkedProcess(tmp_path, str(tmp_path / "nothing"))


def test_a_users_processes_one_of_which_is_killed(tmp_path):
    pipeline, marker = killing(tmp_path / "in", 3)
    with ProcessPoolExecutor(2) as executor:
        report = batch(tmp_path / "in", pipeline, tmp_path / "out", executor=executor)
    assert "the executor broke (BrokenProcessPool" in report.notes[0]
    # Two were running at most: the first may have ended, and the third begun for it.
    tries = [entry.tries for entry in report.entries]
    assert tries[1] == 2 and sum(tries) in (4, 5), tries
    assert [entry.action for entry in report.entries] == ["done"] * 3, report
    assert not is_running(int(marker.read_text().split()[0]))


@contextlib.contextmanager
def ray_cluster():
    ray = pytest.importorskip("ray", reason="the extra ray is not installed")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        with RayExecutor(num_cpus=1) as executor:
            yield executor
    finally:
        ray.shutdown()


@contextlib.contextmanager
def dask_cluster():
    distributed = pytest.importorskip("distributed", reason="no extra dask")
    cluster = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None
    )
    with cluster, distributed.Client(cluster) as client:
        yield client.get_executor()


@pytest.mark.parametrize(
    ("cluster", "count"),
    [
        (ray_cluster, 3),
        (dask_cluster, 3),
        pytest.param(ray_cluster, 40, marks=thorough),
        pytest.param(dask_cluster, 40, marks=thorough),
    ],
)
def test_a_cluster_of_two_workers_one_of_which_is_killed(
    tmp_path, monkeypatch, cluster, count
):
    # Workers are other processes, and import what is here.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pipeline, marker = killing(tmp_path / "in", count)
    with cluster() as executor:
        report = batch(tmp_path / "in", pipeline, tmp_path / "out", executor=executor)
    check_killed(report, marker, count)
    for entry in report.entries:
        assert list(entry.files) == [f"{entry.name}.tflite"]


def test_the_executor_of_ray():
    with ray_cluster() as executor:
        assert executor.submit(sum, [1, 2]).result() == 3
        with pytest.raises(ZeroDivisionError):
            executor.submit(divmod, 1, 0).result()
        future = executor.submit(time.sleep, 600)
        executor.shutdown(cancel_futures=True)
        with pytest.raises(CancelledError):
            future.result()
        assert future.cancelled()


def test_ray_without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(GeutilError, match=r"pip install 'geutil\[ray\]'"):
        RayExecutor()


def test_a_stopped_batch_goes_on(tmp_path):
    save_affine(tmp_path / "in" / "good")
    marker = tmp_path / "marker"
    code = (
        "from functools import partial\n"
        "from geutil.model import batch\n"
        "from tests.model.batch_steps import note_and_hang\n"
        f"step = partial(note_and_hang, marker={str(marker)!r})\n"
        f"batch({str(tmp_path / 'in')!r}, step, {str(tmp_path / 'out')!r})\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE
    )
    end = time.monotonic() + PATIENCE
    while not (marker.exists() and marker.read_text()) and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE)
    assert b"KeyboardInterrupt" in said
    assert not is_running(int(marker.read_text()))
    (entry,) = BatchReport.load(tmp_path / "out").entries
    assert entry.action == "stopped"
    executor = Noted()
    assert batch(tmp_path / "in", "strip", tmp_path / "out", executor=executor).done
    assert executor.jobs == ["good"]
    assert not (tmp_path / "out" / ".batch").exists()


def test_forty_models_on_two_workers(tmp_path):
    for index in range(40):
        save_affine(tmp_path / "in" / f"m{index:02}", factor=index)
    report = batch(tmp_path / "in", "tflite", tmp_path / "out", workers=2)
    assert [entry.action for entry in report.entries] == ["done"] * 40
    assert [e.name for e in report.entries] == [f"m{i:02}" for i in range(40)]


def test_entries_as_text():
    entry = BatchEntry("net", "net.pb", "crashed", "SIGABRT", "fold", tries=2)
    assert str(entry) == "crashed (try 2): at 'fold': SIGABRT"
    assert str(dataclasses.replace(entry, action="done", files={"a": 1000})) == (
        "done (try 2): a 1,000 bytes"
    )
