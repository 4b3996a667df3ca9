// The stages of a pipeline: a strip to step along, and what became of the ops of any two.

import { bytesText, button, countText, element } from "./dom";
import type { ComparisonData, GraphData, PipelineData, Payload, StageData } from "./payload";

/** Graphs that stand side by side: one, or two. */
export type Sheet = GraphData[];

/** The graphs of a page in the order in which they are shown: alone, or in pairs. */
export function sheetsOf({ graphs, kind }: Payload): Sheet[] {
  const sides = kind === "diff" ? 2 : 1;
  const starts = graphs.map((_, at) => at).filter((at) => at % sides === 0);
  return starts.map((at) => graphs.slice(at, at + sides));
}

/** The graphs of two stages, and of the functions that these call, in pairs. */
export function comparedSheets(
  { stages, graphs }: { stages: StageData[]; graphs: GraphData[] },
  comparison: ComparisonData,
): Sheet[] {
  return comparison.sheets.map((sheet, at) =>
    sheet.graphs.map((place, side) => ({
      ...(place < 0 ? EMPTY_GRAPH : graphs[place]),
      label: at ? sheet.labels[side] : stages[comparison.stages[side]].label,
      status: [...sheet.status[side]].map(Number),
      partners: sheet.partners?.[side],
    })),
  );
}

const EMPTY_GRAPH: GraphData = {
  label: "",
  names: [],
  types: [],
  typeNames: [],
  inputs: [],
  controls: [],
  outputs: [],
  devices: [],
  deviceNames: [],
  attributes: [],
  parameters: [],
  ends: {},
  calls: {},
  leftOut: 0,
};

export class StageStrip {
  readonly panel = element("nav", { className: "stages" });
  private readonly cards: HTMLButtonElement[];
  private readonly sides: HTMLSelectElement[];
  private at: [number, number] = [0, 1];

  constructor(
    private readonly data: PipelineData,
    private readonly onShow: (comparison: ComparisonData) => void,
  ) {
    const { stages } = data;
    this.cards = stages.map((stage, at) => this.card(stage, at));
    this.sides = ["left stage", "right stage"].map((label, side) => {
      const choice = element("select", {}, ...stages.map((s) => element("option", {}, s.label)));
      choice.setAttribute("aria-label", label);
      choice.onchange = () => this.choose(side, choice.selectedIndex);
      return choice;
    });
    const cards = this.cards.map((card) => element("li", {}, card));
    const back = button("‹ back", () => this.step(-1), "one stage back ([)");
    const forward = button("forward ›", () => this.step(1), "one stage forward (])");
    this.panel.setAttribute("aria-label", "stages");
    this.panel.append(
      element("ol", {}, ...cards),
      element("div", { className: "sides" }, back, this.sides[0], "and", this.sides[1], forward),
    );
    document.addEventListener("keydown", (event) => {
      const by = { "[": -1, "]": 1 }[event.key];
      const isTyped = event.target instanceof HTMLInputElement && event.target.type === "search";
      if (by && !isTyped && !event.ctrlKey && !event.metaKey && !event.altKey) this.step(by);
    });
    this.mark();
  }

  get comparison(): ComparisonData {
    const [left, right] = this.at;
    return this.between(left, right)!;
  }

  between(left: number, right: number): ComparisonData | undefined {
    return this.data.comparisons.find(({ stages }) => stages[0] === left && stages[1] === right);
  }

  /** Shows two stages. */
  show(left: number, right: number): void {
    if (!this.between(left, right)) return;
    const isNew = left !== this.at[0] || right !== this.at[1];
    this.at = [left, right];
    this.mark();
    if (isNew) this.onShow(this.comparison);
  }

  /** Goes to neighbours, one stage further along or back. */
  private step(by: number): void {
    const right = this.at[1] + by;
    this.show(right - 1, right);
  }

  /** Puts a stage on a side; the other side makes room, for stages keep their order. */
  private choose(side: number, stage: number): void {
    const last = this.data.stages.length - 1;
    const [left, right] = this.at;
    if (side) this.show(Math.min(left, Math.max(stage - 1, 0)), Math.max(stage, 1));
    else this.show(Math.min(stage, last - 1), Math.max(right, Math.min(stage + 1, last)));
    this.mark();
  }

  private card(stage: StageData, at: number): HTMLButtonElement {
    const before = at ? this.between(at - 1, at) : undefined;
    const show = (): void => this.show(Math.max(at - 1, 0), Math.max(at, 1));
    const made = button("", show, at ? "show beside the stage before" : "show beside the next");
    const functions = stage.inFunctions ? ` and ${stage.inFunctions} in functions` : "";
    const sizes = Object.entries(stage.sizes).map(([what, bytes]) => `${what} ${bytesText(bytes)}`);
    made.append(
      element("strong", {}, stage.label),
      element("span", {}, `${countText(stage.ops, stage.ends)}${functions}`),
      element("span", { className: "dim" }, sizes.join(" · ")),
    );
    if (before) made.append(changes(before));
    return made;
  }

  private mark(): void {
    this.cards.forEach((card, at) => card.setAttribute("aria-pressed", String(this.at.includes(at))));
    this.sides.forEach((choice, side) => (choice.selectedIndex = this.at[side]));
  }
}

/** What changed against the stage before, in words. */
function changes({ counts }: ComparisonData): HTMLElement {
  const some = Object.entries(counts).filter(([, count]) => count);
  const words = some.flatMap(([kind, count], at) => [
    at ? ", " : "",
    element("span", { className: kind }, `${count} ${kind}`),
  ]);
  return element("span", {}, ...(words.length ? words : ["no changes"]));
}
