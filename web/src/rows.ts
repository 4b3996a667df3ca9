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
  const outcomes = [...new Set(report.rows.map((row) => row.outcome))];
  const filter = element("select", { className: "outcome" });
  filter.setAttribute("aria-label", "outcome");
  filter.append(element("option", { value: "" }, `all (${report.rows.length})`));
  for (const outcome of outcomes) {
    const count = report.rows.filter((row) => row.outcome === outcome).length;
    filter.append(element("option", { value: outcome }, `${outcome} (${count})`));
  }
  const words = element("input", { type: "search", placeholder: "filter lines" });
  words.setAttribute("aria-label", "filter lines");
  const body = element("div");
  const draw = (): void => {
    const rows = report.rows.filter(
      (row) =>
        (!filter.value || row.outcome === filter.value) &&
        `${row.what} ${row.detail}`.toLowerCase().includes(words.value.toLowerCase()),
    );
    body.replaceChildren(portions(rows, (row) => reportRow(row, choose)));
  };
  filter.onchange = draw;
  words.oninput = draw;
  draw();
  return element(
    "div",
    { className: "report" },
    element("h2", { textContent: report.title }),
    ...report.summary.map((text) => element("p", {}, text)),
    element("div", { className: "search" }, filter, words),
    body,
  );
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
  const changed: (Match & { status: number })[] = [];
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
  const rows = portions(changed, ({ drawing, op, status }) =>
    element(
      "tr",
      {},
      element("td", { className: STATUS_NAMES[status] }, STATUS_NAMES[status]),
      element(
        "td",
        {},
        link(drawing.graph.name(op), () => show({ drawing, op })),
        element("div", { className: "dim" }, drawing.graph.type(op)),
      ),
    ),
  );
  return element(
    "div",
    { className: "changes" },
    element("h2", { textContent: "What changed" }),
    element("p", {}, counts.join(", ")),
    changed.length ? rows : element("p", {}, "The graphs are the same."),
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
