import re

import pytest

import geutil as ge


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("^foo/", True),
        ("", True),
        (re.compile("foo"), True),
        (b"foo", False),
        (1, False),
        (None, False),
        (["foo"], False),
        (re.compile("foo").search, False),
    ],
)
def test_can_be_regex(value, expected):
    assert ge.can_be_regex(value) is expected


def test_make_regex_compiles_a_string():
    regex = ge.make_regex("^fo+$")
    assert isinstance(regex, re.Pattern)
    assert regex.search("foo")
    assert not regex.search("bar")


def test_make_regex_returns_a_compiled_regex_as_it_is():
    regex = re.compile("foo", re.IGNORECASE)
    assert ge.make_regex(regex) is regex


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1, ["regex", "int"]),
        (None, ["regex", "NoneType"]),
        (b"foo", ["regex", "bytes"]),
        ("foo(", ["foo(", "re.escape"]),
        ("*", ["'*'", "re.escape"]),
    ],
)
def test_make_regex_refuses(value, words):
    with pytest.raises(ge.SelectionError) as caught:
        ge.make_regex(value)
    assert isinstance(caught.value, ValueError)
    for word in words:
        assert word in str(caught.value)
