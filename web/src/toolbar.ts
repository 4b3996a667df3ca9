// The line above a drawing: what it is, and what is drawn of it.

import { button, element } from "./dom";
import type { Drawing } from "./drawing";
import { STEP } from "./keyboard";
import { saveAsPng, saveAsSvg } from "./sharing";

export function toolbar(drawing: Drawing): HTMLElement {
  const box = element("input", {
    type: "checkbox",
    className: "parameters",
    checked: drawing.parameters,
    onchange: () => drawing.setParameters(box.checked),
  });
  drawing.onParameters = (shown) => (box.checked = shown);
  const out = button("−", () => drawing.zoomBy(1 / STEP), "zoom out (-)");
  out.setAttribute("aria-label", "zoom out");
  const closer = button("+", () => drawing.zoomBy(STEP), "zoom in (+)");
  closer.setAttribute("aria-label", "zoom in");
  return element(
    "header",
    {},
    element("strong", { textContent: drawing.title }),
    element("span", { className: "dim", textContent: sizeOf(drawing) }),
    element("label", { title: "ops that hold or read weights and constants" }, box, "weights"),
    element(
      "span",
      { className: "buttons" },
      out,
      closer,
      button("fit", () => drawing.fit(), "show all of the drawing (0)"),
    ),
    element(
      "span",
      { className: "buttons" },
      button("open all", () => drawing.openAll()),
      button("close all", () => drawing.closeAll()),
    ),
    element(
      "span",
      { className: "buttons" },
      button("PNG", () => saveAsPng(drawing), "save what is shown as a picture"),
      button("SVG", () => saveAsSvg(drawing), "save what is shown as a drawing"),
    ),
  );
}

function sizeOf(drawing: Drawing): string {
  const { leftOut } = drawing.graph.data;
  const size = drawing.graph.countText(drawing.hierarchy.root.ops);
  return leftOut ? `${size}; ${leftOut.toLocaleString("en")} not run, not drawn` : size;
}
