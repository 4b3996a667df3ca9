"""Texts of protos, whose long strings protobuf's parser does not get to see."""

import random
import tracemalloc

import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from geutil.graph import protos
from geutil.graph.protos import GraphDef, parse_text
from tests.thorough import examples

LONG = 1 << 14


def graph_with(*values, long=LONG):
    graph_def = GraphDef()
    node = graph_def.node.add(name='a"b\\', op="Const")
    node.attr["value"].tensor.tensor_content = values[0]
    node.attr["list"].list.s.extend([b"x", *values, b"'\"\\\x01"])
    graph_def.library.function.add().signature.description = "d'\"#" * long
    return graph_def


@pytest.mark.parametrize("size", [10, LONG + 1])
def test_long_strings_come_out_as_they_were(size):
    data = random.Random(size).randbytes(size)
    graph_def = graph_with(data, b"#" * size, b"\\" * size, b'"' * size, data[::-1])
    text = "# it's a \"comment\n" + text_format.MessageToString(graph_def)
    assert parse_text(text, GraphDef()) == graph_def


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=4))
@examples(200)
def test_any_strings_come_out_as_they_were(values):
    graph_def = graph_with(*values, long=20)
    text = text_format.MessageToString(graph_def)
    limit = protos._LONG
    protos._LONG = 4
    try:
        assert parse_text(text, GraphDef()) == text_format.Parse(text, GraphDef())
    finally:
        protos._LONG = limit


def test_adjacent_strings_are_one():
    text = f"node {{ name: '{'a' * 2 * LONG}' \"{'b' * 2 * LONG}\" 'c' }}"
    (node,) = parse_text(text, GraphDef()).node
    assert node.name == "a" * 2 * LONG + "b" * 2 * LONG + "c"


def test_long_keys_and_values_of_maps_stay():
    name = "k" * 2 * LONG
    graph_def = GraphDef()
    graph_def.library.function.add().ret[name] = "v" * 2 * LONG
    text = text_format.MessageToString(graph_def)
    assert parse_text(text, GraphDef()) == graph_def


def test_what_says_to_stand_for_a_string_is_itself():
    graph_def = GraphDef()
    graph_def.node.add(name=protos._MARK % 7, op="x" * 2 * LONG)
    text = text_format.MessageToString(graph_def)
    assert parse_text(text, GraphDef()) == graph_def


@pytest.mark.parametrize("bad", ["\n", "\\xq", "\\377"])
def test_what_the_parser_refuses_is_refused(bad):
    text = f"node {{ name: '{'a' * 2 * LONG}{bad}' }}"
    for parse in (parse_text, text_format.Parse):
        with pytest.raises(protos.PARSE_ERRORS):
            parse(text, GraphDef())


def test_an_unclosed_string_is_refused():
    for text in ("node { name: 'a", "node { name: '" + "a" * 2 * LONG):
        with pytest.raises(protos.PARSE_ERRORS):
            parse_text(text, GraphDef())


def test_constants_of_tensorflow_come_out_as_they_were():
    with tf.Graph().as_default() as graph:
        tf.constant(np.random.default_rng(0).normal(size=[100, 100]))
        tf.constant([b"a" * 2 * LONG, b"\xff" * LONG])
    graph_def = graph.as_graph_def()
    assert parse_text(text_format.MessageToString(graph_def), GraphDef()) == graph_def


def test_a_long_string_takes_less_than_four_times_its_memory():
    text = text_format.MessageToString(graph_with(random.Random(0).randbytes(1 << 20)))
    tracemalloc.start()
    try:
        parse_text(text, GraphDef())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(text)
