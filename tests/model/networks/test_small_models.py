"""Models with loops, tables, strings and several signatures, in fresh processes."""

import numpy as np
import pytest
import tensorflow as tf

from geutil import model as geutil_model
from tests.model.networks import fresh
from tests.model.round_trips import assert_same, loaded_function
from tests.model.samples import Lookup
from tests.model.small_models import save_two_signatures

WORDS = ["a", "cat", "dog", "the"]
ASKED = ["dog", "bird", "the"]
layers = tf.keras.layers


def attended(tokens):
    x = layers.Embedding(50, 8)(tokens)
    x = x + layers.Embedding(6, 8)(tf.keras.ops.arange(6))
    attention = layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x)
    x = layers.LayerNormalization()(x + layers.Dropout(0.1)(attention))
    x = x + layers.Dense(8)(layers.Dense(16, "gelu")(x))
    return layers.Dense(5)(layers.GlobalAveragePooling1D()(x))


def recalled(words):
    x = layers.Embedding(20, 8, mask_zero=True)(words)
    return layers.Dense(3, name="scores")(layers.LSTM(4)(x))


def several_ends():
    """Return a model of several parts, two of which share a layer."""
    tokens = tf.keras.Input([6], dtype="int32", name="tokens")
    words = tf.keras.Input([None], dtype="int32", name="words")
    first = tf.keras.Input([4], name="first")
    second = tf.keras.Input([4], name="second")
    shared = layers.Dense(3, name="shared")
    total = layers.Add(name="total")([shared(first), shared(second)])
    return tf.keras.Model(
        {"tokens": tokens, "words": words, "first": first, "second": second},
        {
            "attended": attended(tokens),
            "recalled": recalled(words),
            "total": total,
            "largest": layers.Softmax()(total),
        },
    )


def lookup():
    words = tf.keras.Input([None], dtype="string", name="words")
    ids = layers.StringLookup(vocabulary=WORDS)(words)
    x = layers.Embedding(6, 4)(ids)
    return tf.keras.Model(words, layers.GlobalAveragePooling1D(name="scores")(x))


def numbers(*shape):
    return np.random.default_rng(5).normal(size=shape).astype(np.float32)


def integers(high, *shape):
    return np.random.default_rng(5).integers(0, high, shape).astype(np.int32)


KERAS = {
    "several_ends": (
        several_ends,
        {
            "first": numbers(2, 4),
            "second": numbers(2, 4) + 1,
            "tokens": integers(50, 2, 6),
            "words": integers(20, 2, 7),
        },
        "recalled",
    ),
    "lookup": (
        lookup,
        {"words": np.array([[b"cat", b"?"], [b"a", b"the"]], object)},
        "scores",
    ),
}


def assert_close(gradients, expected):
    for name, slope in expected.items():
        np.testing.assert_allclose(gradients[name], slope, 1e-4, 1e-6, err_msg=name)


@pytest.mark.parametrize("name", KERAS)
def test_a_keras_model_and_its_export(name, tmp_path):
    build, inputs, end = KERAS[name]
    tf.keras.utils.set_random_seed(1)
    model, path = build(), tmp_path / "exported"
    model.export(path, verbose=False)
    expected = loaded_function(path)(**inputs)
    exported, opened = geutil_model.open(path), geutil_model.open(model)
    assert_same(exported.run(**inputs), expected)
    exported.save(tmp_path / "again")
    assert list(opened.inputs) == list(inputs)
    named = expected
    if isinstance(model.output, dict):
        assert list(opened.outputs) == list(model.output)
    else:
        assert list(opened.outputs) == model.output_names
        # Keras' export calls the only output so.
        named = {model.output_names[0]: expected["output_0"]}
    assert_same(opened.run(**inputs), named)
    opened.save(tmp_path / "saved")
    call = "run", "serving_default", inputs
    differentiate = "gradients", "serving_default", inputs, end
    (again,), (saved, slopes) = fresh.do_all(
        (tmp_path / "again", [call]), (tmp_path / "saved", [call, differentiate])
    )
    assert_same(again, expected)
    assert_same(saved, named)
    # The same variables as Keras': what Keras trains is seen here.
    function = opened.to_function()
    variables = [v.value for v in model.trainable_variables]
    assert {id(v) for v in function.trainable_variables} == {id(v) for v in variables}

    def of_keras():
        outputs = model(inputs)
        return outputs[end] if isinstance(outputs, dict) else outputs

    wanted = fresh.gradients_of(of_keras, variables)
    assert wanted
    found = fresh.gradients_of(lambda: function(**inputs)[end], variables)
    assert_close(found, wanted)
    assert_close(slopes, wanted)


@pytest.fixture
def vocabulary(tmp_path):
    """A SavedModel with an asset, one of it in memory, and the rows of some words.

    The file that it was made from is gone.
    """
    file = tmp_path / "words.txt"
    file.write_text("\n".join(WORDS) + "\n")
    module = Lookup(file)
    signatures = {"serving_default": module.look_up}
    tf.saved_model.save(module, str(tmp_path / "vocabulary"), signatures)
    in_memory = geutil_model.open(module.look_up).save(tmp_path / "in_memory")
    expected = module.look_up(tf.constant(ASKED))["rows"].numpy()
    file.unlink()
    return tmp_path / "vocabulary", in_memory, expected


def test_a_table_keeps_its_asset(vocabulary, tmp_path):
    path, in_memory, expected = vocabulary
    m = geutil_model.open(path)
    assert [file.name for file in m.assets] == ["words.txt"]
    np.testing.assert_array_equal(m.run(words=ASKED)["rows"], expected)
    m.save(tmp_path / "saved")
    assert [p.name for p in (tmp_path / "saved" / "assets").iterdir()] == ["words.txt"]
    (limited,) = (op for op in m.graph.get_operations() if op.type == "Maximum")
    looked_up = limited.inputs[0]
    head = m.cut(outputs={"found": looked_up})
    tail = m.cut(inputs={"found": looked_up})
    assert len(head.assets) == 1 and not head.variables
    assert not tail.assets and len(tail.variables) == 1
    head.save(tmp_path / "head")
    tail.save(tmp_path / "tail")
    assert list((tmp_path / "head" / "assets").iterdir())
    assert not list((tmp_path / "tail" / "assets").iterdir())
    weights = tf.Variable(numbers(3, 4), name="weights")
    spec = tf.TensorSpec([None, 3], name="rows")
    embed = tf.function(lambda rows: {"x": rows @ weights}, [spec])
    m = geutil_model.open(embed).prepend(geutil_model.open(path))
    m.save(tmp_path / "embedded")
    path.rename(tmp_path / "away")
    (tmp_path / "saved").rename(tmp_path / "moved")
    places = tmp_path / "moved", in_memory, tmp_path / "head", tmp_path / "embedded"
    calls = [("run", "serving_default", {"words": ASKED})]
    moved, memory, found, embedded = fresh.do_all(*((p, calls) for p in places))
    np.testing.assert_array_equal(moved[0]["rows"], expected)
    np.testing.assert_array_equal(memory[0]["rows"], expected)
    np.testing.assert_allclose(embedded[0]["x"], expected @ weights, rtol=1e-6)
    tailed = fresh.run(tmp_path / "tail", found[0])["rows"]
    np.testing.assert_array_equal(tailed, expected)


def test_signatures_share_their_variables(tmp_path):
    """One was opened, or both; or one was changed, and the other is as it was."""
    source = tmp_path / "source"
    module = save_two_signatures(source)
    one, both, spliced = (
        geutil_model.open(source, signature="encode") for _ in range(3)
    )
    for name in ("encode", "decode"):
        assert both.signatures[name].variables == both.variables
    assert {n: v.trainable for n, v in one.variables.items()} == {
        "weight": True,
        "gain": False,
        "bias": True,
    }
    spec = tf.TensorSpec([None, 2], name="code")
    norm = tf.function(lambda code: {"norm": tf.norm(code, axis=-1)}, [spec])
    spliced = spliced.append(geutil_model.open(norm))
    paths = [tmp_path / name for name in ("one", "both", "spliced")]
    for m, path in zip((one, both, spliced), paths, strict=True):
        m.save(path)
    assert set(one.opened_signatures()) == {"encode"}
    x, code, new = numbers(2, 3), numbers(2, 2), numbers(3, 2) + 1
    calls = [
        ("run", "encode", {"x": x}),
        ("assign", "weight", new),
        ("run", "encode", {"x": x}),
        ("run", "decode", {"code": code}),
        ("variables",),
    ]
    *results, spliced = fresh.do_all(*((path, calls) for path in paths))
    first = module.encode(x)["code"]
    module.w.assign(new)
    second, decoded = module.encode(x)["code"], module.decode(code)["x"]
    for before, _, after, found, variables in results:
        np.testing.assert_array_equal(before["code"], first)
        np.testing.assert_array_equal(after["code"], second)
        np.testing.assert_array_equal(found["x"], decoded)
        assert variables == {
            "weight": ([3, 2], True),
            "gain": ([], False),
            "bias": ([3], True),
        }
    before, _, after, found, _ = spliced
    for outputs, value in ((before, first), (after, second)):
        expected = tf.norm(value, axis=-1)
        np.testing.assert_allclose(outputs["norm"], expected, rtol=1e-6)
    np.testing.assert_array_equal(found["x"], decoded)
