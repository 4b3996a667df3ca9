// Memory over a step, one curve a timeline: over the time of the ops, or over the ops.

import uPlot from "uplot";

import { bytesText, element } from "./dom";
import type { TimelineData } from "./payload";
import { onTheme, stroke, tones } from "./theme";

export const CURVES = ["#33658a", "#e07a1f"];
const HEIGHT = 300;

/** The quantity on the horizontal axis. */
export type Axis = "time" | "ops";

/** Whether the time of the ops is known, so that it can be an axis. */
export function hasTimes(timelines: TimelineData[]): boolean {
  return timelines.every((line) => line.times.some((time) => time > 0));
}

export class Chart {
  readonly panel = element("section", { className: "chart" });
  private plot: uPlot | undefined;
  private pointed = -1;
  /** For each timeline: where each op begins on the axis, and the end of the last one. */
  private starts: number[][] = [];

  constructor(
    private readonly timelines: TimelineData[],
    /** Receives the op of each timeline under the pointer, -1 of none. */
    private readonly onPlace: (places: number[]) => void,
    private readonly height = HEIGHT,
    private axis: Axis = "ops",
  ) {
  }

  /** Draws; to be called when the panel has a width. */
  start(): void {
    this.draw();
    onTheme(() => this.plot!.redraw());
    new ResizeObserver(() => {
      this.plot!.setSize({ width: this.panel.clientWidth, height: this.height });
    }).observe(this.panel);
  }

  /** Draws over another axis. */
  setAxis(axis: Axis): void {
    this.axis = axis;
    this.draw();
  }

  /** Where the plotted area begins, how wide it is in pixels, and on the axis. */
  get area(): { left: number; width: number; most: number } {
    const { left, width } = this.plot!.bbox;
    const most = Math.max(...this.starts.map((places) => places[places.length - 1]));
    return { left: left / devicePixelRatio, width: width / devicePixelRatio, most };
  }

  startsOf(index: number): number[] {
    return this.starts[index];
  }

  /** Draws a line at an op of the first timeline. */
  point(place: number): void {
    this.pointed = place;
    this.plot?.redraw(false);
  }

  private draw(): void {
    this.panel.setAttribute("aria-label", `memory over ${this.axis}`);
    this.starts = startsOn(this.axis, this.timelines);
    const curves = this.timelines.map((line, index) => pointsOf(line, this.starts[index]));
    this.plot?.destroy();
    this.plot = new uPlot(this.options(), uPlot.join(curves), this.panel);
  }

  private options(): uPlot.Options {
    return {
      width: this.panel.clientWidth,
      height: this.height,
      legend: { show: false },
      scales: { x: { time: false }, y: { range: (_, __, most) => [0, most * 1.12] } },
      axes: this.height < HEIGHT ? [axis({ size: 26 }), axis({ label: "MB held", size: 64 })] : this.axes(),
      series: [
        {},
        ...this.timelines.map((line, index) => ({
          label: line.label,
          stroke: () => stroke(CURVES[index]),
          fill: () => `${stroke(CURVES[index])}22`,
          width: 1.5,
          paths: uPlot.paths.stepped!({ align: 1 }),
          points: { show: false },
        })),
      ],
      hooks: {
        draw: [(plot) => this.markPeaks(plot), (plot) => this.markPlace(plot)],
        setCursor: [(plot) => this.tell(plot)],
      },
    };
  }

  private axes(): uPlot.Axis[] {
    const label = this.axis === "ops" ? "ops in order of execution" : timeLabel(this.timelines);
    return [axis({ label }), axis({ label: "held, MB (10⁶ bytes)", size: 64 })];
  }

  private tell(plot: uPlot): void {
    const { left } = plot.cursor;
    if (left === undefined || left < 0) return;
    const value = plot.posToVal(left, "x");
    this.onPlace(this.starts.map((starts) => placeAt(starts, value)));
  }

  private markPlace(plot: uPlot): void {
    if (this.pointed < 0) return;
    const { ctx, bbox } = plot;
    ctx.fillStyle = tones().chosen;
    const width = 2 * devicePixelRatio;
    const x = plot.valToPos(this.starts[0][this.pointed], "x", true);
    ctx.fillRect(x - width / 2, bbox.top, width, bbox.height);
  }

  private markPeaks(plot: uPlot): void {
    const { ctx } = plot;
    ctx.save();
    ctx.font = `bold ${12 * devicePixelRatio}px system-ui, sans-serif`;
    this.timelines.forEach((line, index) => {
      const place = peakOf(line);
      if (place < 0) return;
      const x = plot.valToPos(this.starts[index][place], "x", true);
      const y = plot.valToPos(line.bytes[place] / 1e6, "y", true);
      ctx.fillStyle = stroke(CURVES[index]);
      ctx.beginPath();
      ctx.arc(x, y, 4 * devicePixelRatio, 0, 2 * Math.PI);
      ctx.fill();
      const late = x > plot.bbox.left + plot.bbox.width / 2;
      ctx.textAlign = late ? "right" : "left";
      const gap = (late ? -8 : 8) * devicePixelRatio;
      ctx.fillText(`peak ${bytesText(line.bytes[place])}`, x + gap, y - 6 * devicePixelRatio);
    });
    ctx.restore();
  }
}

/** Where each op begins: by number, or in percent of the time of the first timeline. */
function startsOn(axis: Axis, timelines: TimelineData[]): number[][] {
  if (axis === "ops") return timelines.map(({ ops }) => Array.from({ length: ops.length + 1 }, (_, at) => at));
  const totals = timelines.map(({ times }) => times.reduce((sum, time) => sum + time, 0));
  return timelines.map((line, index) => {
    const whole = isOneUnit(timelines) ? totals[0] : totals[index];
    let passed = 0;
    return [0, ...line.times.map((time) => (100 * (passed += time)) / whole)];
  });
}

/** Estimated and measured times are told in units of their own. */
function isOneUnit(timelines: TimelineData[]): boolean {
  return timelines.every(({ source }) => source === timelines[0].source);
}

function timeLabel(timelines: TimelineData[]): string {
  const kind = timelines.every(({ source }) => source === "predicted") ? "estimated time" : "time";
  return timelines.length > 1 && isOneUnit(timelines) ? `${kind}, % of ${timelines[0].label}` : `${kind}, %`;
}

/** The points of a curve in MB; ops that take no time count by the most that one holds. */
function pointsOf({ bytes }: TimelineData, starts: number[]): [number[], number[]] {
  const [xs, ys]: [number[], number[]] = [[], []];
  bytes.forEach((held, at) => {
    if (xs.length && xs[xs.length - 1] === starts[at]) {
      ys[ys.length - 1] = Math.max(ys[ys.length - 1], held / 1e6);
    } else {
      xs.push(starts[at]);
      ys.push(held / 1e6);
    }
  });
  const end = starts[starts.length - 1];
  if (xs.length && end > xs[xs.length - 1]) {
    xs.push(end);
    ys.push(ys[ys.length - 1]);
  }
  return [xs, ys];
}

/** The op that runs at a value of the axis: the last one that has begun; -1 behind the end. */
function placeAt(starts: number[], value: number): number {
  if (value > starts[starts.length - 1]) return -1;
  let [low, high] = [0, starts.length - 2];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (starts[middle] <= value) low = middle;
    else high = middle - 1;
  }
  return low < starts.length - 1 ? low : -1;
}

/** What the colours of some curves mean. */
export function colourLegend(entries: [label: string, colour: string][]): HTMLElement {
  const legend = element("div", { className: "legend" });
  const draw = (): void => {
    const marks = entries.map(([label, colour]) => {
      const mark = element("i");
      mark.style.background = stroke(colour);
      return element("span", {}, mark, label);
    });
    legend.replaceChildren(...marks);
  };
  draw();
  onTheme(draw);
  return legend;
}

/** An axis in the colours of the page. */
export function axis(rest: uPlot.Axis): uPlot.Axis {
  const faint = (): string => `${tones().dim}33`;
  return { stroke: () => tones().text, grid: { stroke: faint }, ticks: { stroke: faint }, ...rest };
}

/** The first op at the peak; -1 without ops. */
export function peakOf(line: TimelineData): number {
  let place = -1;
  line.bytes.forEach((bytes, index) => {
    if (place < 0 || bytes > line.bytes[place]) place = index;
  });
  return place;
}
