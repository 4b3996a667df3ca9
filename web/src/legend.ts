// What the colours of a drawing mean.

import { LEGEND, STATUS_COLOURS } from "./colours";
import { element } from "./dom";
import { STATUS_NAMES, type Payload } from "./payload";

export function graphLegend(kind: Payload["kind"]): HTMLElement {
  const entries: [string, string][] =
    kind === "diff"
      ? Object.entries(STATUS_COLOURS).map(([s, colour]) => [STATUS_NAMES[+s], colour])
      : LEGEND;
  const hint = element("span", { className: "dim" }, "double-click opens and closes");
  return element("footer", { className: "legend" }, ...entries.map(mark), hint);
}

function mark([label, colour]: [string, string]): HTMLElement {
  const made = element("i");
  made.style.background = colour;
  return element("span", {}, made, label);
}
