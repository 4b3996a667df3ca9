// The order of execution: a line a timeline, coloured by the phase of each op.

import { element } from "./dom";
import type { TimelineData } from "./payload";

export const PHASES: Record<string, string> = {
  forward: "#56b4e9",
  recompute: "#e69f00",
  backward: "#009e73",
  update: "#cc79a7",
  other: "#d5dae1",
};

export class Strip {
  readonly panel: HTMLElement;
  private readonly canvas = element("canvas", { width: 1, height: 1 });

  constructor(
    private readonly line: TimelineData,
    private readonly phaseNames: string[],
    private readonly longest: number,
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

  /** Draws in the columns of the chart above. */
  draw(area: { left: number; width: number }): void {
    const width = Math.max(1, (area.width * this.line.ops.length) / this.longest);
    this.canvas.style.marginLeft = `${area.left}px`;
    this.canvas.style.width = `${width}px`;
    this.canvas.width = Math.max(1, Math.round(width * devicePixelRatio));
    const context = this.canvas.getContext("2d")!;
    const { phases } = this.line;
    const step = this.canvas.width / phases.length;
    for (let start = 0; start < phases.length; ) {
      let end = start;
      while (end < phases.length && phases[end] === phases[start]) end += 1;
      context.fillStyle = PHASES[this.phaseNames[phases[start]]];
      context.fillRect(start * step, 0, Math.max((end - start) * step, 1), 1);
      start = end;
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
