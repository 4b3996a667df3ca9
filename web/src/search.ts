// Finds ops by name, by type, or by a regular expression over both.

import type { Drawing } from "./drawing";
import { element, link } from "./dom";

export interface Match {
  drawing: Drawing;
  op: number;
}

/** More results than these are counted, not listed. */
const LISTED = 200;

export type Way = "name" | "type" | "regex";

/** Returns what tells whether an op is meant; throws if the expression is none. */
export function matcher(query: string, way: Way): (name: string, type: string) => boolean {
  if (way === "regex") {
    const pattern = new RegExp(query, "i");
    return (name, type) => pattern.test(name) || pattern.test(type);
  }
  const wanted = query.toLowerCase();
  if (way === "type") return (_, type) => type.toLowerCase().includes(wanted);
  return (name) => name.toLowerCase().includes(wanted);
}

/** Returns the ops that are meant, those that are called just so first. */
export function findOps(drawings: Drawing[], query: string, way: Way): Match[] {
  const matches = matcher(query, way);
  const found: Match[] = [];
  for (const drawing of drawings) {
    const { graph } = drawing;
    for (let op = 0; op < graph.size; op++) {
      if (matches(graph.name(op), graph.type(op))) found.push({ drawing, op });
    }
  }
  const wanted = query.toLowerCase();
  const rank = ({ drawing, op }: Match): number => {
    const text = way === "type" ? drawing.graph.type(op) : drawing.graph.name(op);
    const name = text.toLowerCase();
    return name === wanted ? 0 : name.endsWith(`/${wanted}`) ? 1 : 2;
  };
  return way === "regex" ? found : found.sort((a, b) => rank(a) - rank(b));
}

export function searchPanel(
  drawings: () => Drawing[],
  show: (match: Match) => void,
): HTMLElement {
  const input = element("input", {
    type: "search",
    placeholder: "search ops",
    id: "search",
    autocomplete: "off",
  });
  input.setAttribute("aria-label", "search ops");
  const way = element("select", { id: "search-way" });
  for (const name of ["name", "type", "regex"]) way.append(element("option", {}, name));
  way.setAttribute("aria-label", "what to search");
  const results = element("div", { className: "results" });
  let found: Match[] = [];
  let next = 0;
  const search = (): void => {
    results.replaceChildren();
    for (const drawing of drawings()) drawing.mark([]);
    found = [];
    next = 0;
    if (!input.value) return;
    try {
      found = findOps(drawings(), input.value, way.value as Way);
    } catch (error) {
      results.append(element("p", { className: "removed" }, (error as Error).message));
      return;
    }
    for (const drawing of drawings()) {
      drawing.mark(found.filter((match) => match.drawing === drawing).map((m) => m.op));
    }
    results.append(...resultLines(found, drawings().length > 1, show));
  };
  input.oninput = search;
  way.onchange = search;
  input.onkeydown = (event) => {
    // Once more goes to the next one.
    if (event.key === "Enter" && found.length) show(found[next++ % found.length]);
    if (event.key === "ArrowDown") step(results, event, 1);
  };
  results.onkeydown = (event) => {
    if (event.key === "ArrowDown") step(results, event, 1);
    if (event.key === "ArrowUp" && !step(results, event, -1)) input.focus();
  };
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target instanceof HTMLInputElement) return;
    event.preventDefault();
    input.focus();
  });
  return element("div", { className: "search" }, input, way, results);
}

/** Moves the focus among the results; returns whether there was one to move to. */
function step(results: HTMLElement, event: KeyboardEvent, by: number): boolean {
  const links = [...results.querySelectorAll<HTMLElement>("button.link")];
  const wanted = links[links.indexOf(document.activeElement as HTMLElement) + by];
  event.preventDefault();
  wanted?.focus();
  return wanted !== undefined;
}

function resultLines(
  found: Match[],
  several: boolean,
  show: (match: Match) => void,
): HTMLElement[] {
  const lines = found.slice(0, LISTED).map((match) => {
    const { graph, title } = match.drawing;
    const side = several ? `${title}: ` : "";
    return element(
      "li",
      {},
      element("span", { className: "dim" }, side),
      link(graph.name(match.op), () => show(match)),
      ` ${graph.type(match.op)}`,
    );
  });
  const listed = found.length > LISTED ? `, the first ${LISTED} listed` : "";
  const count = element("p", { className: "dim count" }, `${found.length} found${listed}`);
  return [count, element("ul", {}, ...lines)];
}
