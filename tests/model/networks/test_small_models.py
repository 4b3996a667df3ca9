"""Models with loops, tables, strings and several signatures, in fresh processes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil import model as geutil_model
from tests.thorough import chosen

WORDS = ["a", "cat", "dog", "the"]
layers = tf.keras.layers


def transformer():
    tokens = tf.keras.Input([12], dtype="int32", name="tokens")
    x = layers.Embedding(50, 16)(tokens)
    x = x + layers.Embedding(12, 16)(tf.keras.ops.arange(12))
    for _ in range(2):
        attended = layers.MultiHeadAttention(2, 8, dropout=0.1)(x, x)
        x = layers.LayerNormalization()(x + layers.Dropout(0.1)(attended))
        hidden = layers.Dense(16)(layers.Dense(32, "gelu")(x))
        x = layers.LayerNormalization()(x + hidden)
    scores = layers.Dense(5, name="scores")(layers.GlobalAveragePooling1D()(x))
    return tf.keras.Model(tokens, scores)


def lstm():
    words = tf.keras.Input([None], dtype="int32", name="words")
    x = layers.Embedding(20, 8, mask_zero=True)(words)
    x = layers.LSTM(8, return_sequences=True)(x)
    x = layers.LSTM(4)(x)
    return tf.keras.Model(words, layers.Dense(3, name="scores")(x))


def bidirectional_gru():
    series = tf.keras.Input([9, 3], name="series")
    x = layers.Bidirectional(layers.GRU(5))(series)
    return tf.keras.Model(series, layers.Dense(2, name="scores")(x))


def unrolled_in_and_out():
    first = tf.keras.Input([4], name="first")
    second = tf.keras.Input([4], name="second")
    shared = layers.Dense(3, name="shared")
    total = layers.Add(name="total")([shared(first), shared(second)])
    return tf.keras.Model(
        {"first": first, "second": second},
        {"total": total, "largest": layers.Softmax()(total)},
    )


def lookup():
    words = tf.keras.Input([None], dtype="string", name="words")
    ids = layers.StringLookup(vocabulary=WORDS)(words)
    x = layers.Embedding(6, 4)(ids)
    return tf.keras.Model(words, layers.GlobalAveragePooling1D(name="scores")(x))


def vectorization():
    text = tf.keras.Input([], dtype="string", name="text")
    ids = layers.TextVectorization(vocabulary=WORDS, output_sequence_length=6)(text)
    return tf.keras.Model(text, layers.Embedding(7, 4, name="scores")(ids))


def numbers(*shape):
    return np.random.default_rng(5).normal(size=shape).astype(np.float32)


def integers(high, *shape):
    return np.random.default_rng(5).integers(0, high, shape).astype(np.int32)


SENTENCES = np.array([b"The cat, the dog!", b"a bird", b""], object)
KERAS = {
    "transformer": (transformer, {"tokens": integers(50, 2, 12)}),
    "lstm": (lstm, {"words": integers(20, 2, 7)}),
    "bidirectional_gru": (bidirectional_gru, {"series": numbers(2, 9, 3)}),
    "several_ends": (
        unrolled_in_and_out,
        {"first": numbers(2, 4), "second": numbers(2, 4) + 1},
    ),
    "lookup": (lookup, {"words": np.array([[b"cat", b"?"], [b"a", b"the"]], object)}),
    "vectorization": (vectorization, {"text": SENTENCES}),
}


QUICK = "transformer", "lstm", "several_ends", "lookup"


@pytest.fixture(scope="module", params=chosen(KERAS, *QUICK))
def keras(request, tmp_path_factory):
    """A Keras model, its inputs, and its export by Keras alone."""
    build, inputs = KERAS[request.param]
    tf.keras.utils.set_random_seed(1)
    model = build()
    path = tmp_path_factory.mktemp("keras") / request.param
    model.export(path, verbose=False)
    return model, inputs, path


def of_tensorflow(path, inputs, signature="serving_default"):
    """Return what TensorFlow computes from the directory that geutil never wrote."""
    function = tf.saved_model.load(str(path)).signatures[signature]
    specs = function.structured_input_signature[1]
    tensors = {n: tf.constant(v, specs[n].dtype) for n, v in inputs.items()}
    return {name: t.numpy() for name, t in function(**tensors).items()}


def assert_same(outputs, expected):
    assert sorted(outputs) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(outputs[name], value, err_msg=name)


def test_a_keras_export_is_opened_and_saved(keras, fresh, tmp_path):
    _, inputs, path = keras
    expected = of_tensorflow(path, inputs)
    m = geutil_model.open(path)
    assert_same(m.run(**inputs), expected)
    m.save(tmp_path / "again")
    assert_same(fresh.run(tmp_path / "again", inputs), expected)


def test_a_keras_model_is_opened_and_saved(keras, fresh, tmp_path):
    model, inputs, path = keras
    m = geutil_model.open(model)
    assert list(m.inputs) == list(inputs)
    assert list(m.outputs) == list(
        model.output if isinstance(model.output, dict) else model.output_names
    )
    (expected,) = [of_tensorflow(path, inputs)]
    outputs = m.run(**inputs)
    if not isinstance(model.output, dict):
        # Keras' export calls the only output so.
        expected = {model.output_names[0]: expected["output_0"]}
    assert_same(outputs, expected)
    m.save(tmp_path / "saved")
    assert_same(fresh.run(tmp_path / "saved", inputs), expected)


def test_a_keras_file_is_opened(keras, tmp_path):
    model, inputs, _ = keras
    model.save(tmp_path / "model.keras")
    expected = geutil_model.open(model).run(**inputs)
    assert_same(geutil_model.open(tmp_path / "model.keras").run(**inputs), expected)


def test_trainable_flags_survive_freezing_a_layer(tmp_path, fresh):
    model = unrolled_in_and_out()
    model.get_layer("shared").trainable = False
    geutil_model.open(model).save(tmp_path / "saved")
    (variables,) = fresh.do(tmp_path / "saved", [("variables",)])
    assert variables == {
        "shared/kernel": ([4, 3], False),
        "shared/bias": ([3], False),
    }


class Vocabulary(tf.Module):
    """A table that is filled from a file."""

    def __init__(self, file):
        super().__init__()
        self.file = tf.saved_model.Asset(str(file))
        initializer = tf.lookup.TextFileInitializer(
            self.file,
            tf.string,
            tf.lookup.TextFileIndex.WHOLE_LINE,
            tf.int64,
            tf.lookup.TextFileIndex.LINE_NUMBER,
        )
        self.table = tf.lookup.StaticVocabularyTable(initializer, 2)
        self.scale = tf.Variable(3, dtype=tf.int64, name="scale")

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "words")])
    def ids(self, words):
        return {"ids": self.table.lookup(words) * self.scale}


@pytest.fixture
def vocabulary(tmp_path):
    """A SavedModel with an asset; the file that it was made from is gone."""
    file = tmp_path / "words.txt"
    file.write_text("\n".join(WORDS) + "\n")
    module = Vocabulary(file)
    tf.saved_model.save(module, str(tmp_path / "vocabulary"))
    expected = module.ids(tf.constant(["dog", "bird", "the"]))["ids"].numpy()
    file.unlink()
    return tmp_path / "vocabulary", expected


def test_a_table_keeps_its_asset(vocabulary, fresh, tmp_path):
    path, expected = vocabulary
    m = geutil_model.open(path)
    assert [file.name for file in m.assets] == ["words.txt"]
    np.testing.assert_array_equal(m.run(words=["dog", "bird", "the"])["ids"], expected)
    m.save(tmp_path / "saved")
    assert [p.name for p in (tmp_path / "saved" / "assets").iterdir()] == ["words.txt"]
    path.rename(tmp_path / "away")
    (tmp_path / "saved").rename(tmp_path / "moved")
    outputs = fresh.run(tmp_path / "moved", {"words": ["dog", "bird", "the"]})
    np.testing.assert_array_equal(outputs["ids"], expected)


def test_a_module_in_memory_keeps_its_asset(fresh, tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("\n".join(WORDS) + "\n")
    module = Vocabulary(file)
    expected = module.ids(tf.constant(["dog", "bird"]))["ids"].numpy()
    geutil_model.open(module.ids).save(tmp_path / "saved")
    file.unlink()
    outputs = fresh.run(tmp_path / "saved", {"words": ["dog", "bird"]})
    np.testing.assert_array_equal(outputs["ids"], expected)


def test_a_cut_takes_the_asset_along_only_where_it_is_read(vocabulary, fresh, tmp_path):
    path, expected = vocabulary
    m = geutil_model.open(path)
    (product,) = (op for op in m.graph.get_operations() if op.type == "Mul")
    looked_up = product.inputs[0]
    head = m.cut(outputs={"found": looked_up})
    tail = m.cut(inputs={"found": looked_up})
    assert len(head.assets) == 1 and not head.variables
    assert not tail.assets and len(tail.variables) == 1
    head.save(tmp_path / "head")
    tail.save(tmp_path / "tail")
    found = fresh.run(tmp_path / "head", {"words": ["dog", "bird", "the"]})
    np.testing.assert_array_equal(fresh.run(tmp_path / "tail", found)["ids"], expected)
    assert list((tmp_path / "head" / "assets").iterdir())
    assert not list((tmp_path / "tail" / "assets").iterdir())


def test_a_vocabulary_is_put_before_an_embedding(vocabulary, fresh, tmp_path):
    path, expected = vocabulary
    module = tf.Module()
    module.rows = tf.Variable(numbers(20, 4), name="rows")
    spec = tf.TensorSpec([None], tf.int64, "ids")
    embed = tf.function(lambda ids: {"x": tf.gather(module.rows, ids)}, [spec])
    m = geutil_model.open(embed).prepend(geutil_model.open(path))
    m.save(tmp_path / "saved")
    outputs = fresh.run(tmp_path / "saved", {"words": ["dog", "bird", "the"]})
    np.testing.assert_array_equal(outputs["x"], module.rows.numpy()[expected])
    assert list((tmp_path / "saved" / "assets").iterdir())


@tf.function(
    input_signature=[
        tf.TensorSpec([None], tf.string, "jpegs"),
        tf.TensorSpec([None], tf.string, "names"),
    ]
)
def decode(jpegs, names):
    images = tf.map_fn(
        lambda jpeg: tf.image.resize(tf.io.decode_jpeg(jpeg, 3), [8, 8]),
        jpegs,
        fn_output_signature=tf.TensorSpec([8, 8, 3]),
    )
    parts = tf.strings.split(tf.strings.lower(names), "/").to_tensor(b"-")
    return {"images": images / 255, "upper": tf.strings.upper(names), "parts": parts}


def test_a_model_of_strings(fresh, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (2, 13, 11, 3)).astype(np.uint8)
    jpegs = [tf.io.encode_jpeg(p).numpy() for p in pixels]
    names = [b"Some/File.jpg", b"Other"]
    expected = {k: v.numpy() for k, v in decode(tf.constant(jpegs), names).items()}
    m = geutil_model.open(decode)
    inputs = {"jpegs": np.array(jpegs, object), "names": np.array(names, object)}
    assert_same(m.run(**inputs), expected)
    m.save(tmp_path / "saved")
    assert_same(fresh.run(tmp_path / "saved", inputs), expected)
    small = m.cut(outputs=["parts"])
    assert list(small.inputs) == ["names"]
    small.save(tmp_path / "small")
    outputs = fresh.run(tmp_path / "small", {"names": inputs["names"]})
    np.testing.assert_array_equal(outputs["parts"], expected["parts"])


class Autoencoder(tf.Module):
    """Two signatures that share a variable, each with one of its own."""

    def __init__(self):
        super().__init__()
        self.shared = tf.Variable(numbers(3, 2), name="shared")
        self.gain = tf.Variable(2.0, name="gain", trainable=False)
        self.bias = tf.Variable(numbers(3), name="bias")

    @tf.function(input_signature=[tf.TensorSpec([None, 3], name="x")])
    def encode(self, x):
        return {"code": x @ self.shared * self.gain}

    @tf.function(input_signature=[tf.TensorSpec([None, 2], name="code")])
    def decode(self, code):
        return {"x": tf.matmul(code, self.shared, transpose_b=True) + self.bias}

    def save(self, path):
        signatures = {"encode": self.encode, "decode": self.decode}
        tf.saved_model.save(self, str(path), signatures)
        return path


@pytest.mark.parametrize("opened", [["encode"], ["encode", "decode"]])
def test_signatures_share_their_variables(opened, fresh, tmp_path):
    module = Autoencoder()
    source = module.save(tmp_path / "source")
    m = geutil_model.open(source, signature=opened[0])
    for name in opened:
        assert m.signatures[name].variables == m.variables
    assert {n: v.trainable for n, v in m.variables.items()} == {
        "shared": True,
        "gain": False,
        "bias": True,
    }
    m.save(tmp_path / "saved")
    x, code, new = numbers(2, 3), numbers(2, 2), numbers(3, 2) + 1
    results = fresh.do(
        tmp_path / "saved",
        [
            ("run", "encode", {"x": x}),
            ("assign", "shared", new),
            ("run", "encode", {"x": x}),
            ("run", "decode", {"code": code}),
            ("variables",),
        ],
    )
    before, _, after, decoded, variables = results
    np.testing.assert_array_equal(before["code"], module.encode(x)["code"])
    module.shared.assign(new)
    np.testing.assert_array_equal(after["code"], module.encode(x)["code"])
    np.testing.assert_array_equal(decoded["x"], module.decode(code)["x"])
    assert variables == {
        "shared": ([3, 2], True),
        "gain": ([], False),
        "bias": ([3], True),
    }


def test_an_assignment_is_seen_by_both_opened_signatures(tmp_path):
    m = geutil_model.open(Autoencoder().save(tmp_path / "m"), signature="encode")
    x, code = numbers(2, 3), numbers(2, 2)
    m.run(x=x)
    m.variables["shared"].assign(np.zeros((3, 2)))
    np.testing.assert_array_equal(m.run(x=x)["code"], np.zeros((2, 2)))
    other = m.signatures["decode"]
    bias = m.variables["bias"].numpy()
    np.testing.assert_array_equal(other.run(code=code)["x"], np.stack([bias, bias]))


def test_a_spliced_signature_leaves_the_other_one(fresh, tmp_path):
    module = Autoencoder()
    source = module.save(tmp_path / "source")
    m = geutil_model.open(source, signature="encode")
    spec = tf.TensorSpec([None, 2], name="code")
    norm = tf.function(lambda code: {"norm": tf.norm(code, axis=-1)}, [spec])
    m.append(geutil_model.open(norm)).save(tmp_path / "saved")
    x, code = numbers(2, 3), numbers(2, 2)
    encoded, decoded = fresh.do(
        tmp_path / "saved",
        [("run", "encode", {"x": x}), ("run", "decode", {"code": code})],
    )
    expected = tf.norm(module.encode(x)["code"], axis=-1)
    np.testing.assert_allclose(encoded["norm"], expected, rtol=1e-6)
    np.testing.assert_array_equal(decoded["x"], module.decode(code)["x"])


def test_gradients_after_loading(fresh, tmp_path):
    tf.keras.utils.set_random_seed(1)
    model = lstm()
    words = integers(20, 2, 7)
    geutil_model.open(model).save(tmp_path / "saved")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(model(words)))
    expected = tape.gradient(loss, model.trainable_variables)
    (gradients,) = fresh.do(
        tmp_path / "saved",
        [("gradients", "serving_default", {"words": words}, "scores")],
    )
    assert len(gradients) == len(expected)
    for variable, gradient in zip(model.trainable_variables, expected, strict=True):
        name = variable.value.name.partition(":")[0]
        np.testing.assert_allclose(
            gradients[name],
            tf.convert_to_tensor(gradient),
            rtol=1e-4,
            atol=1e-6,
            err_msg=variable.path,
        )
