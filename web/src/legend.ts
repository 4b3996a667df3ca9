// What the colours of a drawing mean.

import {
  GROUP,
  HELD_LEGEND,
  LEGEND,
  noiseLegend,
  PLAIN,
  precisionLegend,
  STATUS_COLOURS,
} from "./colours";
import { element } from "./dom";
import { ADDED, FUSED, REMOVED, STATUS_NAMES, type Payload } from "./payload";
import { fill, onTheme, stroke, tones } from "./theme";

/** Returns the legend of the graphs that are shown, and what draws it anew. */
export function graphLegend(
  kind: Payload["kind"],
  shown: () => Payload["graphs"],
  isHeld: () => boolean = () => false,
): { panel: HTMLElement; draw: () => void } {
  const legend = element("footer", { className: "legend" });
  const draw = (): void => {
    const graphs = shown();
    const scope = ["closed scope", GROUP] as const;
    const fills = isHeld() ? HELD_LEGEND : [...(fillLegend(graphs) ?? LEGEND), scope];
    const { chosen, found, edge, control } = tones();
    legend.replaceChildren(
      ...(kind !== "view"
        ? part("border", [...statuses(graphs), ["same", PLAIN] as const], bordered)
        : []),
      ...part("fill", fills, filled),
      ...part("frame", [["chosen", chosen], [isHeld() ? "runs, or found" : "found", found]], framed),
      ...part("line", [["tensor", edge]], (colour) => lined(colour, "solid")),
      ...part("", [["order only", control]], (colour) => lined(colour, "dashed")),
      element("span", { className: "dim" }, "double-click opens and closes"),
    );
  };
  draw();
  onTheme(draw);
  return { panel: legend, draw };
}

type Entry = readonly [label: string, colour: string];

/** What the fill of ops means, where it is not their kind. */
function fillLegend(graphs: Payload["graphs"]): Entry[] | undefined {
  const noises = graphs.find((graph) => graph.noiseNames)?.noiseNames;
  if (noises) {
    const isAll = graphs.every((graph) => graph.noiseNames || !graph.names.length);
    return isAll ? noiseLegend(noises) : [...noiseLegend(noises), ...LEGEND];
  }
  const precisions = graphs.flatMap((graph) => graph.precisionNames ?? []);
  if (!precisions.length) return undefined;
  const entries: Entry[] = precisionLegend(precisions);
  // Beside a file stands a graph, whose ops are filled by their kind.
  return graphs.every((graph) => graph.precisionNames) ? entries : [...entries, ...LEGEND];
}

/** The statuses that there can be: a file and its graph differ in other ways than graphs. */
function statuses(graphs: Payload["graphs"]): Entry[] {
  const matched = graphs.some((graph) => graph.partners);
  return Object.entries(STATUS_COLOURS)
    .filter(([s]) => (matched ? [ADDED, REMOVED, FUSED].includes(+s) : +s !== FUSED))
    .map(([s, colour]) => [STATUS_NAMES[+s], colour]);
}

function part(title: string, entries: Entry[], look: (colour: string) => HTMLElement): Node[] {
  const marks = entries.map(([label, colour]) => element("span", {}, look(colour), label));
  return title ? [element("b", {}, title), ...marks] : marks;
}

function filled(colour: string): HTMLElement {
  const made = element("i");
  made.style.background = fill(colour);
  return made;
}

function bordered(colour: string): HTMLElement {
  const made = element("i", { className: "bordered" });
  made.style.borderColor = stroke(colour);
  return made;
}

function framed(colour: string): HTMLElement {
  const made = element("i", { className: "bordered" });
  made.style.borderColor = colour;
  return made;
}

function lined(colour: string, style: string): HTMLElement {
  const made = element("i", { className: "line" });
  made.style.borderTop = `2px ${style} ${colour}`;
  return made;
}
