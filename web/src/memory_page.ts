// The page about memory: the curve, what is alive at its peak, and the order of the ops.

import "uplot/dist/uPlot.min.css";

import { type Axis, Chart, colourLegend, CURVES, hasTimes, peakOf } from "./chart";
import { bytesText, element } from "./dom";
import type { HeldTensor, MemoryData, ReportData, TimelineData } from "./payload";
import { PlanCurve } from "./plan_curve";
import { reportPanel } from "./rows";
import { phaseLegend, Strip } from "./strip";

/** The page lists this many tensors, and the rest on request. */
const LISTED = 25;

export function memoryPage(memory: MemoryData, report?: ReportData): HTMLElement {
  const { timelines, phaseNames } = memory;
  const reading = element("div", { className: "reading dim" }, "Move over the curve to read it.");
  const tell = (places: number[]): void => {
    if (places.some((place) => place >= 0)) reading.textContent = readingAt(places, memory);
  };
  const chart = new Chart(timelines, tell, undefined, hasTimes(timelines) ? "time" : "ops");
  const strips = timelines.map((line) => new Strip(line, phaseNames));
  const drawStrips = (): void => strips.forEach((strip, at) => strip.draw(chart.area, chart.startsOf(at)));
  const choice = axisChoice((axis) => {
    chart.setAxis(axis);
    drawStrips();
  });
  choice.hidden = !hasTimes(timelines);
  const used = new Set(timelines.flatMap((line) => [...new Set(line.phases)]));
  const page = element(
    "main",
    { className: "memory" },
    answers(memory.answers),
    chart.panel,
    element(
      "div",
      { className: "under" },
      colourLegend(timelines.map(({ label }, index) => [label, CURVES[index]])),
      choice,
    ),
    reading,
    ...strips.map((strip) => strip.panel),
    phaseLegend(phaseNames, used),
    element("div", { className: "peaks" }, ...timelines.map(held)),
  );
  const plans = memory.curve ? new PlanCurve(memory.curve) : undefined;
  if (plans) page.append(plans.panel);
  if (report) page.append(reportPanel(report, () => {}));
  requestAnimationFrame(() => {
    chart.start();
    plans?.start();
    drawStrips();
    new ResizeObserver(() => requestAnimationFrame(drawStrips)).observe(chart.panel);
    document.body.dataset.ready = "true";
  });
  return page;
}

/** The first look: a column for each heading. */
function answers(lines: MemoryData["answers"]): HTMLElement {
  const columns = Object.entries(lines).map(([heading, texts]) =>
    element("div", {}, element("h2", {}, heading), ...texts.map((text) => element("p", {}, text))),
  );
  return element("section", { className: "answers" }, ...columns);
}

function axisChoice(choose: (axis: Axis) => void): HTMLElement {
  const select = element("select", {}, ...AXES.map(([, label]) => element("option", {}, label)));
  select.onchange = () => choose(AXES[select.selectedIndex][0]);
  return element("label", {}, "horizontal axis ", select);
}

const AXES: [Axis, string][] = [
  ["time", "time"],
  ["ops", "ops"],
];

function readingAt(places: number[], memory: MemoryData): string {
  return memory.timelines
    .map((line, index) => [line, places[index]] as const)
    .filter(([, place]) => place >= 0)
    .map(([line, place]) => {
      const phase = memory.phaseNames[line.phases[place]];
      return `${line.label}, op ${place}: ${bytesText(line.bytes[place])}, ${phase}, ${line.ops[place]}`;
    })
    .join("  ·  ");
}

function held(line: TimelineData, index: number): HTMLElement {
  const total = line.held.reduce((sum, tensor) => sum + tensor.bytes, 0);
  const op = line.ops[peakOf(line)];
  const body = element("tbody");
  const rows = (tensors: HeldTensor[]): HTMLElement[] =>
    tensors.map((tensor) => heldRow(tensor, line.held[0].bytes, CURVES[index]));
  body.append(...rows(line.held.slice(0, LISTED)));
  const made = element(
    "div",
    { className: "held" },
    element("h2", {}, `${line.label}: ${line.held.length} tensors alive at the peak`),
    element("p", { className: "dim" }, `${bytesText(total)} together, in ${op ?? "no op"}`),
    element("table", {}, body),
  );
  const rest = line.held.slice(LISTED);
  if (rest.length) {
    const size = rest.reduce((sum, tensor) => sum + tensor.bytes, 0);
    const more = element("button", { type: "button" }, `${rest.length} smaller, ${bytesText(size)}`);
    more.onclick = () => {
      body.append(...rows(rest));
      more.remove();
    };
    made.append(more);
  }
  return made;
}

function heldRow(tensor: HeldTensor, largest: number, colour: string): HTMLElement {
  const bar = element("span", { className: "bar" });
  bar.style.width = `${(100 * tensor.bytes) / (largest || 1)}%`;
  bar.style.background = `${colour}33`;
  return element(
    "tr",
    {},
    element("td", { className: "sized" }, bar, bytesText(tensor.bytes)),
    element("td", {}, tensor.name, element("div", { className: "dim" }, tensor.type)),
  );
}
