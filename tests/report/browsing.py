"""A page in a browser, used as a person uses it.

Graphs are drawn on a canvas, which does not tell what is on it. So clicks go to where
an item is, and what is drawn is read from `window.geutil.drawings`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_PLACE = """([side, key]) => {
  const { core } = window.geutil.drawings[side];
  const node = core.getElementById(key);
  if (node.empty()) throw new Error(`'${key}' is not drawn`);
  const canvas = core.container().getBoundingClientRect();
  const { x, y } = node.renderedPosition();
  if (!node.hasClass('open')) return [canvas.x + x, canvas.y + y];
  // An open scope is clicked in its upper left corner, where nothing lies in it.
  const left = x - node.renderedOuterWidth() / 2;
  const top = y - node.renderedOuterHeight() / 2;
  return [canvas.x + left + 6, canvas.y + top + 6];
}"""
_KEYS = """([side, selector]) =>
  window.geutil.drawings[side].core.elements(selector).map((one) => one.id())"""
_EDGES = """(side) => window.geutil.drawings[side].core.edges().map((edge) => ({
  source: edge.source().id(),
  target: edge.target().id(),
  label: edge.data('label'),
  control: edge.hasClass('control'),
  points: [
    edge.sourceEndpoint(), ...(edge.segmentPoints() ?? []), edge.targetEndpoint(),
  ],
}))"""
_BOXES = """(side) => Object.fromEntries(
  window.geutil.drawings[side].core.nodes().map((node) => {
    const { x1, y1, x2, y2 } = node.boundingBox(
      { includeLabels: false, includeOverlays: false });
    return [node.id(), [x1, y1, x2, y2]];
  }))"""


class Opened:
    """An open page.

    Items are called by their keys: the path of a scope, the name of an op behind a
    colon.
    """

    def __init__(self, page: Any, path: Path) -> None:
        self.page = page
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
        page.goto(self.url)
        page.wait_for_selector("body[data-ready]")

    def close(self) -> None:
        """Leave the page; the tab is as good as new."""
        self.page.goto("about:blank")
        for event, listener in self._heard.items():
            self.page.remove_listener(event, listener)

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    # What is drawn.

    def drawn(self, side: int = 0, selector: str = "node") -> set[str]:
        return set(self.page.evaluate(_KEYS, [side, selector]))

    def chosen(self, side: int = 0) -> set[str]:
        return self.drawn(side, "node.chosen")

    def marked(self, side: int = 0) -> set[str]:
        return self.drawn(side, "node.marked")

    def open_scopes(self, side: int = 0) -> set[str]:
        return self.drawn(side, "node.open")

    def edges(self, side: int = 0) -> list[dict[str, Any]]:
        return self.page.evaluate(_EDGES, side)

    def boxes(self, side: int = 0) -> dict[str, list[float]]:
        return self.page.evaluate(_BOXES, side)

    def place(self, key: str, side: int = 0) -> tuple[float, float]:
        x, y = self.page.evaluate(_PLACE, [side, key])
        return x, y

    # What a person does.

    def click(self, key: str, side: int = 0) -> None:
        self.page.mouse.click(*self.place(key, side))

    def toggle(self, key: str, side: int = 0) -> None:
        """Double-click an item."""
        self.page.mouse.dblclick(*self.place(key, side))

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
