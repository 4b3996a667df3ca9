// Finds ops by name, type and attributes at once, by one of them, or by an expression.

import type { Drawing } from "./drawing";
import { element, link } from "./dom";
import type { Graph } from "./graph";

export interface Match {
  drawing: Drawing;
  op: number;
}

/** More results than these are counted, not listed. */
const LISTED = 200;

const WAYS = ["anything", "name", "type", "attribute", "regex"] as const;
export type Way = (typeof WAYS)[number];

type Meant = (graph: Graph, op: number) => boolean;

/** Returns what tells whether an op is meant; throws if the expression is none. */
function matcher(query: string, way: Way): Meant {
  if (way === "regex") {
    const pattern = new RegExp(query, "i");
    return (graph, op) => pattern.test(graph.name(op)) || pattern.test(graph.type(op));
  }
  const wanted = query.toLowerCase();
  const byName: Meant = (graph, op) => graph.name(op).toLowerCase().includes(wanted);
  const byType: Meant = (graph, op) => graph.type(op).toLowerCase().includes(wanted);
  const byAttribute: Meant = (graph, op) => attributeOf(graph, op, wanted) !== "";
  if (way === "name") return byName;
  if (way === "type") return byType;
  if (way === "attribute") return byAttribute;
  return (graph, op) => byName(graph, op) || byType(graph, op) || byAttribute(graph, op);
}

/** The first attribute of an op with a text in it, as name=value; "" if there is none. */
function attributeOf(graph: Graph, op: number, wanted: string): string {
  for (const [name, value] of Object.entries(graph.data.attributes[op])) {
    const text = `${name}=${value}`;
    if (text.toLowerCase().includes(wanted)) return text;
  }
  return "";
}

/** Returns the ops that are meant: called just so first, then by name, type, attribute. */
function findOps(drawings: Drawing[], query: string, way: Way): Match[] {
  const isMeant = matcher(query, way);
  const found: Match[] = [];
  for (const drawing of drawings) {
    for (let op = 0; op < drawing.graph.size; op++) {
      if (isMeant(drawing.graph, op)) found.push({ drawing, op });
    }
  }
  if (way === "regex") return found;
  const wanted = query.toLowerCase();
  const rank = ({ drawing, op }: Match): number => {
    const name = drawing.graph.name(op).toLowerCase();
    const type = drawing.graph.type(op).toLowerCase();
    if (way === "type") return type === wanted ? 0 : 2;
    if (name === wanted) return 0;
    if (name.endsWith(`/${wanted}`)) return 1;
    return name.includes(wanted) ? 2 : type.includes(wanted) ? 3 : 4;
  };
  return found.sort((a, b) => rank(a) - rank(b));
}

export function searchPanel(
  drawings: () => Drawing[],
  show: (match: Match) => void,
  open: () => void,
  leave: () => void,
): HTMLElement {
  const input = element("input", {
    type: "search",
    placeholder: "search ops",
    id: "search",
    autocomplete: "off",
  });
  input.setAttribute("aria-label", "search ops");
  const way = element("select", { id: "search-way" });
  for (const name of WAYS) way.append(element("option", {}, name));
  way.setAttribute("aria-label", "what to search");
  const results = element("div", { className: "results" });
  let found: Match[] = [];
  let next = -1;
  const search = (): void => {
    results.replaceChildren();
    for (const drawing of drawings()) drawing.mark([]);
    found = [];
    next = -1;
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
    const query = way.value === "regex" ? "" : input.value.toLowerCase();
    results.append(...resultLines(found, drawings().length > 1, query, goTo));
  };
  const goTo = (at: number): void => {
    next = at;
    const count = results.querySelector(".count")!;
    count.textContent = `${at + 1} of ${countText(found.length)}`;
    show(found[at]);
  };
  input.oninput = search;
  way.onchange = search;
  input.onkeydown = (event) => {
    if (event.key === "Escape") leave();
    // Once more goes to the next one, with Shift to the one before.
    if (event.key === "Enter" && found.length) {
      const to = next < 0 ? (event.shiftKey ? -1 : 0) : next + (event.shiftKey ? -1 : 1);
      goTo((to + found.length) % found.length);
    }
    if (event.key === "ArrowDown") step(results, event, 1);
  };
  results.onkeydown = (event) => {
    if (event.key === "ArrowDown") step(results, event, 1);
    if (event.key === "ArrowUp" && !step(results, event, -1)) input.focus();
  };
  document.addEventListener("keydown", (event) => {
    const { target } = event;
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
    if (target instanceof HTMLInputElement && target.type === "search") return;
    event.preventDefault();
    open();
    input.focus();
    input.select();
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

function countText(count: number): string {
  return `${count} found${count > LISTED ? `, the first ${LISTED} listed` : ""}`;
}

function resultLines(
  found: Match[],
  several: boolean,
  query: string,
  goTo: (at: number) => void,
): HTMLElement[] {
  const lines = found.slice(0, LISTED).map(({ drawing: { graph, title }, op }, at) => {
    const side = several ? `${title}: ` : "";
    const isNamed = `${graph.name(op)}\n${graph.type(op)}`.toLowerCase().includes(query);
    const attribute = isNamed ? "" : ` ${attributeOf(graph, op, query)}`;
    return element(
      "li",
      {},
      element("span", { className: "dim" }, side),
      link(graph.name(op), () => goTo(at)),
      ` ${graph.type(op)}`,
      element("span", { className: "dim" }, attribute),
    );
  });
  const count = element("p", { className: "dim count" }, countText(found.length));
  count.setAttribute("role", "status");
  return [count, element("ul", {}, ...lines)];
}
