// The tables beside a drawing: lines of a report, and what two graphs differ in.

import type { Drawing } from "./drawing";
import { element, link } from "./dom";
import {
  ADDED,
  ALTERED,
  FUSED,
  REMOVED,
  REWIRED,
  STATUS_NAMES,
  type ReportData,
} from "./payload";
import type { ReportRow } from "./payload";
import type { Match } from "./search";

/** The page builds rows in portions, as they are asked for. */
const PORTION = 300;

export function reportPanel(
  report: ReportData,
  choose: (row: ReportRow) => void,
): HTMLElement {
  return element(
    "div",
    { className: "report" },
    element("h2", { textContent: report.title }),
    ...report.summary.map((text) => element("p", {}, text)),
    ...filtered(report.rows, {
      outcome: (row) => row.outcome,
      text: (row) => `${row.what} ${row.detail}`,
      line: (row) => reportRow(row, choose),
      labels: ["outcome", "filter lines"],
    }),
  );
}

interface Filtered<T> {
  outcome: (entry: T) => string;
  text: (entry: T) => string;
  line: (entry: T) => HTMLElement;
  /** What the choice of an outcome and the field for words are called. */
  labels: [outcome: string, words: string];
}

/** Lines of a table, with what chooses among them by their outcome and by words. */
function filtered<T>(entries: T[], { outcome, text, line, labels }: Filtered<T>): HTMLElement[] {
  const counts = new Map<string, number>();
  for (const entry of entries) counts.set(outcome(entry), (counts.get(outcome(entry)) ?? 0) + 1);
  const filter = element("select", { className: "outcome" });
  filter.setAttribute("aria-label", labels[0]);
  filter.append(element("option", { value: "" }, `all (${entries.length})`));
  for (const [name, count] of counts) {
    filter.append(element("option", { value: name }, `${name} (${count})`));
  }
  const words = element("input", { type: "search", placeholder: labels[1] });
  words.setAttribute("aria-label", labels[1]);
  const body = element("div");
  const draw = (): void => {
    const wanted = words.value.toLowerCase();
    const chosen = entries.filter(
      (entry) =>
        (!filter.value || outcome(entry) === filter.value) &&
        text(entry).toLowerCase().includes(wanted),
    );
    const none = element("p", { className: "dim" }, "No line is like that.");
    body.replaceChildren(chosen.length || !entries.length ? portions(chosen, line) : none);
  };
  filter.onchange = draw;
  words.oninput = draw;
  draw();
  return [element("div", { className: "search" }, filter, words), body];
}

function reportRow(row: ReportRow, choose: (row: ReportRow) => void): HTMLElement {
  return element(
    "tr",
    {},
    element("td", { className: row.good ? "added" : "removed" }, row.outcome),
    element(
      "td",
      {},
      link(row.what, () => choose(row)),
      element("div", { className: "dim" }, row.detail),
    ),
  );
}

export function changesPanel(drawings: Drawing[], show: (match: Match) => void): HTMLElement {
  const changed: Change[] = [];
  drawings.forEach((drawing, side) => {
    const { graph } = drawing;
    for (let op = 0; op < graph.size; op++) {
      const status = graph.status(op);
      // An op that both have is listed once, as it is after.
      if (status === REMOVED || (side > 0 && [ADDED, REWIRED, ALTERED, FUSED].includes(status))) {
        changed.push({ drawing, op, status });
      }
    }
  });
  const counted = [ADDED, REMOVED, REWIRED];
  for (const status of [ALTERED, FUSED]) {
    if (changed.some((change) => change.status === status)) counted.push(status);
  }
  const counts = counted.map(
    (status) =>
      `${changed.filter((c) => c.status === status).length} ${STATUS_NAMES[status]}`,
  );
  const rows = filtered(changed, {
    outcome: ({ status }) => STATUS_NAMES[status],
    text: ({ drawing: { graph }, op }) => `${graph.name(op)} ${graph.type(op)}`,
    line: (change) => changeRow(change, show),
    labels: ["kind of change", "filter changes"],
  });
  return element(
    "div",
    { className: "changes" },
    element("h2", { textContent: "What changed" }),
    element("p", {}, counts.join(", ")),
    ...(changed.length ? rows : [element("p", {}, "The graphs are the same.")]),
  );
}

type Change = Match & { status: number };

function changeRow({ drawing, op, status }: Change, show: (match: Match) => void): HTMLElement {
  return element(
    "tr",
    {},
    element("td", { className: STATUS_NAMES[status] }, STATUS_NAMES[status]),
    element(
      "td",
      {},
      link(drawing.graph.name(op), () => show({ drawing, op })),
      element("div", { className: "dim" }, drawing.graph.type(op)),
    ),
  );
}

function portions<T>(entries: T[], row: (entry: T) => HTMLElement): HTMLElement {
  const body = element("tbody");
  const made = element("div", {}, element("table", { className: "rows" }, body));
  let next = 0;
  const more = element("button", { type: "button" });
  const grow = (): void => {
    body.append(...entries.slice(next, next + PORTION).map(row));
    next += PORTION;
    if (next >= entries.length) more.remove();
    else more.textContent = `${entries.length - next} more`;
  };
  more.onclick = grow;
  made.append(more);
  grow();
  return made;
}
