// Chooses among the graphs of a page: the model, and the functions that it calls.

import { element, plural } from "./dom";
import { ADDED, SAME, type GraphData } from "./payload";

/** Returns a choice of graphs, of which one or two at a time are shown. */
export function graphPicker(
  sheets: GraphData[][],
  choose: (number: number) => void,
): HTMLSelectElement {
  const picker = element("select", { className: "graphs" });
  picker.setAttribute("aria-label", "graph");
  sheets.forEach((sheet, at) => picker.append(element("option", {}, choiceOf(sheet, at === 0))));
  picker.onchange = () => choose(picker.selectedIndex);
  return picker;
}

/** One graph by its name; of two that are compared, it tells where to look for changes. */
function choiceOf([graph, other]: GraphData[], isFirst: boolean): string {
  if (!other) return graph.label;
  const changes =
    (graph.status ?? []).filter((status) => status !== SAME).length +
    (other.status ?? []).filter((status) => status === ADDED).length;
  return `${isFirst ? "the model" : other.label} (${plural(changes, "change")})`;
}
