import re

import pytest

import geutil as ge
from tests.select.tables import BUILTINS


def test_can_be_regex():
    assert all(map(ge.can_be_regex, ("^foo/", "", re.compile("foo"))))
    others = (b"foo", 1, None, ["foo"], re.compile("foo").search)
    assert not any(map(ge.can_be_regex, others))


def test_make_regex():
    made = ge.make_regex("^fo+$")
    assert isinstance(made, re.Pattern)
    assert made.search("foo")
    assert not made.search("bar")
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
    assert isinstance(caught.value, BUILTINS[ge.SelectionError])
    assert all(word in str(caught.value) for word in words)
