// The line above a drawing: what it is, and what is drawn of it.

import { button, element, plural } from "./dom";
import type { Drawing } from "./drawing";

export function toolbar(drawing: Drawing): HTMLElement {
  const box = element("input", {
    type: "checkbox",
    className: "parameters",
    checked: drawing.parameters,
    onchange: () => drawing.setParameters(box.checked),
  });
  return element(
    "header",
    {},
    element("strong", { textContent: drawing.title }),
    element("span", { className: "dim", textContent: sizeOf(drawing) }),
    element("label", { title: "ops that hold or read weights and constants" }, box, "weights"),
    button("fit", () => drawing.fit(), "show all of the drawing"),
    button("open all", () => drawing.openAll()),
    button("close all", () => drawing.closeAll()),
  );
}

function sizeOf(drawing: Drawing): string {
  const { leftOut } = drawing.graph.data;
  const size = plural(drawing.graph.size, "op");
  return leftOut ? `${size}; ${leftOut.toLocaleString("en")} not run, not drawn` : size;
}
