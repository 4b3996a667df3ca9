"""A page in a browser, used as a person uses it.

Graphs are drawn on a canvas, which does not tell what is on it. So clicks go to where
an item is, and what is drawn is read from `window.geutil.drawings`.
"""

import re
import time
from pathlib import Path
from typing import Any

_PLACE = """([side, key]) => {
  const { scene, viewport } = window.geutil.drawings[side];
  const node = scene.byKey.get(key);
  if (!node) throw new Error(`'${key}' is not drawn`);
  const canvas = viewport.canvas.getBoundingClientRect();
  // An open scope is clicked in its upper left corner, where nothing lies in it.
  const corner = viewport.onScreen({ x: node.x1, y: node.y1 });
  if (node.open) return [canvas.x + corner.x + 6, canvas.y + corner.y + 6];
  const { x, y } = viewport.onScreen(
    { x: (node.x1 + node.x2) / 2, y: (node.y1 + node.y2) / 2 });
  return [canvas.x + x, canvas.y + y];
}"""
_KEYS = """([side, kind]) => {
  const drawing = window.geutil.drawings[side];
  const is = {
    all: () => true,
    open: (node) => node.open,
    chosen: (node) => node === drawing.chosen,
    marked: (node) => drawing.found.has(node),
  }[kind];
  return drawing.scene.nodes.filter(is).map((node) => node.key);
}"""
_EDGES = """(side) => window.geutil.drawings[side].scene.edges.map((edge) => ({
  source: edge.source.key,
  target: edge.target.key,
  label: edge.label,
  control: edge.control,
  points: edge.points,
}))"""
_NODES = """([side, what]) => Object.fromEntries(
  window.geutil.drawings[side].scene.nodes.map((node) => [node.key, node[what]]))"""
_FRAMES = """() => new Promise((done) =>
  requestAnimationFrame(() => requestAnimationFrame(done)))"""
_SHOWN_IN = """([width, height, scheme]) => {
  const drawings = window.geutil?.drawings ?? [];
  const fit = drawings.every(({ viewport: { size, holder } }) =>
    size.width === holder.clientWidth && size.height === holder.clientHeight);
  // A chart follows its panel a frame later.
  const charts = [...document.querySelectorAll('.chart')].every((panel) =>
    (panel.querySelector('.uplot')?.clientWidth ?? panel.clientWidth)
    === panel.clientWidth);
  const offer = document.querySelector('button.theme')?.textContent;
  const other = scheme === 'dark' ? 'light' : 'dark';
  return fit && charts && innerWidth === width && innerHeight === height
    && (offer ?? `${other} colours`) === `${other} colours`;
}"""
_DOTS = """(selector) => {
  window.geutil?.drawings.forEach(({ viewport }) => viewport.onPaint());
  return [...document.querySelectorAll(selector)].map((canvas) => {
    const { width, height } = canvas;
    // A copy: a canvas that is read often is drawn without the graphics card.
    const pen = new OffscreenCanvas(width, height).getContext('2d');
    pen.drawImage(canvas, 0, 0);
    const { data } = pen.getImageData(0, 0, width, height);
    const seen = {};
    for (let i = 0; i < data.length; i += 4) {
      const key = data.slice(i, i + 3).join();
      seen[key] = (seen[key] ?? 0) + 1;
    }
    return seen;
  });
}"""
SIZE = {"width": 1400, "height": 900}
_BOXES = """(side) => Object.fromEntries(
  window.geutil.drawings[side].scene.nodes.map(({ key, x1, y1, x2, y2 }) =>
    [key, [x1, y1, x2, y2]]))"""


class Opened:
    """An open page.

    Items are called by their keys: the path of a scope, the name of an op behind a
    colon.
    """

    def __init__(self, page: Any, path: Path, link: str = "") -> None:
        self.page = page
        self._size, self._scheme = SIZE, "light"
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._heard = {
            "console": self._hear,
            "pageerror": lambda error: self.complaints.append(str(error)),
            "request": lambda request: self.requests.append(request.url),
        }
        for event, listener in self._heard.items():
            page.on(event, listener)
        self.url = path.as_uri()
        self._step_forward()
        page.goto(self.url + link)
        page.wait_for_selector("body[data-ready]")

    def close(self) -> None:
        """Leave the page; the tab is as good as new."""
        if (self._size, self._scheme) != (SIZE, "light"):
            self.page.emulate_media(color_scheme="light")
            self.page.set_viewport_size(SIZE)
        self.page.goto("about:blank")
        for event, listener in self._heard.items():
            self.page.remove_listener(event, listener)

    def _step_forward(self) -> None:
        """Be the tab in front: another, once resized, gets one frame a second."""
        self.page.bring_to_front()

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    # What is drawn.

    def drawn(self, side: int = 0, kind: str = "all") -> set[str]:
        self.wait()
        return set(self.page.evaluate(_KEYS, [side, kind]))

    def wait(self) -> None:
        """Wait until nothing is being drawn."""
        self.page.wait_for_selector("body:not([data-busy])")

    def show_in(
        self, scheme: str = "light", width: int = SIZE["width"], height: int = 900
    ) -> None:
        """Change the colours and the size, and wait until the page has followed."""
        self._size, self._scheme = {"width": width, "height": height}, scheme
        self._step_forward()
        self.page.emulate_media(color_scheme=scheme)
        self.page.set_viewport_size(self._size)
        self.until(_SHOWN_IN, [width, height, scheme])
        self.page.evaluate(_FRAMES)

    def until(self, condition: str, argument: Any = None) -> None:
        """Wait for a condition; the page's own policy forbids it to evaluate one."""
        for _ in range(12_000):
            if self.page.evaluate(condition, argument):
                return
            # To ask without a pause takes the processor that the page needs.
            self.page.wait_for_timeout(10)
        raise AssertionError(f"never true: {condition}")

    def dots(
        self, selector: str = ".canvas canvas"
    ) -> list[dict[tuple[int, ...], int]]:
        """Return the colours of canvases, with how many dots have each."""
        self.wait()
        counts = self.page.evaluate(_DOTS, selector)
        return [{numbers(key): n for key, n in one.items()} for one in counts]

    def chosen(self, side: int = 0) -> set[str]:
        return self.drawn(side, "chosen")

    def marked(self, side: int = 0) -> set[str]:
        return self.drawn(side, "marked")

    def open_scopes(self, side: int = 0) -> set[str]:
        return self.drawn(side, "open")

    def edges(self, side: int = 0) -> list[dict[str, Any]]:
        self.wait()
        return self.page.evaluate(_EDGES, side)

    def boxes(self, side: int = 0) -> dict[str, list[float]]:
        self.wait()
        return self.page.evaluate(_BOXES, side)

    def colours(self, what: str, side: int = 0) -> dict[str, str]:
        """Return the colours of what is drawn: its "fill", or its "border"."""
        self.wait()
        return self.page.evaluate(_NODES, [side, what])

    def place(self, key: str, side: int = 0) -> tuple[float, float]:
        self.wait()
        x, y = self.page.evaluate(_PLACE, [side, key])
        return x, y

    # What a person does.

    def click(self, key: str, side: int = 0) -> None:
        self.page.mouse.click(*self.place(key, side))

    def toggle(self, key: str, side: int = 0) -> None:
        """Double-click an item."""
        place = self.place(key, side)
        self.tap(place, place)

    def tap(self, *places: tuple[float, float]) -> None:
        """Click at places at once, however long the browser takes for it."""
        session = self.page.context.new_cdp_session(self.page)
        at = time.time()
        for count, (x, y) in enumerate(places, 1):
            for kind in ("mousePressed", "mouseReleased"):
                event = {"type": kind, "x": x, "y": y, "button": "left"}
                event |= {"clickCount": count, "timestamp": at}
                session.send("Input.dispatchMouseEvent", event)
        session.detach()

    def press(self, button: str, side: int = 0) -> None:
        panel = self.page.locator("section.drawing").nth(side)
        panel.get_by_role("button", name=button, exact=True).click()

    def turn_to(self, tab: str) -> None:
        self.page.get_by_role("tab", name=tab, exact=True).click()

    def search(self, query: str, way: str = "name") -> list[str]:
        """Search, and return the names of the ops that are listed."""
        self.turn_to("search")
        self.page.get_by_label("what to search").select_option(way)
        self.page.get_by_label("search ops").fill(query)
        return self.page.locator(".results button.link").all_text_contents()

    def go(self, query: str, way: str = "name") -> None:
        """Search, and go to the first op that is listed."""
        self.search(query, way)
        self.page.get_by_label("search ops").press("Enter")

    # What stands beside the drawing.

    @property
    def details(self) -> str:
        return self.page.get_by_label("details", exact=True).inner_text()

    @property
    def heading(self) -> str:
        return self.page.get_by_label("details", exact=True).locator("h2").inner_text()

    def listed(self, section: str) -> list[str]:
        """Return the lines below a heading of the details, such as "consumers"."""
        lists = self.page.locator(f"section.details h3:has-text('{section} (') + ul")
        return lists.locator("li").all_inner_texts()

    def table(self) -> dict[str, str]:
        """Return the last table of the details."""
        rows = self.page.locator("section.details table").last.locator("tr")
        cells = [row.locator("td").all_inner_texts() for row in rows.all()]
        return dict(cells)


def numbers(colour: str) -> tuple[int, ...]:
    """Return red, green and blue of a colour of a style."""
    return tuple(map(int, re.findall(r"\d+", colour)[:3]))


def hexadecimal(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))
