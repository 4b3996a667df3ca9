"""What of a drawing is seen, in a browser: at any width, and of two the same part."""

import random

import networkx
import pytest

from geutil import report
from tests.report import samples

WIDTHS = (1400, 500, 360, 800)
SEEN = """(side) => {
  const { scene, viewport } = window.geutil.drawings[side];
  const { width, height } = viewport.size;
  const place = (x, y) => viewport.onScreen({ x, y });
  const from = place(scene.box.x1, scene.box.y1);
  const to = place(scene.box.x2, scene.box.y2);
  return {
    zoom: viewport.view.zoom, width, height, inner: innerWidth,
    box: [from.x, from.y, to.x, to.y],
    places: Object.fromEntries(scene.nodes.filter((node) => !node.open).map((node) => {
      const { x, y } = place((node.x1 + node.x2) / 2, (node.y1 + node.y2) / 2);
      return [node.key, [x, y]];
    })),
  };
}"""


def seen(page):
    return [page.page.evaluate(SEEN, side) for side in (0, 1)]


def is_whole(view):
    left, top, right, bottom = view["box"]
    inside = left >= 0 and right <= view["width"]
    return inside and top >= 0 and bottom <= view["height"]


def assert_aligned(page):
    """Assert that the first op is at one place in both panes, and seen."""
    before, after = seen(page)
    assert before["zoom"] == pytest.approx(after["zoom"])
    assert before["width"] == pytest.approx(after["width"], abs=2)
    x, y = before["places"][":image"]
    assert after["places"][":image"] == pytest.approx([x, y], abs=1)
    assert 0 < x < before["width"]
    assert 0 < y < before["height"]
    return before, after


def test_both_panes_show_the_same_part_at_any_width(fold, keep):
    """Fitted at first, whole on request, and around what was gone to."""
    for width in WIDTHS:
        fold.show_in(width=width)
        keep(fold, f"fold_{width}")
        for view in assert_aligned(fold):
            assert view["inner"] == width
            # Names can be read, and nothing is cut off at the sides.
            assert 0.5 <= view["zoom"] <= 1.2
            assert view["box"][0] >= 0
            assert view["box"][2] <= view["width"]
        scrolled = fold.page.evaluate("document.documentElement.scrollWidth")
        assert scrolled <= width
    fold.press("fit")
    for width in WIDTHS:
        fold.show_in(width=width)
        assert all(map(is_whole, assert_aligned(fold)))
    fold.go("stem_relu_1/Relu6")
    for width in WIDTHS:
        fold.show_in(width=width)
        for view in seen(fold):
            (key,) = (k for k in view["places"] if k.endswith("/stem_relu_1/Relu6"))
            middle = [view["width"] / 2, view["height"] / 2]
            assert view["places"][key] == pytest.approx(middle, abs=1)


def test_a_part_that_a_person_moved_to_stays(fold):
    fold.page.mouse.move(300, 500)
    fold.page.mouse.down()
    fold.page.mouse.move(340, 450, steps=4)
    fold.page.mouse.up()
    before = seen(fold)[0]
    fold.show_in(width=1200)
    after = seen(fold)[0]
    assert after["places"] == before["places"]
    assert after["zoom"] == before["zoom"]


def numbered(count):
    """Return a chain of ops with numbers for names, which come in no order."""
    chain = list(range(count))
    random.Random(5).shuffle(chain)
    before = {now: chain[at - 1] for at, now in enumerate(chain) if at}
    nodes = [
        ("Identity", f"{10_000 + name}", f"{10_000 + before[name]}")
        if name in before
        else ("Placeholder", f"{10_000 + name}")
        for name in range(count)
    ]
    nodes += [
        ("Tanh", f"chosen_{at}", f"{10_000 + chain[at]}") for at in range(0, count, 50)
    ]
    return samples.wired(nodes)


def in_turn(count):
    """Return layers whose names have a beginning in common and read each other."""
    nodes = [("Placeholder", "x")]
    for at in range(count):
        nodes.append(("Tanh", f"left_{at}", nodes[-1][1]))
        nodes.append(("Exp", f"right_{at}", f"left_{at}"))
    return samples.wired(nodes)


def test_groups_of_ops_make_no_cycle(browse, keep):
    pages = [browse(report.view(graph)) for graph in (numbered(400), in_turn(30))]
    for page in pages:
        edges = ((edge["source"], edge["target"]) for edge in page.edges())
        drawn = networkx.DiGraph(edges)
        assert networkx.is_directed_acyclic_graph(drawn)
        assert len(drawn) > 3
    keep(pages[0], "numbered")
    groups = {key for key in pages[0].drawn() if "{" in key}
    assert len(groups) > 10
    # Where a person chose a name, the group is called so.
    assert len({key for key in groups if "chosen_" in key}) >= 8
