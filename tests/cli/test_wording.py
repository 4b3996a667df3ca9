"""What commands refuse is told in their own words, in one line."""

from __future__ import annotations

import ast
import logging
import re

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.cli import wording
from geutil.cli.output import cut_in_middle
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
    (place / "net").symlink_to(folder / "net")
    m = model.open(str(folder / "net"))
    m.save(place / "net.tflite", "tflite")
    m.save(place / "net.pb", "graph_def")
    m.rename(outputs={next(iter(m.outputs)): "other"}).save(place / "other")
    m.rename(inputs={"image": "pixels"}).save(place / "pixels")
    m.rename(inputs={"image": "a/b"}).save(place / "slash.pb", "graph_def")
    (place / "taken").mkdir()
    (place / "plan.json").write_text("{}")
    with np.load(folder / "data.npz") as archive:
        np.savez(place / "data.npz", image=archive["image"])
        np.savez(place / "named.npz", picture=archive["image"])
        np.savez(place / "wide.npz", image=np.zeros([2, 8, 8, 4], np.float32))
    np.savez(place / "empty.npz")
    return place


ERRORS = """
inspect nowhere | there is nothing at
inspect plan.json | pass a SavedModel
ops both | pass --signature with one of ['one', 'text']
ops net --signature nope | no signature 'nope'; it has
ops none | save it again with a signature
ops net --regex ( | no regular expression
cut net -o new --to nope | scope 'nope'; similar are
cut net -o new --to out=nope | scope 'nope'; similar are
cut net -o new --to Mat | similar are
cut net -o new --input Mat | similar are
cut net -o new --input first --to image | no output depends on 'first'
cut net -o taken --to image | pass --force
splice net other -o new --replace nope=other | 'nope'
splice net both -o new --replace image=y | pass --other-signature with one of
splice net both -o new --replace image=y --other-signature nope | no signature 'nope'
splice net other -o new --replace image=nope | 'nope'; it has
rename net -o new --input nope=a | 'nope'; there are
rename net -o new --to nope=a | 'nope'; there are
rename net -o new --result nope=a | 'nope'; there are
rename net -o new | --input, --to or --to-signature
rename net -o new --input image=a/b | `geutil rename --input 'a/b=a_b'`
batch-size net many -o new | 'any'
strip net -o new --keep nope | 'nope'
strip slash.pb -o new | `geutil rename --input 'a/b=a_b'`
strip both --signature text -o new.tflite | `geutil convert --tf-ops`
unroll net -o new | has no loop
fold net -o new.onnx | does not write
fold both -o new | pass --signature with one of ['one', 'text']
bits net --data data.npz --size 101% | --size
bits net --data empty.npz --size 90% | empty
quantize net -o new --data named.npz | 'image'
quantize net -o new --skip ( | no regular expression
quantize net -o new --bits plan.json | `geutil bits -o` writes one
quantize net -o new --scheme int16x8 --weight-bits 4 | bits
quantize net -o new.tflite --data wide.npz | 'image'
calibrate net -o new --data data.npz | `geutil quantize`
calibrate net -o new.tflite --data data.npz | `geutil quantize`
memory net --budget much | 1.5GB
memory net.pb | frozen
diff net nowhere | there is nothing at
check net other --data named.npz | 'picture'
check net pixels | `geutil rename --input`
check both net | pass --signature with one of
check net.tflite --against net --data data.npz --layers | `geutil quantize`
convert net -o new.keras | holds a graph
convert both --signature text -o new.tflite | `geutil convert --tf-ops`
convert net.tflite -o new | `geutil run`
run net --data wide.npz | convert it first
run net --data data.npz --against pixels | 'pixels'
batch nowhere -o new --pipeline fold | there is nothing at
batch net -o new --pipeline folds | the steps are fold
batch net -o new --pipeline quantize,tflite | pass --data to calibrate with
batch net -o new --pipeline quantize:rounding=gptq | pass --data
batch net -o new --pipeline fold --data random | leave --data out
batch net -o new --pipeline fold --timeout 0 | --timeout 0.0: pass seconds
view net.tflite -o taken | .html
"""


@pytest.mark.parametrize("line", ERRORS.strip().splitlines())
def test_errors_in_the_words_of_the_command(geutil, wrong, monkeypatch, line):
    monkeypatch.chdir(wrong)
    command, _, words = line.partition(" | ")
    said = geutil(*command.split())
    new = wrong / command.partition(" -o ")[2].partition(" ")[0]
    is_new = new.name.startswith("new") and new.exists()
    if is_new:
        new.rename(new.with_name(f"written-{len(list(wrong.iterdir()))}"))
    assert said.code != 0, said
    assert not is_new
    (told,) = said.err.splitlines()
    assert words in told
    assert OF_PYTHON.search(told) is None, told


def test_what_is_not_known_is_told_in_words(geutil, wrong):
    said = geutil("inspect", wrong / "both", "--scopes")
    assert "pass --signature with one of ['one', 'text']" in said.out
    again = geutil("inspect", wrong / "both", "--scopes", "--signature", "one")
    assert "not known" not in again.out
    assert "ops by scope" in again.out
    lite = geutil("inspect", wrong / "net.tflite", "--signature", "one")
    assert lite.code == 1
    assert "--signature is of models" in lite.err


def test_reports_are_told_in_words(geutil, wrong, tmp_path):
    options = ["--keep-norms", "-o", tmp_path / "new"]
    said = geutil("quantize", wrong / "net", *options)
    assert said.code == 0
    assert "with `geutil fold`" in said.out
    assert "fold_batch_norms" not in said.out + said.err


def test_every_command_has_an_error_in_the_table(geutil):
    listed = {line.split()[0] for line in ERRORS.strip().splitlines()}
    from geutil.cli.app import app

    assert listed == {command.name for command in app.registered_commands}


@pytest.fixture(scope="module")
def said_by_the_library():
    """Return all strings of the package, with `x` for what is put into them."""
    texts = []
    for file in sorted((ROOT / "geutil").rglob("*.py")):
        if "cli" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                texts.append("".join(_part(value) for value in node.values))
    return [" ".join(text.split()) for text in texts]


def _part(value):
    if isinstance(value, ast.Constant):
        return value.value
    return "'x'" if getattr(value, "conversion", -1) == ord("r") else "x"


@pytest.mark.parametrize("phrase", [phrase for phrase, _ in wording._PHRASES])
def test_each_phrase_is_one_of_the_library(said_by_the_library, phrase):
    assert any(re.search(phrase, text) for text in said_by_the_library)


@pytest.mark.parametrize("words", [words for _, words in wording._PHRASES])
def test_what_stands_for_it_is_none_of_python(words):
    assert OF_PYTHON.search(words) is None


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


def test_names_are_cut_in_the_middle():
    names = ["block_1/expand/Conv2D", "block_2/expand/Conv2D", "x" * 15, ""]
    cut = [cut_in_middle(name, 15) for name in names]
    assert cut == ["bloc…and/Conv2D", "bloc…and/Conv2D", "x" * 15, ""]
    for width in range(1, 22):
        assert len(cut_in_middle(names[0], width)) == min(width, 21)
