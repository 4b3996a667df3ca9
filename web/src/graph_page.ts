// The pages that draw graphs: one, or two side by side.

import { details, type Surroundings } from "./details";
import { Drawing, type Chosen } from "./drawing";
import { element } from "./dom";
import { frame } from "./framing";
import { graphLegend } from "./legend";
import type { Payload, ReportRow } from "./payload";
import { graphPicker } from "./picker";
import { changesPanel, reportPanel } from "./rows";
import type { SceneNode } from "./scene";
import type { Item } from "./scopes";
import { searchPanel, type Match } from "./search";
import { linkTo, placeInLink, type Place } from "./sharing";
import { Tabs } from "./tabs";

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
  private readonly picker: HTMLSelectElement;
  private readonly changes = element("div");
  /** How many graphs stand side by side. */
  private readonly sides: number;
  private readonly made = new Map<number, Drawing>();
  /** The graphs that are on the page now. */
  private shown: number[];
  private readonly around: Surroundings;
  private readonly tabs = new Tabs();

  constructor(private readonly payload: Payload) {
    this.sides = payload.kind === "diff" ? 2 : 1;
    this.shown = this.places(0);
    this.around = {
      other: (drawing) => this.drawings.find((d) => d !== drawing),
      show: (drawing, op) => this.show({ drawing, op }),
      opener: (name) => {
        const index = payload.graphs.findIndex((graph) => graph.label === name);
        return index < 0 ? undefined : () => this.switchTo(Math.floor(index / this.sides));
      },
      rows: payload.report?.rows ?? [],
    };
    this.picker = graphPicker(payload.graphs, this.sides, (number) => this.switchTo(number));
    this.side.setAttribute("aria-label", "details");
    const stage = element("div", { className: "stage" }, this.row, graphLegend(payload));
    if (payload.graphs.length > this.sides) {
      const label = element("label", { className: "bar" }, "graph ", this.picker);
      stage.prepend(label);
    }
    this.fillTabs();
    const side = element("aside", {}, this.tabs.panel, this.side);
    side.setAttribute("aria-label", "search, changes, report and details");
    this.element = element("main", { className: payload.kind }, stage, side);
    this.row.append(...this.drawings.map((drawing) => drawing.panel));
    this.tellOf(this.drawings[0], this.drawings[0].hierarchy.root);
  }

  start(): void {
    for (const drawing of this.drawings) drawing.start();
    this.followLink();
    window.addEventListener("hashchange", () => this.followLink());
    document.body.dataset.ready = "true";
  }

  /** Shows the op that the address of the page names. */
  private followLink(): void {
    const place = placeInLink();
    if (!place) return;
    const graph = this.payload.graphs.findIndex(({ label }) => label === place.graph);
    this.switchTo(Math.max(0, Math.floor(graph / this.sides)));
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
    const index = this.shown[this.drawings.indexOf(drawing)];
    const op = item.kind === "op" ? drawing.graph.name(item.op) : item.key;
    return { op, graph: index < this.sides ? null : this.payload.graphs[index].label };
  }

  get drawings(): Drawing[] {
    return this.shown.map((index) => this.drawing(index));
  }

  private drawing(index: number): Drawing {
    let drawing = this.made.get(index);
    if (!drawing) {
      drawing = new Drawing(this.payload.graphs[index], this.titleOf(index));
      drawing.onChoose = (chosen) => this.choose(chosen);
      drawing.onToggle = (item) => this.follow(drawing!, item);
      drawing.onFrame = (asked) => this.frame(drawing!, asked);
      drawing.onLeave = () => this.tabs.focus();
      this.made.set(index, drawing);
    }
    return drawing;
  }

  private fillTabs(): void {
    const { tabs } = this;
    const show = (match: Match): void => this.show(match);
    const open = (): void => tabs.show("search");
    const leave = (): void => this.drawings[0].viewport.holder.focus();
    tabs.add("search", searchPanel(() => this.drawings, show, open, leave));
    if (this.payload.kind === "diff") {
      this.changes.append(changesPanel(this.drawings, show));
      tabs.add("changes", this.changes);
      tabs.show("changes");
    }
    if (this.payload.report) {
      tabs.add("report", reportPanel(this.payload.report, (row) => this.showRow(row)));
      tabs.show("report");
    }
  }

  /** The graphs that are shown together, by their number in the picker. */
  private places(number: number): number[] {
    return Array.from({ length: this.sides }, (_, side) => number * this.sides + side);
  }

  /** Functions of a comparison are told apart by the names of the sides. */
  private titleOf(index: number): string {
    const { label } = this.payload.graphs[index];
    if (index < this.sides || this.sides === 1) return label;
    return `${this.payload.graphs[index % this.sides].label}: ${label}`;
  }

  private switchTo(number: number): void {
    const isNew = !this.made.has(this.places(number)[0]);
    if (this.places(number)[0] === this.shown[0]) return;
    this.shown = this.places(number);
    this.row.replaceChildren(...this.drawings.map((drawing) => drawing.panel));
    this.picker.selectedIndex = number;
    if (isNew) for (const drawing of this.drawings) drawing.start();
    this.changes.replaceChildren(changesPanel(this.drawings, (match) => this.show(match)));
    this.tellOf(this.drawings[0], this.drawings[0].hierarchy.root);
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
      for (const drawing of this.drawings) drawing.select(null);
      linkTo(null);
      return;
    }
    const { drawing, item } = chosen;
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
    const index = this.payload.graphs.findIndex(
      ({ label }, at) => at >= this.sides && names.some((name) => name.startsWith(`${label}/`)),
    );
    return Math.max(0, Math.floor(index / this.sides));
  }
}

/** The item of the same name on the other side. */
function counterpart(other: Drawing, drawing: Drawing, item: Item): Item | undefined {
  if (item.kind !== "op") return other.hierarchy.find(item.key);
  const [op] = drawing.graph.counterparts(item.op, other.graph);
  return op === undefined ? undefined : other.hierarchy.itemOf(op);
}
