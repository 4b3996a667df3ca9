import pytest

from geutil.graph.colocation import rename_entries


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], []),
        ([b"loc:@x"], [b"loc:@copy/x"]),
        ([b"loc:@gone"], []),
        ([b"other", b"loc:@x", b"loc:@gone"], [b"other", b"loc:@copy/x"]),
        ([b"loc@x"], [b"loc@x"]),
    ],
)
def test_rename_entries(entries, expected):
    def rename(name):
        return None if name == "gone" else f"copy/{name}"

    assert rename_entries(entries, rename) == expected
