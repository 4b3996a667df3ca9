"""What the benchmark of chosen bits compares them with, and what it makes of that."""

import pytest
from parameterized import parameterized

from benchmarks.chosen_bits import Result, judged, ways
from geutil.quantize import BitOption, BitPlan, LayerBits


def layer(name, weights, bits, packed=True):
    half = weights // 2 if packed else weights
    options = (BitOption(4, half, 0.1, 0.2), BitOption(8, weights, 0.0, 0.1))
    return LayerBits((name,), "Conv2D", weights, bits, options)


LAYERS = (
    layer("small", 100, 4),
    layer("depthwise", 40, 8, packed=False),
    layer("large", 400, 4),
    layer("last", 200, 8),
)
PLAN = BitPlan("int8", "", LAYERS, (), 490, 740, 0.1, 0.1, 0.1)


@parameterized.expand(
    [
        ("8 bits", []),
        ("chosen", ["large", "small"]),
        ("largest first", ["large", "last"]),
        ("first layers", ["large", "small"]),
        ("last layers", ["large", "last"]),
        ("4 bits", ["depthwise", "large", "last", "small"]),
    ]
)
def test_each_way_gives_4_bits_until_its_bytes_fit(way, expected):
    bits = ways(PLAN, 0.67)[way]
    assert sorted(name for name, each in bits.items() if each == 4) == expected
    assert set(bits) == {each.ops[0] for each in LAYERS}


def result(way, share, decibels, loss=0.0):
    return Result("net", way, share, decibels, loss, 1000)


def lines(chosen):
    return judged(
        [
            result("8 bits", 1.0, 30.0),
            chosen,
            result("largest first", 0.6, 17.0),
            result("first layers", 0.6, 15.0),
            result("last layers", 0.6, 16.0),
            result("4 bits", 0.5, 10.0),
        ]
    )


def test_equal_bits_of_the_same_size_lie_on_a_line():
    """At 60 %, a fifth of the way from 50 %: 14 dB of 10 to 30."""
    loss, ahead, others = lines(result("chosen", 0.6, 18.0, 0.2))
    assert loss.strip() == "loss +0.20 points, at most 0.5 wanted"
    assert ahead == "+4.0 dB ahead of the line from 4 to 8 bits, 1.5 wanted"
    assert others == "+1.0 dB ahead of 'largest first'"


@pytest.mark.parametrize(
    ("decibels", "loss", "marks"), [(15.4, 0.5, [0, 1]), (15.6, 0.51, [1, 0])]
)
def test_what_is_not_reached_is_marked(decibels, loss, marks):
    found = lines(result("chosen", 0.6, decibels, loss))
    assert [line.count("(!)") for line in found[:2]] == marks
