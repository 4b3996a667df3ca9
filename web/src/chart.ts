// Memory over the ops of a step, one curve a timeline.

import uPlot from "uplot";

import { bytesText, element } from "./dom";
import type { TimelineData } from "./payload";
import { onTheme, stroke, tones } from "./theme";

export const CURVES = ["#33658a", "#e07a1f"];
const HEIGHT = 300;

export class Chart {
  readonly panel = element("section", { className: "chart" });
  private plot: uPlot | undefined;
  private pointed = -1;

  constructor(
    private readonly timelines: TimelineData[],
    /** Told the place under the pointer, or null. */
    private readonly onPlace: (place: number | null) => void,
    private readonly height = HEIGHT,
  ) {
    this.panel.setAttribute("aria-label", "memory over ops");
  }

  /** Draws; to be called when the panel has a width. */
  start(): void {
    const longest = Math.max(...this.timelines.map((line) => line.bytes.length));
    const places = Array.from({ length: longest }, (_, index) => index);
    const curves = this.timelines.map((line) =>
      places.map((place) => (place < line.bytes.length ? line.bytes[place] / 1e6 : null)),
    );
    this.plot = new uPlot(this.options(), [places, ...curves], this.panel);
    onTheme(() => this.plot!.redraw());
    new ResizeObserver(() => {
      this.plot!.setSize({ width: this.panel.clientWidth, height: this.height });
    }).observe(this.panel);
  }

  /** Where the plotted area begins and how wide it is, in pixels of the page. */
  get area(): { left: number; width: number } {
    const { left, width } = this.plot!.bbox;
    return { left: left / devicePixelRatio, width: width / devicePixelRatio };
  }

  /** Draws a line at a place. */
  point(place: number): void {
    this.pointed = place;
    this.plot?.redraw(false);
  }

  private options(): uPlot.Options {
    return {
      width: this.panel.clientWidth,
      height: this.height,
      legend: { show: false },
      scales: { x: { time: false }, y: { range: (_, __, most) => [0, most * 1.12] } },
      axes: [
        axis({ label: "ops in order of execution" }),
        axis({ label: this.height < HEIGHT ? "MB held" : "held, MB (10⁶ bytes)", size: 64 }),
      ],
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
        setCursor: [(plot) => this.onPlace(plot.cursor.idx ?? null)],
      },
    };
  }

  private markPlace(plot: uPlot): void {
    if (this.pointed < 0) return;
    const { ctx, bbox } = plot;
    ctx.fillStyle = tones().chosen;
    const width = 2 * devicePixelRatio;
    ctx.fillRect(plot.valToPos(this.pointed, "x", true) - width / 2, bbox.top, width, bbox.height);
  }

  private markPeaks(plot: uPlot): void {
    const { ctx } = plot;
    ctx.save();
    ctx.font = `bold ${12 * devicePixelRatio}px system-ui, sans-serif`;
    this.timelines.forEach((line, index) => {
      const place = peakOf(line);
      if (place < 0) return;
      const x = plot.valToPos(place, "x", true);
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
