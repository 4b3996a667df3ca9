"""What leaves a page: links to an op, pictures, names."""

import base64
import struct
import urllib.parse
import xml.etree.ElementTree as ET

import pytest
import tensorflow as tf

from geutil import report
from tests.report import samples

SVG = "{http://www.w3.org/2000/svg}"


def test_a_link_leads_to_an_op_or_a_scope(browse):
    page = browse(report.view(samples.nested()), "#op=outer/left")
    assert page.chosen() == {"outer/left"}
    assert page.heading == "left"
    graph = samples.nested()
    page = browse(report.diff(graph, graph), "#op=joined")
    assert page.chosen(0) == page.chosen(1) == {":joined"}
    page = browse(report.view(graph), "#op=not/there")
    assert "'not/there', which is no op or scope of this page" in page.details


def test_a_link_leads_into_a_function(browse, flow):
    body = next(name for name in flow.functions if "body" in name)
    ops = flow.functions[body].graph.get_operations()
    (op,) = (op.name for op in ops if op.type == "Relu")
    query = urllib.parse.urlencode({"op": op, "graph": body})
    page = browse(report.view(flow), f"#{query}")
    assert page.chosen() == {f":{op}"}
    assert page.page.get_by_label("graph", exact=True).input_value() == body
    page.search("While", "type")
    page.page.get_by_label("graph", exact=True).select_option(index=0)
    page.go("While", "type")
    assert address_of(page).partition("#")[2].startswith("op=")
    assert "graph=" not in address_of(page)


def address_of(page):
    return page.page.evaluate("location.href")


def test_the_address_is_a_link_to_what_is_chosen(nested, browse):
    nested.press("open all")
    nested.click(":outer/left/product")
    address = address_of(nested)
    assert address.endswith("#op=outer%2Fleft%2Fproduct")
    page = browse(report.view(samples.nested()), address.removeprefix(nested.url))
    assert page.chosen() == {":outer/left/product"}
    # A link is followed on an open page, too.
    page.page.evaluate("location.hash = '#op=joined'")
    page.page.locator("section.details h2", has_text="joined").wait_for()
    assert page.chosen() == {":joined"}
    canvas = nested.page.locator(".canvas").bounding_box()
    nested.page.mouse.click(canvas["x"] + 5, canvas["y"] + canvas["height"] - 5)
    assert address_of(nested) == nested.url


def test_names_with_any_letters_are_linked_to(browse):
    name = "a.b/c-d_e/f\\g>h"
    with tf.Graph().as_default() as graph:
        tf.tanh(tf.ones([2]), name=name)
    page = browse(report.view(graph))
    page.go("tanh", "type")
    link = address_of(page).removeprefix(page.url)
    assert browse(report.view(graph), link).heading == name


def saved(page, kind, folder):
    with page.page.expect_download() as download:
        page.press(kind)
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


def test_a_picture_of_what_is_shown(nested, tmp_path):
    nested.press("open all")
    path = saved(nested, "PNG", tmp_path)
    assert path.name == "graph.png"
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    canvas = nested.page.locator(".canvas").bounding_box()
    size = (2 * canvas["width"], 2 * canvas["height"])
    assert (width, height) == pytest.approx(size, abs=1)
    assert difference(nested, "png", data) < 2
    # By its dots: another drawing is another picture.
    nested.press("close all")
    assert difference(nested, "png", data) > 2


def difference(page, kind, data):
    """Return by how much a picture differs from the canvas, in steps of 255 a dot."""
    kinds = {"png": "image/png", "svg": "image/svg+xml"}
    url = f"data:{kinds[kind]};base64,{base64.b64encode(data).decode()}"
    return page.page.evaluate(
        """async (url) => {
          const { viewport } = window.geutil.drawings[0];
          viewport.onPaint();
          const { width, height } = viewport.canvas;
          const image = new Image();
          image.src = url;
          await image.decode();
          const dots = (picture) => {
            const pen = new OffscreenCanvas(width, height).getContext('2d');
            pen.drawImage(picture, 0, 0, width, height);
            return pen.getImageData(0, 0, width, height).data;
          };
          const [one, other] = [dots(viewport.canvas), dots(image)];
          let sum = 0;
          for (let i = 0; i < one.length; i++) sum += Math.abs(one[i] - other[i]);
          return sum / one.length;
        }""",
        url,
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_drawing_of_what_is_shown(browse, scheme, tmp_path):
    page = browse(report.diff(samples.nested(), samples.skipping()))
    page.show_in(scheme)
    page.press("open all")
    page.click(":joined")
    path = saved(page, "SVG", tmp_path)
    assert path.name == "before.svg"
    root = ET.parse(path).getroot()
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"product", "MatMul", "tanh", "joined", "AddV2"} <= set(texts)
    assert any(text.startswith("outer") for text in texts)
    assert difference(page, "svg", path.read_bytes()) < 1


def test_markup_in_names_stays_text_in_a_drawing(browse, tmp_path):
    graph = samples.wired([("Placeholder", "a>b")])
    path = saved(browse(report.view(graph)), "SVG", tmp_path)
    texts = [text.text for text in ET.parse(path).getroot().iter(f"{SVG}text")]
    assert texts == ["a>b", "Placeholder"]


def wait_for_copy(page, text):
    page.page.get_by_text("copied", exact=True).wait_for()
    page.until("async (text) => await navigator.clipboard.readText() === text", text)


def test_a_click_copies_a_name(nested):
    nested.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    nested.go("product")
    nested.page.get_by_role("button", name="outer/left/product").first.focus()
    nested.page.locator("section.details h2 button").click()
    wait_for_copy(nested, "outer/left/product")
    # The whole path of a scope is copied, of which the heading shows the end.
    nested.press("open all")
    nested.click("outer/right")
    nested.page.locator("section.details h2 button").click()
    wait_for_copy(nested, "outer/right")


def test_a_name_is_copied_where_the_clipboard_is_forbidden(nested):
    nested.page.evaluate(
        """() => Object.defineProperty(navigator, 'clipboard', { value: undefined })"""
    )
    nested.page.evaluate(
        "() => document.addEventListener('copy', () => { "
        "window.copied = document.activeElement.value; })"
    )
    nested.go("joined")
    nested.page.locator("section.details h2 button").click()
    nested.page.get_by_text("copied", exact=True).wait_for()
    assert nested.page.evaluate("window.copied") == "joined"
