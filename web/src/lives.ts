// The memory of a step over the graph: a slider that lights what is held at a moment.

import "uplot/dist/uPlot.min.css";

import { Chart, peakOf } from "./chart";
import { bytesText, element, link } from "./dom";
import type { Drawing } from "./drawing";
import type { LivesData } from "./payload";

const HEIGHT = 130;
/** The panel names this many of the tensors that are held. */
const LISTED = 25;

export class MemorySlider {
  readonly panel: HTMLElement;
  readonly list = element("div", { className: "held" });
  private readonly slider: HTMLInputElement;
  private readonly reading = element("div", { className: "reading" });
  private readonly chart: Chart;
  private readonly most: number;

  constructor(
    private readonly data: LivesData,
    private readonly drawing: Drawing,
    private readonly show: (op: number) => void,
  ) {
    const { timeline } = data;
    const peak = peakOf(timeline);
    this.most = timeline.bytes[peak] || 1;
    const last = String(timeline.ops.length - 1);
    this.slider = element("input", { type: "range", min: "0", max: last, value: String(peak) });
    this.slider.setAttribute("aria-label", "moment of the step");
    this.slider.oninput = () => this.light();
    this.chart = new Chart([timeline], () => {}, HEIGHT);
    this.panel = element("section", { className: "lives" }, this.chart.panel, this.slider, this.reading);
    this.panel.setAttribute("aria-label", "memory over the step");
  }

  start(): void {
    this.chart.start();
    this.light();
  }

  /** Lights the ops whose results are held at the moment, and rings the one that runs. */
  private light(): void {
    const { data, drawing } = this;
    const at = Number(this.slider.value);
    const held = new Float64Array(drawing.graph.size);
    const alive = data.first.map((_, i) => i).filter((i) => data.first[i] <= at && at <= data.last[i]);
    for (const i of alive) if (data.ops[i] >= 0) held[data.ops[i]] += data.bytes[i] / this.most;
    drawing.graph.held = held;
    drawing.recolour();
    drawing.mark(data.steps[at] >= 0 ? [data.steps[at]] : []);
    this.chart.point(at);
    const { ops, bytes, phases } = data.timeline;
    const phase = data.phaseNames[phases[at]];
    const text = `op ${at + 1} of ${ops.length}, ${phase}: ${ops[at]}, ${bytesText(bytes[at])} held`;
    this.reading.textContent = text;
    this.slider.setAttribute("aria-valuetext", text);
    this.tell(alive.sort((a, b) => data.bytes[b] - data.bytes[a]), bytes[at]);
  }

  private tell(alive: number[], total: number): void {
    const { data } = this;
    const elsewhere = alive.filter((i) => data.ops[i] < 0).reduce((sum, i) => sum + data.bytes[i], 0);
    const rows = alive.slice(0, LISTED).map((i) => {
      const name = data.names[i];
      const op = data.ops[i];
      const shown = op < 0 ? name : link(name, () => this.show(op));
      return element("tr", {}, element("td", {}, bytesText(data.bytes[i])), element("td", {}, shown));
    });
    const rest = alive.slice(LISTED).reduce((sum, i) => sum + data.bytes[i], 0);
    this.list.replaceChildren(
      element("h2", {}, `${alive.length} tensors held`),
      element("p", { className: "dim" }, `${bytesText(total)} together`),
      element("table", {}, element("tbody", {}, ...rows)),
    );
    if (rest) this.list.append(element("p", { className: "dim" }, `smaller ones: ${bytesText(rest)}`));
    if (!elsewhere) return;
    const note = `${bytesText(elsewhere)} of it by ops that the optimized graph alone has: not drawn`;
    this.list.append(element("p", { className: "dim" }, note));
  }
}
