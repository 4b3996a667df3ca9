"""The page of one graph, in a browser."""

import itertools

import tensorflow as tf

from geutil import report
from tests.report import samples


def test_a_page_tells_its_title_and_versions_and_asks_for_no_other_file(nested):
    assert nested.page.title() == "Some scopes"
    assert nested.page.locator("h1").inner_text() == "Some scopes"
    assert "TensorFlow" in nested.page.locator("header.title").inner_text()
    assert [url for url in nested.requests if url != "data:,"] == [nested.url]


def test_scopes_are_closed_at_first_and_open_and_close_at_once(nested):
    before = nested.drawn()
    assert {":x", "outer", ":joined"} <= before
    assert "outer/left" not in before or nested.open_scopes() == {"outer"}
    assert ":outer/left/product" not in before
    nested.press("open all")
    names = {op.name for op in samples.nested().get_operations()}
    shown = {key[1:] for key in nested.drawn() if key.startswith(":")}
    assert shown == names - {"outer/left/ones", "ready"}
    # What is drawn is within its scope.
    boxes = nested.boxes()
    assert ":outer/left/product" in boxes
    for key, (x1, y1, x2, y2) in boxes.items():
        if scope := key.removeprefix(":").rpartition("/")[0]:
            left, top, right, bottom = boxes[scope]
            assert left < x1 < x2 < right
            assert top < y1 < y2 < bottom
    # At once, as in a double click, but at two places, clicks close neither scope.
    shown = nested.open_scopes()
    nested.tap(nested.place("outer/left"), nested.place("outer/right"))
    assert nested.open_scopes() == shown
    assert nested.chosen() == {"outer/right"}
    nested.press("close all")
    assert nested.drawn() == before


def test_scopes_open_and_close_where_they_are(browse, folded, keep):
    page = browse(report.view(folded.before, title="MobileNetV2"))
    network = next(iter(page.open_scopes()))
    scope = f"{network}/stem_1"
    op = f":{network}/stem_1/convolution"
    assert op not in page.drawn()
    x, y = page.place(scope)
    page.toggle(scope)
    assert op in page.drawn()
    assert page.open_scopes() == {network, scope}
    left, top = page.place(scope)
    assert x - 200 < left < x
    assert abs(top - y) < 40
    keep(page, "view")
    page.toggle(scope)
    assert op not in page.drawn()
    assert page.open_scopes() == {network}


def test_weights_are_drawn_on_request_and_when_one_is_gone_to(nested):
    nested.press("open all")
    weights = nested.page.get_by_label("weights")
    assert ":outer/left/ones" not in nested.drawn()
    weights.check()
    assert ":outer/left/ones" in nested.drawn()
    weights.uncheck()
    assert ":outer/left/ones" not in nested.drawn()
    nested.go("ones")
    assert nested.chosen() == {":outer/left/ones"}
    assert weights.is_checked()


def test_edges_carry_what_the_tensors_hold(nested, browse):
    nested.press("open all")
    edges = {(edge["source"], edge["target"]): edge for edge in nested.edges()}
    product = edges[":x", ":outer/left/product"]
    assert product["label"] == "float32 [?, 3]"
    assert not product["control"]
    assert (":outer/right/tanh", ":joined") in edges
    # One tensor that is read twice in a scope is named once.
    nodes = [("Tanh", "one/a", "x"), ("Exp", "one/b", "x"), ("Tanh", "two/c", "one/b")]
    graph = samples.wired([("Placeholder", "x"), *nodes])
    page = browse(report.view(graph))
    page.press("close all")
    assert [edge["label"] for edge in page.edges()] == ["float32 [...]"] * 2


def crosses(points, box):
    """Tell whether a line of several parts goes through a box."""
    x1, y1, x2, y2 = box
    for start, end in itertools.pairwise(points):
        for step in range(101):
            x = start["x"] + (end["x"] - start["x"]) * step / 100
            y = start["y"] + (end["y"] - start["y"]) * step / 100
            if x1 < x < x2 and y1 < y < y2:
                return True
    return False


def test_edges_go_around_ops(browse):
    page = browse(report.view(samples.skipping()))
    boxes = page.boxes()
    (skip,) = (
        e for e in page.edges() if (e["source"], e["target"]) == (":x", ":joined")
    )
    assert len(skip["points"]) > 2
    for name in ("first", "second", "third"):
        assert not crosses(skip["points"], boxes[f":{name}"])


def test_details_of_ops_and_scopes(nested):
    nested.press("open all")
    nested.click(":outer/left/product")
    assert nested.chosen() == {":outer/left/product"}
    assert nested.heading == "outer/left/product"
    assert "type MatMul" in nested.details
    assert "CPU:0" in nested.details
    assert nested.listed("outputs") == [":0 float32 [?, 4]"]
    assert nested.listed("inputs") == [
        "x:0 float32 [?, 3]",
        "outer/left/ones:0 float32 [3, 4]",
    ]
    assert nested.listed("consumers") == ["outer/left/Relu Relu"]
    table = nested.table()
    assert table["transpose_a"] == "False"
    assert table["T"] == "float32"
    nested.click("outer/right")
    assert nested.heading == "right"
    assert "holds 1 op" in nested.details
    assert nested.table() == {"Tanh": "1"}
    nested.click(":joined")
    assert nested.chosen() == {":joined"}
    assert nested.listed("waits for") == ["ready"]
    assert "device any" in nested.details
    # What is chosen stays chosen when its scope closes.
    nested.click(":outer/left/product")
    nested.toggle("outer/right")
    nested.click(":outer/left/product")
    nested.press("close all")
    assert len(nested.chosen()) == 1
    nested.press("open all")
    assert nested.chosen() == {":outer/left/product"}
    # Beside the ops nothing is.
    canvas = nested.page.locator(".canvas").bounding_box()
    nested.page.mouse.click(canvas["x"] + 5, canvas["y"] + canvas["height"] - 5)
    assert nested.chosen() == set()


def test_a_consumer_can_be_gone_to(nested):
    nested.search("product")
    nested.page.locator(".results button.link").click()
    assert nested.heading == "outer/left/product"
    assert ":outer/right/tanh" not in nested.drawn()
    consumers = nested.page.locator("section.details h3:has-text('consumers') + ul")
    consumers.get_by_role("button", name="outer/left/Relu").click()
    assert nested.heading == "outer/left/Relu"
    consumers.get_by_role("button", name="outer/right/tanh").click()
    assert nested.heading == "outer/right/tanh"
    assert nested.chosen() == {":outer/right/tanh"}


PRODUCT, TANH = "outer/left/product", "outer/right/tanh"
SEARCHES = [
    ("TANH", "name", [TANH]),
    ("transpose_a", "name", []),
    ("relu", "type", ["outer/left/Relu"]),
    ("tanh", "type", [TANH]),
    ("outer", "type", []),
    (r"^outer/.*(tanh|product)$", "regex", [PRODUCT, TANH]),
    ("outer/(", "regex", []),
    ("outer/(left/p)", "regex", [PRODUCT]),
    ("transpose_a", "attribute", [PRODUCT]),
    ("matmul", "anything", [PRODUCT]),
    ("product", "anything", [PRODUCT]),
    ("transpose_a=false", "anything", [PRODUCT]),
]


def test_searches(nested):
    found = [(query, way, nested.search(query, way)) for query, way, _ in SEARCHES]
    assert found == SEARCHES
    assert "transpose_a=False" in nested.page.locator(".results li").inner_text()
    nested.search("outer/(", "regex")
    told = nested.page.locator(".results .removed").inner_text()
    assert "Unterminated group" in told
    nested.search("TANH")
    assert "1 found" in nested.page.locator(".results").inner_text()
    (marked,) = nested.marked()
    assert marked.startswith("outer")
    assert nested.search("") == []
    assert nested.marked() == set()


def test_the_nearest_hits_come_first(browse):
    """Ops that are called just so, then by their names, then by their attributes."""
    names = ["tanh", "scope/tanh", "tanh_before", "scope/tanh_before"]
    listed = (*names[2:], *names[1::-1], "transpose_a")
    tanhs = [("Tanh", name, "x") for name in listed]
    product = ("MatMul", "first", "x", "x")
    graph = samples.wired([("Placeholder", "x"), product, *tanhs])
    page = browse(report.view(graph))
    assert page.search("tanh") == names
    assert page.search("transpose_a", "anything") == ["transpose_a", "first"]


def test_keys_go_through_the_results(nested):
    results = nested.search("^outer/.*", "regex")
    assert len(results) > 2
    count = nested.page.locator(".results .count").inner_text()
    assert count.startswith(f"{len(results)} found")
    field = nested.page.get_by_label("search ops")
    visited = []
    for _ in range(len(results) + 1):
        field.press("Enter")
        visited.append(nested.heading)
    assert visited == [*results, results[0]]
    field.press("Shift+Enter")
    assert nested.heading == results[-1]
    count = nested.page.locator(".results .count").inner_text()
    assert count.startswith(f"{len(results)} of {len(results)} found")
    keyboard = nested.page.keyboard
    for key in ("ArrowDown", "ArrowDown", "Enter"):
        keyboard.press(key)
    assert nested.heading == results[1]
    for key in ("ArrowUp", "ArrowUp"):
        keyboard.press(key)
    keyboard.type("nothing")
    assert field.input_value().endswith("nothing")


def test_bodies_can_be_picked(browse, flow, keep):
    flowing = browse(report.view(flow))
    picker = flowing.page.get_by_label("graph", exact=True)
    options = picker.locator("option").all_text_contents()
    assert options[1:] == list(flow.functions)
    keep(flowing, "functions")
    body = next(name for name in options if "body" in name)
    picker.select_option(body)
    names = [op.name for op in flow.functions[body].graph.get_operations()]
    assert flowing.heading == body
    assert set(flowing.search(".", "regex")) == set(names)
    picker.select_option(options[0])
    assert flowing.search("in_loop") == []
    # A call leads to the body, too.
    flowing.go("While", "type")
    called = flowing.page.locator("section.details p:has-text('calls') button")
    assert called.count() == 2
    called.get_by_text(body).click()
    assert picker.input_value() == body
    assert flowing.search("in_loop") != []


def test_loops_of_version_1_are_drawn(browse, control_flow_v1):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        tf.compat.v1.while_loop(
            lambda i, _: i < 10, lambda i, y: (i + 1, tf.tanh(y)), [0, x]
        )
    page = browse(report.view(graph))
    page.press("open all")
    edges = {(edge["source"], edge["target"]) for edge in page.edges()}
    assert (":while/NextIteration", ":while/Merge") in edges
    assert (":while/Merge", ":while/Switch") in edges


def test_a_graph_without_ops_is_a_page(browse):
    page = browse(report.view(tf.Graph()))
    assert page.drawn() == set()
    assert "holds 0 ops" in page.details
    assert page.search("x") == []


def test_an_op_and_a_scope_of_one_name_are_two_things(browse):
    nodes = [("Tanh", "same", "x"), ("Exp", "same/inner", "same")]
    graph = samples.wired([("Placeholder", "x"), *nodes])
    page = browse(report.view(graph))
    assert {":same", "same"} <= page.drawn()
    page.toggle("same")
    assert {":same", "same", ":same/inner"} <= page.drawn()


def test_markup_in_a_graph_stays_text(browse):
    nasty = '</script><img src=x onerror="window.hacked=1">'
    page = browse(samples.marked_up(nasty))
    page.go("text")
    assert nasty in page.details
    assert page.page.title() == nasty
    assert page.page.locator("img").count() == 0
    assert page.page.evaluate("window.hacked") is None
