// What the colours of a drawing mean.

import { LEGEND, noiseLegend, precisionLegend, STATUS_COLOURS } from "./colours";
import { element } from "./dom";
import { ADDED, FUSED, REMOVED, STATUS_NAMES, type Payload } from "./payload";

export function graphLegend({ kind, graphs }: Payload): HTMLElement {
  const fills = fillLegend(graphs);
  const entries = kind === "diff" ? statuses(graphs) : fills.length ? [] : LEGEND;
  const marks = [...entries, ...fills].map(mark);
  const hint = element("span", { className: "dim" }, "double-click opens and closes");
  return element("footer", { className: "legend" }, ...marks, hint);
}

/** What the fill of ops means, where it is not their kind. */
function fillLegend(graphs: Payload["graphs"]): [string, string][] {
  const noises = graphs.find((graph) => graph.noiseNames)?.noiseNames;
  if (noises) return noiseLegend(noises);
  return precisionLegend(graphs.flatMap((graph) => graph.precisionNames ?? []));
}

/** The statuses that there can be: a file and its graph differ in other ways than graphs. */
function statuses(graphs: Payload["graphs"]): [string, string][] {
  const matched = graphs.some((graph) => graph.partners);
  return Object.entries(STATUS_COLOURS)
    .filter(([s]) => (matched ? [ADDED, REMOVED, FUSED].includes(+s) : +s !== FUSED))
    .map(([s, colour]) => [STATUS_NAMES[+s], colour]);
}

function mark([label, colour]: [string, string]): HTMLElement {
  const made = element("i");
  made.style.background = colour;
  return element("span", {}, made, label);
}
