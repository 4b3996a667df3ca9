"""Texts of protos, whose long strings protobuf's parser does not get to see."""

import random
import tracemalloc

import pytest
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


def test_keys_of_maps_and_what_says_to_stand_for_a_string_stay():
    graph_def = GraphDef()
    graph_def.library.function.add().ret["k" * 2 * LONG] = "v" * 2 * LONG
    graph_def.node.add(name=protos._MARK % 7, op="x" * 2 * LONG)
    text = text_format.MessageToString(graph_def)
    assert parse_text(text, GraphDef()) == graph_def


LONG_TEXT = "a" * 2 * LONG
UNCLOSED = ["node { name: 'a", f"node {{ name: '{LONG_TEXT}"]


def test_what_the_parser_refuses_is_refused():
    wrong = [f"node {{ name: '{LONG_TEXT}{bad}' }}" for bad in ("\n", "\\xq", "\\377")]
    for text in (*wrong, *UNCLOSED):
        for parse in (parse_text, text_format.Parse):
            with pytest.raises(protos.PARSE_ERRORS):
                parse(text, GraphDef())


def test_a_long_string_takes_less_than_four_times_its_memory():
    text = text_format.MessageToString(graph_with(random.Random(0).randbytes(1 << 20)))
    tracemalloc.start()
    try:
        parse_text(text, GraphDef())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(text)
