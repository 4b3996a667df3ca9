"""TFLite files against the graphs that they were made from."""

import functools
import json

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil import model, report
from geutil.cli.terminal import plain
from geutil.errors import ArgumentTypeError
from geutil.model import ModelError
from geutil.report.graphs import subject_of
from geutil.report.tflite_differences import pairs_of_file
from geutil.report.tflite_nodes import file_subject
from tests import tflite_files
from tests.settings import needs_eager

pytestmark = needs_eager

EVERY = [*tflite_files.SAMPLES]


@functools.cache
def compared(name):
    sample = tflite_files.SAMPLES[name]()
    return report.difference(sample.model, sample.blob)


@pytest.mark.parametrize("name", EVERY)
def test_a_file_computes_the_graph_that_it_was_made_from(name):
    """Each op that is placed by position is next to another of its node's ops."""
    found = compared(name)
    # The loop's own counter is not there: its condition counts on the graph's.
    lost = {"flow": [("while_body/while/add_1", "AddV2")]}
    assert list(found.missing) == lost.get(name, [])
    assert {op.op_type for op in found.added} <= {"QUANTIZE", "DEQUANTIZE"}
    assert found.is_empty == (name != "flow")
    assert len({op.op for op in found.ops}) == len(found.ops)
    sample = tflite_files.SAMPLES[name]()
    file = file_subject(sample.blob, signature=sample.model.signature)
    for pair in pairs_of_file(subject_of(sample.model), file):
        drawn = pair.graph.drawn_ops()
        places = {op.name: place for place, op in enumerate(drawn)}
        # Between an op and those placed with it may be ops that move values.
        moved = [p for p, op in enumerate(drawn) if op.type == "Reshape"]
        for node, placed in pair.matching.placed.items():
            members = {*pair.matching.ops_of(node), *moved}
            for place in placed:
                around = {t.op.name for t in drawn[place].inputs}
                around |= {o.name for t in drawn[place].outputs for o in t.consumers()}
                assert members & {places[n] for n in around if n in places}
        assert not pair.matching.constant & set(pair.matching.nodes)


def test_fused_ops_name_what_they_are_made_of():
    found = {op.op: op for op in compared("int8").ops}
    first = found["functional/stem_relu_1/Relu6".replace("functional", scope(found))]
    assert first.op_type == "CONV_2D"
    types = types_of(tflite_files.int8().model)
    kinds = [types[name] for name in (*first.named, *first.placed)]
    assert sorted(kinds) == ["BiasAdd", "Conv2D", "Relu6"]
    (mean,) = [op for op in found.values() if op.op_type == "MEAN"]
    assert [types[name] for name in mean.named] == ["Mean"]
    assert mean.placed == ()


def scope(found):
    return next(iter(found)).partition("/")[0]


def types_of(m):
    return {op.name: op.type for op in m.graph.get_operations()}


def test_every_product_of_the_graph_is_in_one_op_of_its_kind():
    kinds = {
        "Conv2D": "CONV_2D",
        "DepthwiseConv2dNative": "DEPTHWISE_CONV_2D",
        "MatMul": "FULLY_CONNECTED",
    }
    for name in ("floats", "unfolded", "int8", "dynamic_range"):
        reached = tflite_files.SAMPLES[name]().model.reached_ops()
        found = compared(name).ops
        for graph_op, kind in ((op.name, op.type) for op in reached):
            if kind in kinds:
                holders = [op for op in found if graph_op in (*op.named, *op.placed)]
                assert [op.op_type for op in holders] == [kinds[kind]], graph_op


def test_attention_is_matched_product_by_product():
    types = types_of(tflite_files.attention().model)
    kinds = {"BATCH_MATMUL", "CONV_2D", "FULLY_CONNECTED"}
    products = {"BatchMatMulV2", "BatchMatMulV3", "Conv2D", "Einsum", "MatMul"}
    held = []
    for op in compared("attention").ops:
        own = [n for n in (*op.named, *op.placed) if types[n] in products]
        assert len(own) <= 1
        # The converter also makes transpositions and reshapes of an Einsum.
        assert not own or op.op_type in kinds | {"RESHAPE", "TRANSPOSE"}
        held += own if op.op_type in kinds else []
    assert sorted(held) == sorted(n for n, kind in types.items() if kind in products)


def test_floats_are_told():
    found = compared("mixed")
    assert found.is_mixed
    assert [op.op for op in found.in_float] == ["between/sine"]
    assert "! between/sine (SIN) computes in float32" in str(found)
    assert not compared("floats").is_mixed
    assert json.loads(json.dumps(plain(found)))["ops"][0]["precision"] == "int8"


def test_bodies_of_loops_and_branches_are_matched():
    found = {op.op.rpartition("/")[2]: op for op in compared("flow").ops}
    assert found["in_loop"].named in (("while/in_loop",), ("in_loop",))
    assert found["Tanh"].op_type == "TANH"
    assert found["Exp"].op_type == "EXP"


def test_an_op_more_in_the_graph_is_missing_in_the_file():
    """So is an activation that no op applies."""
    m = model.open(tflite_files.network())
    with m.graph.as_default():
        (name,) = m.outputs
        m.outputs[name] = tf.math.softplus(m.outputs[name], name="more/softplus")
        relu = next(op for op in m.graph.get_operations() if op.type == "Relu6")
        readers = relu.outputs[0].consumers()
        more = tf.nn.relu(relu.outputs[0], name="more/relu")
    ge.reroute_ts(more, relu.outputs[0], can_modify=readers)
    found = report.difference(m, tflite_files.unfolded().blob)
    missing = [("more/relu", "Relu"), ("more/softplus", "Softplus")]
    assert sorted(found.missing) == missing
    assert not found.is_empty
    assert "- more/softplus (Softplus)" in str(found)


def test_an_op_more_in_the_file_is_added():
    kernel = np.ones((1, 1, 3, 3), np.float32)

    def function(more):
        @tf.function(input_signature=[tf.TensorSpec([1, 4, 4, 3], name="x")])
        def body(x):
            x = tf.nn.conv2d(x, kernel, 1, "SAME", name="first")
            if more:
                x = tf.sin(x, name="more")
            return {"y": tf.nn.max_pool2d(x, 2, 2, "SAME", name="last")}

        return model.open(body)

    file = tflite_files.saved(function(True))
    found = report.difference(function(False), file)
    assert [(op.op, op.op_type) for op in found.added] == [("more", "SIN")]
    assert not found.is_empty


def test_another_network_has_nothing_in_common():
    found = report.difference(tflite_files.lstm().model, tflite_files.floats().blob)
    assert len(found.missing) > 5
    assert not found.is_empty


def test_a_signature_picks_its_subgraph():
    sample = tflite_files.two_signatures()
    for name in ("encode", "decode"):
        m = sample.model.signatures[name]
        (op,) = report.difference(m, sample.blob).ops
        assert op.named[0] in types_of(m)


def test_a_path_a_function_and_the_other_order_do_as_well(tmp_path):
    path = tmp_path / "m.tflite"
    sample = tflite_files.mixed()
    path.write_bytes(sample.blob)
    for sides in (
        (sample.blob, sample.model),
        (sample.model, path),
        (sample.model, str(path)),
        (sample.model.concrete_function(), str(path)),
    ):
        assert report.difference(*sides) == compared("mixed")


def test_two_files_are_compared_by_names():
    blob = tflite_files.floats().blob
    same = report.difference(blob, blob)
    assert same.is_empty
    # Inputs and constants are drawn, too.
    assert same.common == len(compared("floats").ops)
    ends = f"(besides {same.common_ends} input(s) and constant(s))"
    assert str(same).startswith(f"{same.common} op(s) the same {ends}, 0 added")
    found = report.difference(blob, tflite_files.int8().blob)
    assert not found.is_empty
    assert {"Relu6"} & {entry.op.rpartition("/")[2] for entry in found.altered}


def test_what_is_no_file_or_a_broken_one_is_refused(tmp_path):
    for value in ("no such file", 7, None, "m.tflite.txt"):
        with pytest.raises(ArgumentTypeError, match="TFLite file"):
            report.view(value)
    with pytest.raises(ModelError, match="no file"):
        report.view(tmp_path / "missing.tflite")
    with pytest.raises(ModelError, match="no TFLite file"):
        report.view(b"something else")
    with pytest.raises(ModelError, match="cut off"):
        report.diff(tflite_files.int8().model, tflite_files.int8().blob[:2500])
