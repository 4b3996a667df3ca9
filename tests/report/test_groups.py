"""Groups of drawings: none form a cycle, inserted ops stay with what they read."""

import pytest

from geutil import report
from tests.report import samples
from zoo.groups import CHAINS, tied_groups


def cycles(page, drawn, side=0):
    page.wait()
    chains = page.page.evaluate(CHAINS, side)
    return tied_groups(chains, drawn.payload["graphs"][side])


def test_the_check_finds_groups_that_point_at_each_other():
    graph = {
        "typeNames": ["Tanh"],
        "types": [0, 0, 0],
        "inputs": [[], [0, 0], [1, 0]],
        "controls": [[], [], []],
    }
    chains = [["a", ":a/x"], ["b", ":b/y"], ["a", ":a/z"]]
    assert tied_groups(chains, graph) == [["a", "b"]]
    assert tied_groups([*chains[:2], ["b", ":a/z"]], graph) == []


@pytest.mark.parametrize("name", ["folded", "quantized"])
def test_edited_networks_have_no_cycles(browse, name, folded, quantized):
    edited = {"folded": folded, "quantized": quantized}[name]
    drawn = report.diff(edited.before, edited.after)
    page = browse(drawn)
    assert cycles(page, drawn, 0) == cycles(page, drawn, 1) == []


def test_training_steps_have_no_cycles(browse):
    drawn = report.view(samples.training_graph("memory"))
    assert {"gradients", "recomputed"} <= {
        name.split("/")[0] for name in drawn.payload["graphs"][0]["names"]
    }
    assert cycles(browse(drawn), drawn) == []


def test_an_inserted_op_lies_in_the_group_of_what_it_reads(browse):
    """Only it moves, with the scopes of its name; the layers keep theirs."""
    graph = samples.wired(
        [
            ("Placeholder", "x"),
            ("Tanh", "conv/kernel", "x"),
            ("Exp", "norm/scaled", "conv/kernel"),
            ("Tanh", "act/squashed", "norm/scaled"),
            ("Exp", "conv/rounded", "act/squashed"),
            ("Tanh", "next/kernel", "conv/rounded"),
        ]
    )
    drawn = report.view(graph)
    page = browse(drawn)
    assert cycles(page, drawn) == []
    chains = dict(
        zip(
            drawn.payload["graphs"][0]["names"],
            page.page.evaluate(CHAINS, 0),
            strict=True,
        )
    )
    assert chains["conv/rounded"] == ["act", "act/conv", ":conv/rounded"]
    for name in ("conv/kernel", "norm/scaled", "act/squashed", "next/kernel"):
        assert chains[name] == [name.split("/")[0], f":{name}"]
    # It is found, and its group opened, by its name all the same.
    page.go("conv/rounded")
    assert page.chosen() == {":conv/rounded"}
    assert page.open_scopes() == {"act", "act/conv"}
