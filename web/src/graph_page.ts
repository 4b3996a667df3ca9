// The pages that draw graphs: one, or two side by side.

import { details, type Surroundings } from "./details";
import { Drawing, type Chosen } from "./drawing";
import { element } from "./dom";
import { frame } from "./framing";
import { graphLegend } from "./legend";
import { listenToKeys } from "./keyboard";
import { MemorySlider } from "./lives";
import type { ComparisonData, GraphData, Payload, ReportRow } from "./payload";
import { graphPicker } from "./picker";
import { changesPanel, reportPanel } from "./rows";
import type { SceneNode } from "./scene";
import type { Item } from "./items";
import { searchPanel, type Match } from "./search";
import { linkTo, placeInLink, type Place } from "./sharing";
import { comparedSheets, sheetsOf, StageStrip, type Sheet } from "./stages";
import { Tabs } from "./tabs";
import { toolbar } from "./toolbar";

declare global {
  interface Window {
    /** What is on the page, for tests: a canvas does not tell what is drawn on it. */
    geutil?: { readonly drawings: Drawing[] };
  }
}

export function graphPage(payload: Payload): HTMLElement {
  const page = new GraphPage(payload);
  window.geutil = page;
  requestAnimationFrame(() => page.start());
  return page.element;
}

class GraphPage {
  readonly element: HTMLElement;
  private readonly side = element("section", { className: "details" });
  private readonly row = element("div", { className: "drawings" });
  private picker = element("select");
  private readonly chooser = element("label", { className: "bar" });
  private readonly changes = element("div");
  private readonly legend: ReturnType<typeof graphLegend>;
  private readonly strip: StageStrip | undefined;
  private readonly memory: MemorySlider | undefined;
  private readonly compared = new Map<ComparisonData, Sheet[]>();
  private readonly made = new Map<GraphData, Drawing>();
  /** What can be shown in turn: the model first, then functions. */
  private sheets: Sheet[];
  /** The graphs that are on the page now. */
  private shown: Sheet;
  /** What a person chose last, in which stage of a pipeline. */
  private kept: { stage: number; graph: string; item: Item } | null = null;
  private readonly around: Surroundings;
  private readonly tabs = new Tabs();

  constructor(private readonly payload: Payload) {
    const { pipeline } = payload;
    this.strip = pipeline && new StageStrip(pipeline, (comparison) => this.compare(comparison));
    this.sheets = this.strip ? this.sheetsFor(this.strip.comparison) : sheetsOf(payload);
    this.shown = this.sheets[0];
    this.around = {
      other: (drawing) => this.drawings.find((d) => d !== drawing),
      show: (drawing, op) => this.show({ drawing, op }),
      opener: (name) => {
        const at = this.sheets.findIndex((sheet) => sheet.some(({ label }) => label === name));
        return at < 0 ? undefined : () => this.switchTo(at);
      },
      rows: payload.report?.rows ?? [],
    };
    this.side.setAttribute("aria-label", "details");
    const isHeld = (): boolean => payload.lives !== undefined && this.shown === this.sheets[0];
    this.legend = graphLegend(payload.kind, () => this.shown, isHeld);
    const strip = this.strip?.panel;
    const [drawing] = this.drawings;
    const { lives } = payload;
    this.memory = lives && new MemorySlider(lives, drawing, (op) => this.show({ drawing, op }));
    const below = [this.memory?.panel, this.legend.panel];
    const stage = element("div", { className: "stage" }, strip, this.chooser, this.row, ...below);
    this.fillPicker();
    this.fillTabs();
    const side = element("aside", {}, this.tabs.panel, this.side);
    side.setAttribute("aria-label", "search, changes, report and details");
    const className = pipeline ? "diff pipeline" : payload.kind;
    this.element = element("main", { className }, stage, side);
    this.row.append(...this.drawings.map((drawing) => drawing.panel));
    this.openAlike();
    this.tellOf(this.drawings[0], this.drawings[0].hierarchy.root);
  }

  start(): void {
    for (const drawing of this.drawings) drawing.start();
    this.memory?.start();
    this.followLink();
    window.addEventListener("hashchange", () => this.followLink());
    document.body.dataset.ready = "true";
  }

  /** Shows the op that the address of the page names. */
  private followLink(): void {
    const place = placeInLink();
    if (!place) return;
    const [left, right] = (place.stages ?? "").split("-").map(Number);
    this.strip?.show(left - 1, right - 1);
    const at = this.sheets.findIndex((sheet) => sheet.some(({ label }) => label === place.graph));
    this.switchTo(place.graph === null ? 0 : Math.max(0, at));
    // What there is after is the result: that is looked into first.
    for (const drawing of [...this.drawings].reverse()) {
      const op = drawing.graph.find(place.op);
      const item = op === undefined ? drawing.hierarchy.find(place.op) : drawing.hierarchy.itemOf(op);
      if (item) return this.showItem(drawing, item);
    }
    const missing = `The link names '${place.op}', which is no op or scope of this page.`;
    this.side.prepend(element("p", { className: "removed" }, missing));
  }

  /** The place of an item, as a link names it. */
  private placeOf(drawing: Drawing, item: Item): Place {
    const op = item.kind === "op" ? drawing.graph.name(item.op) : item.key;
    const graph = this.shown === this.sheets[0] ? null : drawing.graph.data.label;
    const stages = this.strip?.comparison.stages.map((at) => at + 1).join("-") ?? null;
    return { op, graph, stages };
  }

  get drawings(): Drawing[] {
    return this.shown.map((graph, side) => this.drawing(graph, side));
  }

  private drawing(graph: GraphData, side: number): Drawing {
    let drawing = this.made.get(graph);
    if (!drawing) {
      drawing = new Drawing(graph, this.titleOf(graph, side));
      drawing.onChoose = (chosen) => this.choose(chosen);
      drawing.onToggle = (item) => this.follow(drawing!, item);
      drawing.onFrame = (asked) => this.frame(drawing!, asked);
      drawing.panel.prepend(toolbar(drawing));
      listenToKeys(drawing, () => this.tabs.focus());
      this.made.set(graph, drawing);
    }
    return drawing;
  }

  private fillTabs(): void {
    const { tabs } = this;
    const show = (match: Match): void => this.show(match);
    const open = (): void => tabs.show("search");
    const leave = (): void => this.drawings[0].viewport.holder.focus();
    tabs.add("search", searchPanel(() => this.drawings, show, open, leave));
    if (this.payload.kind !== "view") {
      this.changes.append(changesPanel(this.drawings, show));
      tabs.add("changes", this.changes);
      tabs.show("changes");
    }
    if (this.memory) {
      tabs.add("memory", this.memory.list);
      tabs.show("memory");
    }
    if (this.payload.report) {
      tabs.add("report", reportPanel(this.payload.report, (row) => this.showRow(row)));
      tabs.show("report");
    }
  }

  private fillPicker(): void {
    this.picker = graphPicker(this.sheets, (number) => this.switchTo(number));
    this.chooser.replaceChildren("graph ", this.picker);
    this.chooser.hidden = this.sheets.length < 2;
  }

  /** Functions of a comparison are told apart by the names of the sides. */
  private titleOf(graph: GraphData, side: number): string {
    const [main] = this.sheets;
    if (main.length === 1 || main[side] === graph) return graph.label;
    return `${main[side].label}: ${graph.label}`;
  }

  private sheetsFor(comparison: ComparisonData): Sheet[] {
    let sheets = this.compared.get(comparison);
    if (!sheets) {
      const { stages } = this.payload.pipeline!;
      sheets = comparedSheets({ stages, graphs: this.payload.graphs }, comparison);
      this.compared.set(comparison, sheets);
    }
    return sheets;
  }

  /** Shows two other stages: what is open stays open, what is chosen stays chosen. */
  private compare(comparison: ComparisonData): void {
    const { kept } = this;
    const keys = new Set(this.drawings.flatMap((drawing) => drawing.openKeys));
    const isMain = this.shown === this.sheets[0];
    const labels = this.shown.map(({ label }) => label);
    this.sheets = this.sheetsFor(comparison);
    const same = this.sheets.find((sheet) => sheet.some(({ label }) => labels.includes(label)));
    this.shown = (isMain ? undefined : same) ?? this.sheets[0];
    this.fillPicker();
    this.picker.selectedIndex = this.sheets.indexOf(this.shown);
    this.row.replaceChildren(...this.drawings.map((drawing) => drawing.panel));
    this.openAlike(keys);
    for (const drawing of this.drawings) {
      drawing.select(null);
      drawing.start();
    }
    this.refresh();
    const wanted = kept && this.chosenIn(comparison, kept);
    if (wanted) this.showItem(wanted.drawing, wanted.item);
    else linkTo(null);
    // The counterpart of what a person chose does not take its place.
    this.kept = kept;
  }

  /** What was chosen in one stage, in a comparison of two: the later one's first. */
  private chosenIn(
    comparison: ComparisonData,
    { stage, graph, item }: NonNullable<GraphPage["kept"]>,
  ): Chosen {
    for (const side of [1, 0]) {
      const at = comparison.stages[side];
      const drawing = this.drawings[side];
      if (at === stage) {
        const found = this.itemIn(drawing, item);
        if (found && (graph === "" || drawing.graph.data.label === graph)) return { drawing, item: found };
        continue;
      }
      const between = this.strip!.between(Math.min(at, stage), Math.max(at, stage))!;
      const from = +(stage > at);
      const sheet = this.sheetsFor(between).find((one, n) => (graph === "" ? n === 0 : one[from].label === graph));
      const partners = sheet?.[from].partners;
      if (!partners || item.kind !== "op") {
        const found = this.itemIn(drawing, item);
        if (found) return { drawing, item: found };
      } else if (partners[item.op]) {
        return { drawing, item: drawing.hierarchy.itemOf(partners[item.op][0]) };
      }
    }
    return null;
  }

  private itemIn(drawing: Drawing, item: Item): Item | undefined {
    if (item.kind !== "op") return drawing.hierarchy.find(item.key);
    const op = drawing.graph.find(item.key.slice(1));
    return op === undefined ? undefined : drawing.hierarchy.itemOf(op);
  }

  private switchTo(number: number): void {
    const sheet = this.sheets[number];
    if (sheet === this.shown) return;
    const isNew = !this.made.has(sheet[0]);
    this.shown = sheet;
    this.row.replaceChildren(...this.drawings.map((drawing) => drawing.panel));
    this.picker.selectedIndex = number;
    if (isNew) {
      this.openAlike();
      for (const drawing of this.drawings) drawing.start();
    }
    this.refresh();
  }

  /** Tells of the graphs that are shown now. */
  private refresh(): void {
    this.legend.draw();
    this.changes.replaceChildren(changesPanel(this.drawings, (match) => this.show(match)));
    this.tellOf(this.drawings[0], this.drawings[0].hierarchy.root);
  }

  /** Opens in each drawing all that is open at first in any, and what else was open. */
  private openAlike(others: Iterable<string> = []): void {
    const begun = this.drawings.flatMap(({ hierarchy }) => hierarchy.begun().map(({ key }) => key));
    const keys = new Set([...begun, ...others]);
    for (const drawing of this.drawings) drawing.setOpenKeys(keys);
  }

  /** Opens and closes the same scope on the other side. */
  private follow(drawing: Drawing, item: Item): void {
    const other = this.around.other(drawing);
    const same = other?.hierarchy.find(item.key);
    if (other && same) other.setOpen(same, item.open);
  }

  /** Frames a drawing; two that show all or the beginning are framed together. */
  private frame(drawing: Drawing, asked: boolean): void {
    const other = this.around.other(drawing);
    const isPart = (one: Drawing): boolean => one.framing === "kept" || typeof one.framing !== "string";
    if (isPart(drawing) || !other) return drawing.frameAlone();
    if (asked) other.framing = drawing.framing;
    if (isPart(other) || !other.scene.nodes.length) return drawing.frameAlone();
    const [before, after] = this.drawings;
    const framed = [before, after].map(({ scene, viewport }) => ({ scene, size: viewport.size }));
    const same = (item: Item): SceneNode | undefined => {
      const key = counterpart(after, before, item)?.key;
      const node = key === undefined ? undefined : after.scene.byKey.get(key);
      return node?.open ? undefined : node;
    };
    const views = frame(framed, same, drawing.framing === "beginning");
    this.drawings.forEach((one, at) => one.viewport.set(views[at]));
  }

  private choose(chosen: Chosen): void {
    if (!chosen) {
      this.kept = null;
      for (const drawing of this.drawings) drawing.select(null);
      linkTo(null);
      return;
    }
    const { drawing, item } = chosen;
    const stage = this.strip?.comparison.stages[this.drawings.indexOf(drawing)];
    const graph = this.shown === this.sheets[0] ? "" : drawing.graph.data.label;
    if (stage !== undefined) this.kept = { stage, graph, item };
    linkTo(this.placeOf(drawing, item));
    this.tellOf(drawing, item);
    const other = this.around.other(drawing);
    other?.select(counterpart(other, drawing, item) ?? null);
  }

  private tellOf(drawing: Drawing, item: Item): void {
    this.side.replaceChildren(details(drawing, item, this.around));
    this.side.scrollTop = 0;
  }

  private show({ drawing, op }: Match): void {
    this.showItem(drawing, drawing.hierarchy.itemOf(op));
  }

  private showItem(drawing: Drawing, item: Item): void {
    drawing.show(item);
    const other = this.around.other(drawing);
    const same = other && counterpart(other, drawing, item);
    if (other && same) other.show(same);
    this.choose({ drawing, item });
  }

  /** Rings all that a line of the report is about, and goes to its first op. */
  private showRow(row: ReportRow): void {
    this.toStagesOf(row);
    this.switchTo(this.numberOf(row));
    const told = this.drawings.map((drawing) => {
      const ops = row.names.flatMap((name) => drawing.graph.within(name));
      drawing.mark(ops);
      if (ops.length) drawing.show(drawing.hierarchy.itemOf(ops[0]));
      return { drawing, op: ops[0] };
    });
    // What there is after is the result: that is told of.
    const last = told.reverse().find(({ op }) => op !== undefined);
    if (last) this.tellOf(last.drawing, last.drawing.hierarchy.itemOf(last.op));
  }

  /** Which graphs a line is about: names of what is in a function begin with its name. */
  private numberOf({ names }: ReportRow): number {
    const isMeant = ({ label }: GraphData): boolean =>
      names.some((name) => name.startsWith(`${label}/`));
    return Math.max(0, this.sheets.findIndex((sheet, at) => at > 0 && sheet.some(isMeant)));
  }

  /** Goes to the last stages that have what a line is about, if those shown do not. */
  private toStagesOf({ names }: ReportRow): void {
    const isHere = (drawing: Drawing): boolean =>
      names.some((name) => drawing.graph.within(name).length > 0);
    const { strip } = this;
    if (!strip || this.drawings.some(isHere)) return;
    for (let at = this.payload.pipeline!.stages.length - 1; at > 0; at--) {
      strip.show(at - 1, at);
      if (this.drawings.some(isHere)) return;
    }
  }
}

/** The item of the same name on the other side. */
function counterpart(other: Drawing, drawing: Drawing, item: Item): Item | undefined {
  if (item.kind !== "op") return other.hierarchy.find(item.key);
  const [op] = drawing.graph.counterparts(item.op, other.graph);
  return op === undefined ? undefined : other.hierarchy.itemOf(op);
}
