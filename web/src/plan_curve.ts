// What less memory costs in time: one point a plan, and what each runs again.

import uPlot from "uplot";

import { axis, colourLegend, CURVES } from "./chart";
import { bytesText, element } from "./dom";
import type { CurveData, PlanData } from "./payload";
import { onTheme, stroke } from "./theme";

const HEIGHT = 240;
const BOUND = "#8a8f98";

export class PlanCurve {
  readonly panel = element("section", { className: "plans" });
  private readonly drawing = element("div", { className: "chart" });

  constructor(private readonly curve: CurveData) {
    this.drawing.setAttribute("aria-label", "extra time over peaks");
    const plain = bytesText(curve.plain);
    this.panel.append(
      element("h2", {}, "What less memory costs in time"),
      element("p", { className: "dim" }, `plain gradients ${plain}; in order ${bytesText(curve.ordered)}`),
      this.drawing,
      colourLegend([
        ["plans", CURVES[1]],
        ["the least that any plan takes", BOUND],
        ["plain gradients", CURVES[0]],
      ]),
      element("table", { className: "rows" }, head(), element("tbody", {}, ...curve.plans.map(row))),
      ...curve.unmet.map((budget) => element("p", {}, `no plan was found for ${bytesText(budget)}`)),
    );
  }

  /** Draws; to be called when the panel has a width. */
  start(): void {
    const plans = [...this.curve.plans].reverse();
    const peaks = plans.map((plan) => plan.peak / 1e6);
    const extra = plans.map((plan) => 100 * plan.extraTime);
    const bounds = plans.map((plan) => 100 * plan.bound);
    const plot = new uPlot(this.options(), [peaks, extra, bounds], this.drawing);
    onTheme(() => plot.redraw());
    new ResizeObserver(() => {
      plot.setSize({ width: this.drawing.clientWidth, height: HEIGHT });
    }).observe(this.drawing);
  }

  private options(): uPlot.Options {
    return {
      width: this.drawing.clientWidth,
      height: HEIGHT,
      legend: { show: false },
      scales: {
        x: { time: false, range: [0, (this.curve.plain / 1e6) * 1.05] },
        y: { range: (_, __, most) => [0, Math.max(most, 1) * 1.15] },
      },
      axes: [axis({ label: "peak, MB (10⁶ bytes)" }), axis({ label: "extra time, %", size: 64 })],
      series: [
        {},
        { label: "plan", stroke: () => stroke(CURVES[1]), width: 1.5, points: { show: true, size: 7 } },
        { label: "bound", stroke: () => stroke(BOUND), width: 1, dash: [5, 4], points: { show: false } },
      ],
      hooks: { draw: [(plot) => this.mark(plot)] },
    };
  }

  /** Marks the plan of the step on the page, and plain gradients. */
  private mark(plot: uPlot): void {
    const { ctx } = plot;
    ctx.save();
    ctx.font = `bold ${12 * devicePixelRatio}px system-ui, sans-serif`;
    const chosen = this.curve.plans.filter((plan) => plan.chosen);
    const points = chosen.map((plan) => ({ ...plan, text: "this step", colour: CURVES[1] }));
    points.push({ peak: this.curve.plain, extraTime: 0, text: "plain", colour: CURVES[0] } as (typeof points)[0]);
    for (const { peak, extraTime, text, colour } of points) {
      const x = plot.valToPos(peak / 1e6, "x", true);
      const y = plot.valToPos(100 * extraTime, "y", true);
      ctx.fillStyle = stroke(colour);
      ctx.beginPath();
      ctx.arc(x, y, 5 * devicePixelRatio, 0, 2 * Math.PI);
      ctx.fill();
      ctx.textAlign = "right";
      ctx.fillText(text, x - 8 * devicePixelRatio, y - 6 * devicePixelRatio);
    }
    ctx.restore();
  }
}

function head(): HTMLElement {
  const names = ["budget", "peak", "extra time", "at least", "runs again"];
  return element("thead", {}, element("tr", {}, ...names.map((name) => element("th", {}, name))));
}

function row(plan: PlanData): HTMLElement {
  const types = plan.types.map(([type, count]) => `${count} ${type}`).join(", ");
  const loops = plan.loops > 0 ? `; loops: ${plan.loops}` : "";
  const percent = (part: number): string => `${(100 * part).toFixed(1)} %`;
  return element(
    "tr",
    { className: plan.chosen ? "chosen" : "" },
    element("td", {}, bytesText(plan.budget)),
    element("td", {}, bytesText(plan.peak)),
    element("td", {}, percent(plan.extraTime)),
    element("td", {}, plan.bound > 0 ? percent(plan.bound) : "not known"),
    element("td", {}, `${plan.again} ops${loops}`, element("div", { className: "dim" }, types)),
  );
}
