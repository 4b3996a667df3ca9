"""What commands refuse is told in their own words, in one line."""

import ast
import json
import logging
import pickle
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from geutil import model, tflite
from geutil.cli.commands import app
from geutil.errors import ModelError, Words, spoken_with, vocabulary
from tests import tflite_files
from tests.cli.processes import environment
from tests.processes import ROOT
from tests.settings import needs_eager

pytestmark = [needs_eager]

OF_PYTHON = re.compile(
    r"\b[a-z_]+=(?![a-z0-9:/]*\b(new|tensor|input|output|NAME))[\[({'TF.]"
    r"|\bpass [a-z_]+=|\bgeutil\.[a-z]|\bmodel\.[a-z]+\(|\btf\.[a-z_.]+\("
    r"|\b(open|rename|cut|save|quantize)\("
)
"""An argument, an attribute or a call, which nobody can type into a command."""


@pytest.fixture(scope="module")
def wrong(folder, tmp_path_factory):
    """Return a directory with models and data that commands refuse."""
    place = tmp_path_factory.mktemp("wrong")

    class Both(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None, 4], name="x")])
        def one(self, x):
            return {"y": 2 * x}

        @tf.function(input_signature=[tf.TensorSpec([None, 4], name="x")])
        def text(self, x):
            return {"y": tf.strings.as_string(x)}

    both = Both()
    signatures = {"one": both.one, "text": both.text}
    tf.saved_model.save(both, str(place / "both"), signatures=signatures)
    tf.saved_model.save(tf.Module(), str(place / "none"))
    layers = [tf.keras.Input([3, 2], name="x"), tf.keras.layers.LSTM(2)]
    tf.keras.Sequential(layers).save(place / "lstm.keras")
    (place / "net").symlink_to(folder / "net")
    m = model.open(str(folder / "net"))
    m.save(place / "net.tflite", "tflite")
    m.save(place / "net.pb", "graph_def")
    m.save(place / "net.pbtxt", "pbtxt")
    m.rename(outputs={next(iter(m.outputs)): "other"}).save(place / "other")
    m.rename(inputs={"image": "pixels"}).save(place / "pixels")
    m.rename(inputs={"image": "a/b"}).save(place / "slash.pb", "graph_def")
    m.outputs["more"] = next(iter(m.outputs.values()))
    m.save(place / "more")
    specs = [tf.TensorSpec([None, 8, 8, 3], name=name) for name in ("image", "mask")]
    pair = tf.function(
        lambda image, mask: {"last": image * mask}, input_signature=specs
    )
    model.open(pair).save(place / "pair")
    (place / "two.tflite").write_bytes(tflite_files.two_signatures().blob)
    for name in ("taken", "page.html", "damaged"):
        (place / name).mkdir()
    for name in ("small.keras", "small.h5", "small.onnx", "there.html", "text.npz"):
        (place / name).write_text("somebody's work")
    (place / "plan.json").write_text("{}")
    for name in ("damaged/saved_model.pb", "damaged.pb", "damaged.pbtxt"):
        (place / name).write_bytes(b"\xff\xfe nothing that anybody reads")
    (place / "damaged.keras").write_bytes(b"\xff\xfe nothing that anybody reads")
    (place / "empty.tflite").touch()
    (place / "short.tflite").write_bytes(b"\0\0\0\0TFL3")
    (place / "odd.tflite").write_bytes(b"\x20\0\0\0TFL3" + bytes(range(200)))
    with np.load(folder / "data.npz") as archive:
        image = archive["image"]
    np.savez(place / "data.npz", image=image)
    np.savez(place / "named.npz", picture=image, label=np.zeros(6))
    np.savez(place / "wide.npz", image=np.zeros([2, 8, 8, 4], np.float32))
    np.savez(place / "empty.npz")
    (place / "cut.npy").write_bytes(b"PK\3\4 and no more")
    return place


USAGE = """
nonsense | nonsense & see `geutil --help`
fold | see `geutil fold --help`
fold net -o new --format png | see `geutil fold --help`
fold net -o new --nonsense | see `geutil fold --help`
"""
ERRORS = """
inspect nowhere | there is nothing at
inspect '' | the path is empty
inspect plan.json | pass a SavedModel
inspect small.onnx | SavedModel directory & .tflite
inspect empty.tflite | empty.tflite & convert
inspect short.tflite | short.tflite & convert
inspect odd.tflite | odd.tflite & convert
inspect damaged | damaged
inspect damaged.pb | damaged
inspect damaged.pbtxt | damaged
inspect damaged.keras | damaged
inspect net --signature serving_default | --signature goes with --scopes; leave it out
inspect net.tflite --signature one | --signature is of models
ops damaged | damaged
ops damaged.pb | damaged
ops damaged.pbtxt | damaged
ops damaged.keras | damaged
ops empty.tflite | no TFLite file
ops short.tflite | TFLite file & convert the model again
ops both | pass --signature as one of ['one', 'text']
ops net --signature nope | no signature 'nope'; it has
ops lstm.keras --signature nope | no signature 'nope'; it has ['serving_default']
ops net.pb --signature nope | no signature 'nope'; it has ['serving_default']
ops net.pbtxt --signature nope | no signature 'nope'; it has ['serving_default']
ops none | save it again with a signature
ops net --regex ( | no regular expression & backslash
unroll net -o new --loop ( | no regular expression & backslash
cut net -o new | --input or --to
cut net -o new --to nope | scope 'nope'; similar are
cut net -o new --to out=nope | scope 'nope'; similar are
cut net -o new --to nothing | nothing & its ends are
cut net -o new --to Mat | similar are
cut net -o new --input Mat | similar are
cut net -o new --input first --to image | no output depends on 'first'
cut net -o taken --to image | pass --force
cut net -o no/where --to image | no directory
cut net.tflite -o new.tflite --to Mat | no tensor 'Mat' & near it are
cut net.tflite -o new.tflite --to qqqqqq | `geutil ops --regex`
cut net.tflite -o new --to Mat | name 'new' .tflite
cut net.tflite -o new.tflite --ops 3 | '3' is no range & START:END
cut net.tflite -o new.tflite --to x --signature nope | 'nope'; it has
cut net -o new --ops 1:2 | --ops is of .tflite files
split net -o a.tflite --second b.tflite --at x | is no .tflite file
split net.tflite -o a.tflite --second a.tflite --at x | are the same file
split net.tflite -o a.tflite --second taken --at x | name 'taken' .tflite
expose net.tflite -o a.tflite --to nope | no tensor 'nope'
strip net.tflite -o a.tflite --keep x | --keep is of models
strip net -o new --names | are of .tflite files
rename net -o new --from-signature | --from-signature is of .tflite files
rename net.tflite -o a.tflite --tensor a=b | no tensor 'a'
splice net other -o new --replace nope=other | 'nope'
splice net both -o new --replace image=y | pass --other-signature as one of
splice net both -o new --replace image=y --other-signature nope | no signature 'nope'
splice net other -o new --replace image=nope | 'nope'; it has
rename net -o new --input nope=a | 'nope'; there are
rename net -o new --to nope=a | 'nope'; there are
rename net -o new --result nope=a | 'nope'; there are
rename net -o new --input half | old=new
rename net -o new --input =b | old=new
rename net -o new --input a= | old=new
rename net -o new | --input, --to or --to-signature
rename net -o new --input image=a/b | `geutil rename --input 'a/b=a_b'`
batch-size net many -o new | 'any'
batch-size net 0 -o new | 'any'
batch-size net -o new -- -3 | 'any'
strip net -o new --keep nope | 'nope'
strip slash.pb -o new | `geutil rename --input 'a/b=a_b'`
strip both --signature text -o new.tflite | `geutil convert --tf-ops`
unroll net -o new | has no loop
unroll lstm.keras -o new --max-ops 20 | pass --max-ops to allow more, or --loop
unroll lstm.keras -o new --loop gru | --loop selects none of the loops
fold net -o new.onnx | does not write
fold net.pb -o small.keras --force | geutil does not write & .pb, .pbtxt, .tflite
fold damaged.pb -o small.h5 --force | geutil does not write & .pb, .pbtxt, .tflite
fold damaged.pb -o small.onnx --force | geutil does not write & .pb, .pbtxt, .tflite
fold empty.tflite -o new | empty.tflite & no TFLite file
fold short.tflite -o new | short.tflite & holds no subgraph
fold net -o new --scope nope | there is no layer or scope 'nope'
fold both -o new | pass --signature as one of ['one', 'text']
bits net --data data.npz | pass --size or --noise
bits net --data data.npz --size 1 --noise 1 | pass --size or --noise
bits net --data data.npz --size half | --size half is no size
bits net --data data.npz --size 1% | the smallest takes
bits net --data data.npz --size 60% -o data.npz | data.npz' is there already
bits net --data data.npz --size 101% | --size
bits net --data empty.npz --size 90% | empty
quantize net -o new --data named.npz | 'image' & numpy.savez & arrays['picture']
quantize net -o new --data empty.npz | empty
quantize net -o new.tflite | --data
quantize net -o new.tflite --data text.npz | numpy.savez
quantize net -o new --skip ( | no regular expression
quantize net -o new --bits nowhere.json | no plan of bits at
quantize net -o new --bits plan.json | no plan of bits & write one with `geutil bits -o`
quantize net -o new --rounding adaround | --rounding adaround needs data; pass --data
quantize net -o new --order least_memory | name the output so, or pass --format tflite
quantize net -o new --input-type int8 | name the output so, or pass --format tflite
quantize net -o n.tflite --data data.npz --input-type 8 | no type '8' & uint8
quantize net -o n.tflite --data data.npz --input-type int16 | 'image' & int8 or uint8
quantize net -o n.tflite --data data.npz --output-type x=int8 | no output 'x'
quantize net -o n.tflite --scheme weight_only_int8 --input-type int8 | NAME=TYPE
quantize net -o n.tflite --data data.npz --input-type int8 --input-type a=int8 | for all
quantize net -o new --scheme int16x8 --weight-bits 4 | bits
quantize net -o new.tflite --data wide.npz | 'image'
calibrate net -o new --data data.npz | `geutil quantize`
calibrate net -o new.tflite --data data.npz | `geutil quantize`
memory net --budget much | 1.5GB
memory net --extra-time 5 | '20%'
memory net --budget 50% --extra-time 5% | ask one
memory net --largest-batch | --memory
memory net --largest-batch --memory 4MB --extra-time 5% | leave out others
memory net --largest-batch --memory 4MB --curve | ask one
memory nowhere --device FPGA:0 | --device FPGA:0 & pass CPU:0 or GPU:0
memory nowhere --device /job:worker/device:GPU:x | pass CPU:0 or GPU:0
memory net --html there.html | --force
memory net --size 8,8,3 | input=8,8,3
memory net --size image= | input=8,8,3
memory net --size image=8,x | input=8,8,3
memory net --size x=8,8,3 | ['image']
memory net.pb | frozen from
diff net nowhere | there is nothing at
check net other --data named.npz | 'picture'
check net net --data cut.npy | numpy.savez
check net net --data none.npz | there is no data
check net net --data taken | no .npz or .npy file & numpy.savez
check net more | do not match
check net pair | `geutil rename --input`
check both net | pass --signature as one of
check net.tflite --against net --layers | TFLite file; pass inputs with --data
check net.tflite --data data.npz | TFLite file; pass the quantized model
check net.tflite --against net --data data.npz --layers | `geutil quantize --data`
convert net -o new.keras | holds a graph, which does not tell them
convert net -o new.h5 | geutil does not write
convert lstm.keras -o new.keras --format pbtxt | --format is pbtxt
convert lstm.keras -o lstm.keras | pass --force
convert net -o new.pb --tf-ops | --tf-ops is for .tflite files
convert both --signature text -o new.tflite | AsString & `geutil convert --tf-ops`
run NET --data named.npz | no array for input 'image'
run NET --data wide.npz | [2,8,8,4], and the model takes [n,8,8,3]
run NET --data none.npz | there is no data
run NET --data empty.npz | is empty: it holds no array
run NET --data data.npz --rtol 1 | --against
run NET --data data.npz -o new.txt | .npz
run NET --data data.npz -o data.npz | --force
run NET --data data.npz --against nowhere | there is nothing at
run net.tflite --data data.npz --signature nope | 'nope'; it has ['serving_default']
run two.tflite --data data.npz | has 2 signatures
batch nowhere -o new --pipeline fold | there is nothing at
batch net -o new --pipeline folds | there is no step 'folds' & the steps are fold
batch net -o new --pipeline quantize,tflite | pass --data to calibrate with
batch net -o new --pipeline quantize:rounding=gptq | pass --data
batch net -o new --pipeline fold --data random | leave --data out
batch net -o new --pipeline fold --timeout 0 | --timeout 0.0 & pass seconds
view short.tflite -o new.html | short.tflite & convert
view net -o new.html --memory --training | one of the two
view net -o new.html --size x=1 | --size goes with
view net -o there.html | --force
view net -o page.html --force | is a directory
view net.tflite -o taken | .html
"""


def rows(table):
    """Return the calls of a table, each with the words that its refusal has."""
    found = []
    for line in table.strip().splitlines():
        call, _, words = line.partition(" | ")
        for form in ("net", "net.tflite") if " NET " in call else ("",):
            found.append((shlex.split(call.replace("NET", form)), words.split(" & ")))
    return found


def files_of(place):
    return {path: path.stat().st_size for path in place.rglob("*") if path.is_file()}


@pytest.mark.parametrize("command", dict.fromkeys(c[0] for c, _ in rows(ERRORS)))
def test_errors_in_the_words_of_the_command(geutil, wrong, monkeypatch, command):
    """In one line, without a word of Python; nothing is written."""
    monkeypatch.chdir(wrong)
    before = files_of(wrong)
    found = {}
    for call, words in rows(ERRORS):
        if call[0] == command:
            said = geutil(*call)
            lines = said.err.splitlines()
            is_told = len(lines) == 1 and all(word in lines[0] for word in words)
            # What was typed is told as it was.
            own = re.sub("|".join(re.escape(f"'{c}'") for c in call), "", said.err)
            is_told = is_told and not OF_PYTHON.search(own)
            if not is_told or said.code not in (1, 2) or said.out:
                found[" ".join(call)] = said
    assert found == {}
    assert files_of(wrong) == before


def test_wrong_use_points_to_the_help_of_the_command(geutil):
    for call, words in rows(USAGE):
        said = geutil(*call)
        (line,) = said.err.splitlines()
        assert line.startswith("geutil: ")
        assert [word for word in words if word not in line] == []
        assert said.code == 2


WITHOUT_TENSORFLOW = """
import contextlib, io, json, os, sys, time
from geutil.cli.commands import app
from geutil.cli.main import run

class Nowhere:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("tensorflow", "keras"):
            raise ImportError(name)

sys.meta_path.insert(0, Nowhere())
found = []
for call in json.load(sys.stdin):
    said = io.StringIO()
    began = time.process_time()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = run(app, call)
    found.append([code, said.getvalue(), time.process_time() - began])
json.dump(found, sys.stdout)
"""
SECONDS = 1.0
"""Of the processor; the command itself takes 0.3 to start."""


@pytest.fixture(scope="module")
def told_first(wrong):
    """Return all wrong calls, each with what is said where there is no TensorFlow."""
    calls = rows(ERRORS) + rows(USAGE)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TENSORFLOW],
        input=json.dumps([call for call, _ in calls]),
        cwd=wrong,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return [
        (*one, *told) for one, told in zip(calls, json.loads(done.stdout), strict=True)
    ]


def test_wrong_calls_are_told_before_tensorflow_is_started(told_first):
    later, wrongly = [], {}
    for call, words, code, said, seconds in told_first:
        if "TensorFlow does not start" in said or "ImportError: tensorflow" in said:
            later.append(" ".join(call))
        elif (
            code not in (1, 2) or any(w not in said for w in words) or seconds > SECONDS
        ):
            wrongly[" ".join(call)] = code, said, seconds
    assert wrongly == {}
    # The others are wrong by what is in the model, or in the data.
    assert len(told_first) - len(later) >= 100


def test_every_command_has_an_error_in_the_table():
    listed = {call[0] for call, _ in rows(ERRORS)}
    assert listed == {command.name for command in app.registered_commands}


def test_what_is_not_known_is_told_in_words(geutil, wrong):
    said = geutil("inspect", wrong / "both", "--scopes")
    assert "ops by scope: not known" in said.out
    assert "pass --signature as one of ['one', 'text']" in said.out
    assert geutil.json("inspect", wrong / "both", "--scopes")["scopes"] is None
    again = geutil("inspect", wrong / "both", "--scopes", "--signature", "one")
    assert "not known" not in again.out
    assert "ops by scope" in again.out


def test_reports_are_told_in_words(geutil, wrong, tmp_path):
    options = ["--keep-norms", "-o", tmp_path / "new"]
    said = geutil("quantize", wrong / "net", *options)
    assert said.code == 0
    assert "with `geutil fold`" in said.out
    assert "fold_batch_norms" not in said.out + said.err


def words_of_the_library():
    """Yield the words that messages of the package mark, by their keys."""
    for file in sorted((ROOT / "geutil").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Words":
                text, *_ = node.args
                parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                python = "".join(getattr(part, "value", "x") for part in parts[:1])
                keys = [k.value.value for k in node.keywords if k.arg == "key"]
                yield Words(python, key=keys[0] if keys else "")


def test_the_vocabulary_has_all_words_that_messages_mark_and_no_others(
    geutil, folder, monkeypatch
):
    spoken, opened = [], model.open

    def noted(*arguments, **options):
        spoken.append(dict(vocabulary()))
        return opened(*arguments, **options)

    monkeypatch.setattr(model, "open", noted)
    geutil.done("ops", folder / "net")
    (words,) = spoken
    assert {marked.key for marked in words_of_the_library()} == set(words)
    assert [word for word in words.values() if OF_PYTHON.search(word)] == []
    # Only the command speaks so.
    assert vocabulary() == {}


def test_messages_are_in_the_words_of_those_who_read_them():
    def error():
        limit = Words("limit=3", 3)
        return ModelError("is low", subject=limit, remedy=f"pass {Words('data=')}")

    with spoken_with({"limit=": "--limit", "data=": "--data FILE"}):
        assert str(error()) == "--limit 3 is low; pass --data FILE"
    found = pickle.loads(pickle.dumps(error()))
    assert str(found) == "limit=3 is low; pass data="
    fields = found.subject, found.reason, found.remedy, found.parameter
    assert fields == ("limit=3", "is low", "pass data=", "limit")
    assert ModelError("all is low").parameter == ""


def test_warnings_are_told_as_refusals_are(geutil, tmp_path):
    @tf.function(input_signature=[tf.TensorSpec([2], name="x")])
    def network(x):
        return {"y": 2 * x, "given": tf.constant(1.0)}

    model.open(network).save(tmp_path / "net")
    handlers = list(logging.getLogger("geutil").handlers)
    said = geutil("strip", tmp_path / "net", "-o", tmp_path / "net.pb")
    assert said.code == 0
    (line,) = said.err.splitlines()
    assert line.startswith("geutil: the file does not show that")
    assert OF_PYTHON.search(line) is None
    assert logging.getLogger("geutil").handlers == handlers


def test_names_are_cut_in_the_middle(geutil, tmp_path, monkeypatch):
    names = ["block_1/expand/Conv2D", "block_2/expand/Conv2D", "x" * 15]
    file = tflite.LiteFile()
    y = file.add_input("x", "float32", [2])
    for name in names:
        y = file.add("NEG", y, name=name)
    file.set_outputs(y)
    path = file.save(tmp_path / "net.tflite")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    cells = {}
    for width in range(20, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        _, *lines = geutil.done("ops", path).splitlines()
        assert max(map(len, lines)) <= width
        found = [line.split()[0] for line in lines]
        cells[max(map(len, found))] = found
    assert cells[15] == ["bloc…and/Conv2D", "bloc…and/Conv2D", "x" * 15]
    assert cells.keys() == {*range(5, 22)}
    for width, found in cells.items():
        assert [len(cell) for cell in found] == [min(width, len(n)) for n in names]
        for name, cell in zip(names, found, strict=True):
            start, _, end = cell.partition("…")
            assert name.startswith(start) and name.endswith(end)
