// The order of execution: a line a timeline, coloured by the phase of each op.

import { element } from "./dom";
import type { TimelineData } from "./payload";

export const PHASES: Record<string, string> = {
  forward: "#56b4e9",
  recompute: "#e69f00",
  backward: "#009e73",
  update: "#cc79a7",
  bookkeeping: "#8a94a0",
  other: "#d5dae1",
};

export class Strip {
  readonly panel: HTMLElement;
  private readonly canvas = element("canvas", { width: 1, height: 1 });

  constructor(
    private readonly line: TimelineData,
    private readonly phaseNames: string[],
  ) {
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", `order of execution, ${line.label}`);
    const counts = phaseNames
      .map((name, phase) => [name, line.phases.filter((p) => p === phase).length] as const)
      .filter(([, count]) => count)
      .map(([name, count]) => `${count} ${name}`);
    const text = `${line.label}: ${line.ops.length} ops in order of execution: `;
    this.panel = element(
      "section",
      { className: "strip" },
      element("div", { className: "dim" }, text + counts.join(", ")),
      this.canvas,
    );
  }

  /** Draws below the chart: `starts` has where each op begins, and the end of the last. */
  draw(area: { left: number; width: number; most: number }, starts: number[]): void {
    const end = starts[starts.length - 1];
    const width = Math.max(1, (area.width * end) / (area.most || 1));
    this.canvas.style.marginLeft = `${area.left}px`;
    this.canvas.style.width = `${width}px`;
    this.canvas.width = Math.max(1, Math.round(width * devicePixelRatio));
    const context = this.canvas.getContext("2d")!;
    const { phases } = this.line;
    const step = this.canvas.width / (end || 1);
    for (let start = 0; start < phases.length; ) {
      let next = start;
      while (next < phases.length && phases[next] === phases[start]) next += 1;
      context.fillStyle = PHASES[this.phaseNames[phases[start]]];
      const from = Math.floor(starts[start] * step);
      // What takes time is seen, however little.
      const least = starts[next] > starts[start] ? 1 : 0;
      context.fillRect(from, 0, Math.max(Math.round(starts[next] * step) - from, least), 1);
      start = next;
    }
  }
}

/** What the colours of the strips mean. */
export function phaseLegend(phaseNames: string[], used: Set<number>): HTMLElement {
  const marks = phaseNames
    .filter((_, phase) => used.has(phase))
    .map((name) => {
      const mark = element("i");
      mark.style.background = PHASES[name];
      return element("span", {}, mark, name);
    });
  return element("div", { className: "legend phases" }, ...marks);
}
