// What is known of the op or scope that was chosen.

import type { Drawing } from "./drawing";
import { element, link, button } from "./dom";
import type { Graph } from "./graph";
import { SAME, STATUS_NAMES, type ReportRow } from "./payload";
import type { Item } from "./items";
import { copy } from "./sharing";

/** More consumers than these are counted, and named on request. */
const SHOWN = 20;

export interface Surroundings {
  /** The graph on the other side, where two are compared. */
  other: (drawing: Drawing) => Drawing | undefined;
  /** Shows an op of a drawing. */
  show: (drawing: Drawing, op: number) => void;
  /** Returns what shows another graph, if it is on the page. */
  opener: (graph: string) => (() => void) | undefined;
  rows: ReportRow[];
}

export function details(drawing: Drawing, item: Item, around: Surroundings): HTMLElement {
  const made = item.kind === "op" ? ofOp(drawing, item.op, around) : ofScope(drawing, item);
  made.append(...reportOf(drawing, item, around.rows));
  return made;
}

function ofScope(drawing: Drawing, item: Item): HTMLElement {
  const { graph } = drawing;
  const counts = new Map<string, number>();
  for (const op of item.ops) {
    counts.set(graph.type(op), (counts.get(graph.type(op)) ?? 0) + 1);
  }
  const sorted = [...counts].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1));
  return element(
    "div",
    {},
    name(item.kind === "scope" ? item.key || drawing.title : item.label, item.label || drawing.title),
    item.parent && line("in", pathOf(item.parent)),
    line("holds", graph.countText(item.ops)),
    item.parent && button("open or close", () => drawing.toggle(item)),
    element("h3", { textContent: "ops by type" }),
    table(sorted.map(([type, count]) => [type, String(count)])),
  );
}

/** Where an item is, with groups told from scopes. */
function pathOf(item: Item): string {
  const parts: string[] = [];
  for (let at = item; at.parent; at = at.parent) parts.unshift(at.label);
  return parts.join(" / ") || "the graph";
}

function ofOp(drawing: Drawing, op: number, around: Surroundings): HTMLElement {
  const { graph } = drawing;
  const to = (other: number, label: string): HTMLElement =>
    link(label, () => around.show(drawing, other));
  const status = graph.status(op);
  const made = element(
    "div",
    {},
    name(graph.name(op)),
    line("type", graph.type(op)),
    line("device", graph.device(op) || "any"),
  );
  const end = graph.data.ends[op];
  if (end) made.append(line("end", end));
  if (status !== SAME) {
    const word = element("b", { className: STATUS_NAMES[status] }, STATUS_NAMES[status]);
    made.append(element("p", {}, word, ` in this comparison`));
  }
  const precision = graph.precision(op);
  if (precision) made.append(line("computes in", precision));
  const noise = graph.data.noiseNames?.[graph.noise(op)];
  if (noise) made.append(line("noise of its own", noise));
  made.append(...before(drawing, op, around));
  partners(made, drawing, op, around);
  for (const callee of graph.data.calls[op] ?? []) {
    const open = around.opener(callee);
    made.append(element("p", {}, "calls ", open ? link(callee, open) : callee));
  }
  const outputs = graph.data.outputs[op];
  const lines = outputs.map((_, i) => element("li", {}, `:${i} ${graph.holds(op, i)}`));
  section(made, "outputs", lines);
  const inputs = graph.inputs(op).map(({ op: source, output }) => {
    const what = graph.holds(source, output);
    return element("li", {}, to(source, `${graph.name(source)}:${output}`), ` ${what}`);
  });
  section(made, "inputs", inputs);
  const controls = graph.data.controls[op];
  section(made, "waits for", controls.map((c) => element("li", {}, to(c, graph.name(c)))));
  const consumers = graph.consumers[op];
  const named = consumers.map((c) =>
    element("li", {}, to(c, graph.name(c)), ` ${graph.type(c)}`),
  );
  section(made, "consumers", named);
  const attributes = Object.entries(graph.data.attributes[op]);
  if (attributes.length) {
    made.append(element("h3", { textContent: "attributes" }), table(attributes));
  }
  return made;
}

/** The ops that an op belongs to where one graph is a TFLite file. */
function partners(into: HTMLElement, drawing: Drawing, op: number, around: Surroundings): void {
  const other = around.other(drawing);
  if (!other || !drawing.graph.data.partners) return;
  const lines = drawing.graph.counterparts(op, other.graph).map((partner) => {
    const name = link(other.graph.name(partner), () => around.show(other, partner));
    const words = [other.graph.type(partner), other.graph.precision(partner)];
    return element("li", {}, name, ` ${words.filter(Boolean).join(", ")}`);
  });
  section(into, `in "${other.title}"`, lines);
}

/** What an op reads in the other graph, and its attributes there, if they differ. */
function before(drawing: Drawing, op: number, around: Surroundings): HTMLElement[] {
  const other = around.other(drawing);
  if (drawing.graph.data.partners) return [];
  const counterpart = other?.graph.find(drawing.graph.name(op));
  if (!other || counterpart === undefined) return [];
  const reads = (graph: Graph, at: number): string[] =>
    graph.inputs(at).map((read) => `${graph.name(read.op)}:${read.output}`);
  const here = reads(drawing.graph, op);
  const there = reads(other.graph, counterpart);
  const lines: HTMLElement[] = [];
  if (here.join() !== there.join()) {
    lines.push(line(`reads in "${other.title}"`, there.join(", ") || "nothing"));
  }
  const ours = drawing.graph.data.attributes[op];
  for (const [name, text] of Object.entries(other.graph.data.attributes[counterpart])) {
    if (ours[name] !== text) lines.push(line(`${name} in "${other.title}"`, text));
  }
  return lines;
}

function reportOf(drawing: Drawing, item: Item, rows: ReportRow[]): HTMLElement[] {
  const inside = new Set(item.ops);
  const about = rows.filter((row) =>
    row.names.some((name) => drawing.graph.within(name).some((op) => inside.has(op))),
  );
  if (!about.length) return [];
  const lines = about
    .slice(0, SHOWN)
    .map((row) => element("li", {}, `${row.outcome}: ${row.what} — ${row.detail}`));
  return [element("h3", { textContent: "in the report" }), element("ul", {}, ...lines)];
}

/** A name as a heading; a click copies it, or the whole of it where a part is shown. */
function name(text: string, shown: string = text): HTMLElement {
  const note = element("span", { className: "dim copied" });
  note.setAttribute("role", "status");
  const made = button(shown, () => {
    void copy(text).then((done) => (note.textContent = done ? "copied" : "not copied"));
  });
  made.className = "name";
  made.title = `copy ${text}`;
  return element("div", { className: "heading" }, element("h2", {}, made), note);
}

function line(label: string, text: string): HTMLElement {
  return element(
    "p",
    { className: "line" },
    element("span", { className: "dim", textContent: `${label} ` }),
    text,
  );
}

function section(into: HTMLElement, title: string, lines: HTMLElement[]): void {
  if (!lines.length) return;
  const list = element("ul", {}, ...lines.slice(0, SHOWN));
  into.append(element("h3", { textContent: `${title} (${lines.length})` }), list);
  const rest = lines.slice(SHOWN);
  if (!rest.length) return;
  const more = button(`${rest.length} more`, () => {
    list.append(...rest);
    more.remove();
  });
  into.append(more);
}

function table(rows: string[][]): HTMLElement {
  const body = element("tbody");
  for (const row of rows) {
    body.append(element("tr", {}, ...row.map((cell) => element("td", {}, cell))));
  }
  return element("table", {}, body);
}
