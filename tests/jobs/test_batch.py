"""Batches: what becomes of each model, whatever the others do."""

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from geutil import child_processes, model
from geutil.cli import batch_child
from geutil.cli.commands import app
from geutil.cli.main import run
from geutil.errors import ArgumentTypeError, GeutilError, ModelError
from geutil.formats import format_by_name
from geutil.jobs import batch_inputs, batches, model_job
from geutil.jobs.batches import LOCK
from geutil.model import BatchEntry, BatchReport, RayExecutor, batch
from geutil.quantize.calibration.calibration import BEST
from geutil.quantize.calibration.trials import METHODS
from geutil.quantize.spec import SCHEMES
from geutil.report.rows import rows_of
from tests.interpreter import new_interpreter
from tests.jobs import batch_steps, light_child
from tests.model.refusal_tables import not_refused
from tests.processes import ROOT
from tests.settings import needs_eager
from tests.thorough import examples, thorough

pytestmark = [needs_eager]


def save_affine(path, output="y", factor=2.0):
    """Save a model of y = factor * x + 1."""

    @tf.function(input_signature=[tf.TensorSpec([None, 2], name="x")])
    def function(x):
        return {output: factor * x + 1.0}

    path.parent.mkdir(parents=True, exist_ok=True)
    model.open(function).save(path, format_by_name(path))


# The text of a pipeline.


def test_steps_as_text():
    for text, *wanted in (
        ("fold,quantize,tflite", "fold", "quantize", "tflite"),
        (["fold", "tflite:float16"], "fold", "tflite:scheme=float16"),
        ("tflite=float16:order=converter", "tflite:scheme=float16:order=converter"),
        ("batch-size=1", "batch-size:size=1"),
        ("fold:strict", "fold:strict=True"),
        ("fold:strict=false", "fold:strict=False"),
        # Options come in one order, so that equal steps have equal text.
        (
            "quantize:rounding=gptq:weight_bits=4",
            "quantize:weight_bits=4:rounding=gptq",
        ),
    ):
        assert [str(step) for step in batch_inputs.steps_of(text)] == wanted


def of_the_main_script(model):
    pass


def test_steps_that_are_none(monkeypatch):
    cases = {
        "": "the pipeline is empty",
        (): "the pipeline is empty",
        "folds": "there is no step 'folds'; the steps are fold, strip",
        "batch-size": "needs its size, as in 'batch-size=1'",
        "batch-size=0": "takes size as a number from 1",
        "quantize:weight_bits=17": "takes weight_bits as a number from 2 to 16",
        "quantize:int4": "takes scheme as one of int8, int8x4",
        "quantize:scheme=int8:int8x4": "gives scheme twice",
        "fold:strict=maybe": "takes strict as true or false",
        "strip:all": "has no option 'all'; its options: none",
        "fold:scope=x": "has no option 'scope'; its options: strict",
    }
    assert not_refused(ModelError, calls_of(batch_inputs.steps_of, cases)) == {}
    of_the_main_script.__module__ = of_the_main_script.__qualname__ = "__main__"
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__main__", of_the_main_script, raising=False)
    cases = {
        3: "a pipeline is text",
        (3,): "a pipeline is text",
        lambda m: m: "cannot import .*it cannot be pickled",
        of_the_main_script: "defined in the main script",
    }
    assert not_refused(ArgumentTypeError, calls_of(batch_inputs.steps_of, cases)) == {}


def calls_of(function, messages):
    return [(value, partial(function, value), said) for value, said in messages.items()]


NEEDS_DATA = "needs ranges of activations; pass data="


def test_pipelines_that_can_work():
    for text, said, said_with_data in (
        ("fold,quantize,tflite", NEEDS_DATA, None),
        ("quantize:int16x8,tflite", NEEDS_DATA, None),
        ("tflite:int8", "put 'quantize' before it", "put 'quantize' before it"),
        ("quantize:dynamic_range:rounding=gptq", "rounds by data", None),
        ("quantize:dynamic_range,tflite", None, None),
        ("quantize", None, None),
        ("fold,tflite:float16", None, "no step of the pipeline reads data"),
    ):
        for with_data, message in ((False, said), (True, said_with_data)):
            check = partial(
                batch_inputs.check_order,
                batch_inputs.steps_of(text),
                with_data=with_data,
            )
            if message is None:
                check()
            else:
                assert not_refused(ModelError, [(text, check, message)]) == {}


def test_the_tables_of_steps_agree():
    options = batch_inputs.OPTIONS
    assert set(options) == set(batch_child.STEPS)
    assert set(options["tflite"]["scheme"]) == set(SCHEMES)
    assert set(batch_inputs.SCHEMES) == {
        n for n, s in SCHEMES.items() if not s.is_float
    }
    ranged = {n for n, s in SCHEMES.items() if s.activation_bits is not None}
    assert set(batch_inputs._RANGED) == ranged
    assert set(options["quantize"]["method"]) == {BEST, *METHODS}


def test_the_source_of_a_function_is_a_part_of_its_identity(monkeypatch):
    (one,) = batch_inputs.steps_of(batch_steps.number)
    monkeypatch.setattr(
        batch_inputs.inspect, "getsource", lambda function: "another one"
    )
    (other,) = batch_inputs.steps_of(batch_steps.number)
    assert one.pickled == other.pickled
    assert one.identity != other.identity
    (bound,) = batch_inputs.steps_of(partial(batch_steps.fault, marker="x"))
    (other,) = batch_inputs.steps_of(partial(batch_steps.fault, marker="y"))
    assert bound.identity != other.identity


# What is found.


def found(*paths, leave_out="nowhere"):
    return {
        source.name: source.why_not
        for source in batch_inputs.sources_of(list(paths), Path(leave_out))
    }


@pytest.fixture
def tree(tmp_path):
    for name in ("a.pb", "a.keras", "b.pb", "b/c.h5", "d.pbtxt", "e.txt", ".f.pb"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 20)
    (tmp_path / "g.tflite").write_bytes(b"0000TFL3")
    (tmp_path / "i.bin").write_bytes(b"0000TFL3")
    (tmp_path / "h" / "variables").mkdir(parents=True)
    (tmp_path / "h" / "saved_model.pb").write_bytes(b"")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old.pb").write_bytes(b"")
    return tmp_path


def test_a_folder_is_gone_through(tree):
    listed = found(tree, leave_out=tree / "out")
    # Names without suffixes, but where two would be in one folder.
    assert list(listed) == ["a.keras", "a.pb", "b.pb", "b/c", "d", "e", "g", "h", "i"]
    assert listed.pop("e").startswith("a '.txt' file, not one of .h5")
    assert listed.pop("i").startswith("a TensorFlow Lite model")
    assert set(listed.values()) == {""}


def test_patterns_and_lists(tree):
    assert list(found(str(tree / "*.pb"))) == ["a", "b"]
    assert list(found(str(tree / "**" / "*.h5"))) == ["c"]
    inner = tree / "b" / "c.h5"
    assert list(found(inner, tree / "h", inner)) == ["b/c", "h"]
    # It is named, so opening says what it is.
    assert found(tree / "e.txt") == {"e": ""}
    for paths in ("nowhere", "nowhere/*.pb", []):
        with pytest.raises(ModelError, match="there is nothing at"):
            batch_inputs.sources_of(paths, Path("out"))
    for paths in (3, [3]):
        with pytest.raises(ArgumentTypeError):
            batch_inputs.sources_of(paths, Path("out"))


def test_data_for_each_model_or_for_all(tree):
    models = batch_inputs.sources_of(tree / "b", Path("out"))
    of = partial(batch_inputs.data_of, sources=models)
    assert of(None) == {}
    assert of("random")["c"].drawn
    assert of(batch_steps.drawn_data)["c"].pickled
    data = tree / "data"
    data.mkdir()
    assert of(data)["c"].path == data
    (data / "c.npz").write_bytes(b"")
    assert of(data)["c"].path == data / "c.npz"
    # A model that a folder has nothing for gets nothing of the others.
    both = batch_inputs.sources_of([tree / "b", tree / "d.pbtxt"], Path("out"))
    (data / "d.npz").write_bytes(b"")
    told = batch_inputs.data_of(data, both)
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


def test_what_is_done_is_left_out(three):
    output = three.parent / "out"
    report = plan(three, Noted())
    assert [entry.name for entry in report.entries] == ["a", "b", "c"]
    assert BatchReport.load(output) == report
    assert [row.what for row in rows_of(report).rows] == ["a", "b", "c"]
    for change, again in (
        (lambda: None, []),
        (lambda: (three / "a.pb").write_bytes(b"other model"), ["a"]),
        (lambda: os.utime(three / "b.pb", (1, 1)), ["b"]),
        ((output / "c" / "result").unlink, ["c"]),
        (lambda: (three / "d.pb").write_bytes(b"model"), ["d"]),
    ):
        change()
        executor = Noted()
        report = plan(three, executor)
        assert executor.jobs == again
        actions = {entry.name: entry.action for entry in report.entries}
        assert {n for n, action in actions.items() if action == "done"} == set(again)
        assert {actions[n] for n in actions if n not in again} <= {"done before"}
        assert len(report.done) == len(report.entries)
    for options in (
        {"resume": False},
        {"signature": "serve"},
        {"pipeline": "fold:strict"},
        {"pipeline": batch_steps.number},
    ):
        executor = Noted()
        plan(three, executor, **options)
        assert executor.jobs == ["a", "b", "c", "d"]


def test_what_failed_is_done_again(three):
    lost = RuntimeError("the worker died")
    report = plan(three, Noted(lost, lost, None, lost, None, lost))
    assert [entry.action for entry in report.entries] == ["lost", "done", "done"]
    assert [entry.tries for entry in report.entries] == [3, 2, 1]
    assert report.entries[0].reason == (
        "lost 3 times by its worker; RuntimeError: the worker died"
    )
    assert report.notes == ("'b' was begun 2 times (RuntimeError: the worker died)",)
    assert "note: 'b' was begun 2 times" in str(report)
    assert [entry.name for entry in report.undone] == ["a"]
    executor = Noted()
    assert not plan(three, executor).undone
    assert executor.jobs == ["a"]


def test_data_or_a_model_that_is_missing(three, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.npz").write_bytes(b"")
    executor = Noted()
    report = plan(three, executor, "quantize", data=data)
    assert executor.jobs == ["a"]
    assert report.entries[1].reason == "the folder of data has no b.npz"
    paths = [three / "b.pb", three / "missing.pb"]
    report = batch(paths, "fold", three.parent / "listed", executor=executor)
    assert [e.action for e in report.entries] == ["done", "failed"]
    assert executor.jobs == ["a", "b"]


def test_refusals(three):
    def call(**options):
        return batch(three, options.pop("pipeline", "fold"), output, **options)

    output = three.parent / "out"
    noted = {"executor": Noted(), "workers": 2}
    cases = [
        (noted, partial(call, **noted), "the executor has its own"),
        ("workers", partial(call, workers=0), "at least one is needed"),
        ("timeout", partial(call, timeout=0), "pass seconds, or None"),
        ("steps", partial(call, pipeline="tflite:int8"), "put 'quantize' before"),
        ("data", partial(call, data="random"), "no step of the pipeline reads data"),
    ]
    assert not_refused(ModelError, cases) == {}
    with pytest.raises(ArgumentTypeError, match="executor= is an executor"):
        call(executor="ray")
    assert not output.exists()


def test_folders_of_results(three):
    output = three.parent / "out"
    output.mkdir()
    with (output / LOCK).open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match="another batch writes to"):
            plan(three, Noted())
    # What is no result is not replaced.
    (output / "b").mkdir()
    (output / "b" / "precious").write_text("it")
    executor = Noted()
    with pytest.raises(ModelError, match="is no result of a batch"):
        plan(three, executor)
    assert executor.jobs == []
    assert (output / "b" / "precious").read_text() == "it"
    # The folder may be among the models.
    for _ in range(2):
        report = batch(three, "fold", three / "results", executor=Noted())
        assert len(report.entries) == 3 and not report.undone
        (three / "results" / "a" / "a.pb").write_bytes(b"a result")
    assert not (three / "results" / LOCK).exists()


PARTS = st.sampled_from(["a", "b", "a.b", "a.pb", "b.a"])
SUFFIXES = st.sampled_from([".pb", ".h5", ".keras", ".b.pb", ".pb.keras", ".pb.pb"])


@examples(100)
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
    names = batch_inputs._names(sorted(files))
    places = [Path(name) for name in names.values()]
    assert len(set(places)) == len(files)
    assert not any(one in other.parents for one in places for other in places)


def test_reports_that_are_none(tmp_path):
    for content, said in (
        ("nonsense", "is no report of a batch"),
        ("[]", "is no report of a batch"),
        ('{"kind": "geutil batch", "version": 9}', "a report of version 9"),
        ('{"kind": "geutil batch", "version": 1}', "a damaged report"),
    ):
        (tmp_path / "batch.json").write_text(content)
        load = partial(BatchReport.load, tmp_path)
        assert not_refused(ModelError, [(content, load, said)]) == {}
    with pytest.raises(ModelError, match="there is no report of a batch"):
        BatchReport.load(tmp_path / "elsewhere")


# Processes.


@pytest.fixture(scope="module")
def server():
    """Return a stand-in for servers of processes, behind which there is one for all."""
    one = model_job.ForkServer()
    yield lambda: SimpleNamespace(address=one.address, close=lambda: None)
    one.close()


@pytest.fixture
def one_server(server, monkeypatch):
    monkeypatch.setattr(batches, "ForkServer", server)


@pytest.fixture
def affine(tmp_path):
    save_affine(tmp_path / "in" / "good")
    return tmp_path / "in"


def has_ended(pid):
    """Wait for the end of a process that was killed, not as long as one that hangs."""
    limit = time.monotonic() + 300
    while time.monotonic() < limit:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        # A process that ended may wait for its parent, as a zombie.
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


TIMEOUT = 3600.0


def pass_time_for_what_hangs(patch, marker):
    """Let the clock of the thread that watches the hanging process go far ahead."""
    thread = threading.local()
    wait = model_job.ForkedProcess.wait

    def wait_and_pass_time(process, seconds):
        wait(process, seconds)
        hangs = marker.exists() and marker.read_text() == str(process.pid)
        thread.ahead = 2 * TIMEOUT if hangs else 0.0

    def monotonic():
        return time.monotonic() + getattr(thread, "ahead", 0.0)

    patch.setattr(model_job.ForkedProcess, "wait", wait_and_pass_time)
    clock = SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
    for module in (child_processes, model_job):
        patch.setattr(module, "time", clock)


@pytest.fixture(scope="module")
def outcome(server, tmp_path_factory):
    """Return the report of a batch over good models and bad ones, and the folder."""
    folder = tmp_path_factory.mktemp("batch")
    zoo, output, marker = folder / "in", folder / "out", folder / "marker"
    save_affine(zoo / "good", factor=2.0)
    save_affine(zoo / "sub" / "good.pb", factor=3.0)
    for name in ("abort", "hang", "refuse"):
        save_affine(zoo / name, name)
    (zoo / "damaged.pb").write_bytes(b"nonsense")
    (zoo / "notes.txt").write_text("it")
    pipeline = [
        partial(batch_steps.fault, marker=str(marker)),
        "strip,tflite,save=graph_def",
        batch_steps.text_bytes,
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "ForkServer", server)
        pass_time_for_what_hangs(patch, marker)
        report = batch(zoo, pipeline, output, workers=2, timeout=TIMEOUT)
    assert has_ended(int(marker.read_text()))
    return report, output


def test_each_model_has_its_entry_whatever_the_others_do(outcome):
    report, output = outcome
    told = {entry.name: (entry.action, entry.step) for entry in report.entries}
    fault = "tests.jobs.batch_steps.fault"
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
    assert list(by_name) == sorted(by_name)
    assert by_name["abort"].reason.startswith("the process was ended by SIGABRT")
    assert by_name["refuse"].reason == "ModelError: it is refused"
    assert "longer than 3600 s" in by_name["hang"].reason
    assert by_name["hang"].seconds >= TIMEOUT > by_name["good"].seconds
    assert "damaged.pb" in by_name["damaged"].reason
    assert "2 of 6 model(s) done, 1 crashed, 2 failed, 1 timed out" in str(report)
    # TensorFlow alone takes more than 100 MB.
    assert all(e.peak_bytes > 1e8 for e in report.entries if e.name != "notes")


def test_files_compute_what_the_models_do(outcome):
    report, output = outcome
    x = np.array([[0.5, -2.0]], np.float32)
    for name, factor in (("good", 2.0), ("sub/good", 3.0)):
        place = output / name
        blob = (place / "good.tflite").read_bytes()
        (y,) = new_interpreter(blob).get_signature_runner()(x=x).values()
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
    (good,) = (entry for entry in report.entries if entry.name == "good")
    assert [step.name for step in good.steps] == [
        "open",
        "tests.jobs.batch_steps.fault",
        "strip",
        "tflite",
        "save:format=graph_def",
        "tests.jobs.batch_steps.text_bytes",
    ]
    assert good.steps[2].text == "nothing to strip"
    assert sum(step.seconds for step in good.steps) < good.seconds


@pytest.mark.usefixtures("one_server")
def test_quantized_with_data_for_each_model_and_a_page(affine):
    output = affine.parent / "out"
    pipeline, data = "quantize:method=min_max", batch_steps.drawn_data
    (entry,) = batch(affine, pipeline, output, data=data, pages=True).entries
    assert entry.action == "done", entry
    assert list(entry.files) == ["good", "report.html"]
    assert "range(s) set, min_max of 1 batch(es)" in entry.steps[1].text
    assert "warning" not in entry.steps[1].text
    quantized = model.open(output / "good" / "good")
    kinds = {op.type for op in quantized.graph.get_operations()}
    assert any(kind.startswith("FakeQuant") for kind in kinds)
    assert "as it was" in (output / "good" / "report.html").read_text()
    pipeline = ["quantize", batch_steps.number]
    (entry,) = batch(affine, pipeline, output, data="random").entries
    assert "warning: its ranges are those of random inputs" in entry.steps[1].text
    assert entry.action == "failed"
    assert "returned a int; return a model, bytes" in entry.reason


@pytest.mark.usefixtures("one_server")
def test_the_command(affine, tmp_path, capsys):
    (affine / "bad.pb").write_bytes(b"nonsense")
    call = ["batch", str(affine), "-o", str(tmp_path / "out")]
    call += ["--pipeline", "fold,tflite"]
    assert run(app, [*call, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)["entries"]
    assert {e["name"]: e["action"] for e in told} == {"bad": "failed", "good": "done"}
    blob = (tmp_path / "out" / "good" / "good.tflite").read_bytes()
    (y,) = new_interpreter(blob).get_signature_runner()(x=np.float32([[1, 2]])).values()
    np.testing.assert_array_equal(y, [[3, 5]])
    (affine / "bad.pb").unlink()
    assert run(app, call) == 0
    said = capsys.readouterr().out
    assert "1 of 1 model(s) done (1 before): fold,tflite" in said
    call = ["batch", str(tmp_path / "out" / "good" / "good.tflite")]
    call += ["-o", str(tmp_path / "again"), "--pipeline", "save=graph_def"]
    assert run(app, call) == 0
    again = model.open(str(tmp_path / "again" / "good" / "good.pb"))
    (y,) = again.run(x=np.float32([[1, 2]])).values()
    np.testing.assert_array_equal(y, [[3, 5]])


def cheap(monkeypatch, marker):
    """Let jobs do nothing, but the first one may kill its worker."""
    run = partial(batch_steps.no_job, marker=str(marker))
    monkeypatch.setattr(batches, "run_job", run)


def test_where_no_process_forks_there_is_no_server(three, monkeypatch):
    cheap(monkeypatch, three / "a.pb")
    server = SimpleNamespace(address="a server", close=lambda: None)
    monkeypatch.setattr(batches, "ForkServer", lambda: server)
    # What no server does is noted.
    for platform, reason in (("linux", "by a server"), ("darwin", "without a server")):
        monkeypatch.setattr(model_job, "sys", SimpleNamespace(platform=platform))
        report = plan(three, None, output=platform)
        assert [entry.reason for entry in report.entries] == [reason] * 3


def killing(folder, count):
    """Save models, the first of which has its worker killed; return step and marker."""
    save_affine(folder / "kill", "kill")
    for index in range(1, count):
        save_affine(folder / f"m{index:02}", "y", index)
    marker = folder.parent / "marker"
    return partial(batch_steps.fault, marker=str(marker)), marker


def check_killed(report, marker, count):
    assert [entry.action for entry in report.entries] == ["done"] * count, report
    assert report.entries[0].tries == 2
    assert any(note.startswith("'kill' was begun 2 times") for note in report.notes)
    # The process did not outlive its worker.
    child, worker = map(int, marker.read_text().split())
    assert has_ended(child)
    assert has_ended(worker)


def served(address, do_first, job):
    """Return a server that runs some code, then forks for a job."""
    code = (
        "import pathlib, socket, sys, threading, time\n"
        "from geutil.jobs.model_job import serve\n"
        f"{do_first}\n"
        f"serve(socket.socket(fileno=int(sys.argv[1])), {job})\n"
    )
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        number = listener.fileno()
        return subprocess.Popen(
            [sys.executable, "-c", code, str(number)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            pass_fds=[number],
        )


@pytest.mark.skipif(not model_job.can_fork(), reason="there are no servers here")
def test_a_forked_process_is_gone_once_it_is_killed(tmp_path):
    address = str(tmp_path / "address")
    server = served(address, "", "lambda place: time.sleep(600)")
    process = model_job.ForkedProcess(tmp_path, address)
    process.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    process.close()
    server.stdin.close()
    assert server.wait() == 0


def test_a_server_with_threads_does_not_fork(tmp_path):
    address = str(tmp_path / "address")
    thread = "threading.Thread(target=time.sleep, args=[600], daemon=True).start()"
    server = served(address, thread, "print")
    with pytest.raises(ConnectionError, match="does not fork"):
        model_job.ForkedProcess(tmp_path, address)
    server.stdin.close()
    assert server.wait() == 0
    with pytest.raises(OSError):
        model_job.ForkedProcess(tmp_path, str(tmp_path / "nothing"))


@pytest.mark.usefixtures("one_server")
def test_a_users_processes_one_of_which_is_killed(tmp_path, monkeypatch):
    # Its workers are forks, so this is theirs, too.
    monkeypatch.setattr(model_job, "CHILD", light_child.__name__)
    step, marker = killing(tmp_path / "in", 2)
    with ProcessPoolExecutor(1) as executor:
        report = batch(tmp_path / "in", step, tmp_path / "out", executor=executor)
    assert "the executor broke (BrokenProcessPool" in report.notes[0]
    assert len(report.notes) == 2
    check_killed(report, marker, 2)
    # The second one had not begun.
    assert report.entries[1].tries == 1


@contextlib.contextmanager
def ray_cluster(cpus=2):
    ray = pytest.importorskip("ray", reason="the extra ray is not installed")
    ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False)
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


@thorough
@pytest.mark.parametrize("cluster", [ray_cluster, dask_cluster])
def test_a_cluster_one_of_whose_workers_is_killed(tmp_path, monkeypatch, cluster):
    # Workers are other processes, and import what is here.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    step, marker = killing(tmp_path / "in", 40)
    with cluster() as executor:
        report = batch(tmp_path / "in", step, tmp_path / "out", executor=executor)
    check_killed(report, marker, 40)
    assert all(list(entry.files) == [entry.name] for entry in report.entries)


@thorough
def test_the_executor_of_ray(three, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cheap(monkeypatch, three.parent / "marker")
    with ray_cluster(cpus=1) as executor:
        report = plan(three, executor)
        assert [entry.action for entry in report.entries] == ["done"] * 3
        assert [entry.tries for entry in report.entries] == [2, 1, 1]
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


@pytest.mark.usefixtures("one_server")
def test_a_stopped_batch_goes_on(tmp_path):
    save_affine(tmp_path / "in" / "model", "hang")
    marker, output = tmp_path / "marker", tmp_path / "out"

    def interrupt():
        while not marker.exists():
            time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            batch(
                tmp_path / "in", partial(batch_steps.fault, marker=str(marker)), output
            )
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert has_ended(int(marker.read_text()))
    (entry,) = BatchReport.load(output).entries
    assert entry.action == "stopped"
    executor = Noted()
    assert batch(tmp_path / "in", "strip", output, executor=executor).done
    assert executor.jobs == ["model"]
    assert not (output / ".batch").exists()


def test_entries_as_text():
    entry = BatchEntry("net", "net.pb", "crashed", "SIGABRT", "fold", tries=2)
    assert str(entry) == "crashed (try 2): at 'fold': SIGABRT"
    assert str(dataclasses.replace(entry, action="done", files={"a": 1000})) == (
        "done (try 2): a 1,000 bytes"
    )


@pytest.mark.usefixtures("one_server")
def test_a_server_of_processes_that_is_killed(tmp_path, monkeypatch):
    # It is the last test here: the server is that of the others.
    monkeypatch.setattr(model_job, "CHILD", light_child.__name__)
    step, marker = killing(tmp_path / "in", 1)
    report = batch(tmp_path / "in", step, tmp_path / "out", workers=1)
    check_killed(report, marker, 1)
