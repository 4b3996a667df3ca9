// One graph on the page: what is open is drawn, and follows the pointer.

import cytoscape, { type Core, type NodeSingular } from "cytoscape";

import { element } from "./dom";
import { elementsOf, labelOf } from "./elements";
import { begin, fit } from "./framing";
import { Graph } from "./graph";
import { Layered, type Point } from "./layered";
import { layOut } from "./layout";
import type { GraphData } from "./payload";
import { Hierarchy, type Item } from "./scopes";
import { STYLE } from "./style";
import { toolbar } from "./toolbar";
import { update } from "./updating";
import { Choice, visibleOf } from "./visible";

/** Classes of the moment, which are given anew to what is drawn. */
const PASSING = "chosen near marked";
/** Milliseconds between the two taps of a double tap, at most. */
const DOUBLE_TAP = 400;

export type Chosen = { drawing: Drawing; item: Item } | null;

export class Drawing {
  readonly graph: Graph;
  readonly hierarchy: Hierarchy;
  readonly panel: HTMLElement;
  onChoose: (chosen: Chosen) => void = () => {};
  onToggle: (item: Item) => void = () => {};
  private readonly choice: Choice;
  /** What is drawn. */
  readonly core: Core;
  private marked: Set<number> = new Set();
  private chosen: Item | null = null;
  private readonly layered = new Layered();

  constructor(
    data: GraphData,
    /** What it is called on the page. */
    readonly title: string = data.label,
  ) {
    this.graph = new Graph(data);
    this.hierarchy = new Hierarchy(this.graph);
    this.choice = new Choice(this.graph, this.graph.size === data.parameters.length);
    const canvas = element("div", { className: "canvas" });
    this.panel = element("section", { className: "drawing" }, toolbar(this), canvas);
    this.panel.setAttribute("aria-label", `graph ${title}`);
    this.core = cytoscape({
      container: canvas,
      style: STYLE,
      layout: { name: "preset" },
      autoungrabify: true,
      boxSelectionEnabled: false,
      minZoom: 0.01,
      maxZoom: 3,
    });
    this.listen();
    this.hierarchy.begin();
  }

  /** Draws for the first time, when the panel is on the page and has a size. */
  start(): void {
    this.core.resize();
    this.draw();
    begin(this.core);
  }

  /** Opens or closes a scope, and tells so: as a person asks for it. */
  toggle(item: Item): void {
    this.setOpen(item, !item.open);
    this.onToggle(item);
  }

  setOpen(item: Item, open: boolean): void {
    if (item.kind === "op" || item.open === open) return;
    const before = this.core.getElementById(item.key);
    const held = before.nonempty() ? { ...before.renderedPosition() } : null;
    if (open) this.hierarchy.open(item);
    else this.hierarchy.close(item);
    this.draw();
    this.holdStill(item, held);
  }

  openAll(): void {
    const waiting: Item[] = [this.hierarchy.root];
    while (waiting.length) {
      const at = waiting.pop()!;
      if (at.kind === "op") continue;
      at.open = true;
      waiting.push(...at.children);
    }
    this.draw();
    begin(this.core);
  }

  closeAll(): void {
    this.hierarchy.close(this.hierarchy.root);
    this.hierarchy.begin();
    this.draw();
    begin(this.core);
  }

  fit(): void {
    fit(this.core);
  }

  /** Shows an op or scope: opens what is around it, and moves there. */
  show(item: Item): void {
    const changed = this.hierarchy.reveal(item);
    if (!this.choice.shows(item)) this.setParameters(true);
    else if (changed || this.core.getElementById(item.key).empty()) this.draw();
    const node = this.core.getElementById(item.key);
    this.core.stop();
    this.core.zoom(Math.max(this.core.zoom(), 0.8));
    this.core.center(node);
    this.select(item);
  }

  /** Frames an item, or the closed scope that it is in. */
  select(item: Item | null): void {
    this.chosen = item;
    this.core.elements().removeClass("chosen near");
    if (!item) return;
    const node = this.core.getElementById(drawnFor(item).key);
    node.addClass("chosen");
    node.connectedEdges().addClass("near");
  }

  /** Rings some ops, or the closed scopes that they are in. */
  mark(ops: Iterable<number>): void {
    this.marked = new Set(ops);
    this.remark();
  }

  get parameters(): boolean {
    return this.choice.parameters;
  }

  /** Shows or hides weights and constants. */
  setParameters(shown: boolean): void {
    this.choice.parameters = shown;
    this.panel.querySelector<HTMLInputElement>("input.parameters")!.checked = shown;
    this.draw();
  }

  private listen(): void {
    this.core.on("tap", (event) => {
      if (event.target === this.core) this.onChoose(null);
    });
    // Cytoscape's double tap is any two in quick succession, on two nodes, too.
    let tapped: Item | null = null;
    let before = 0;
    this.core.on("tap", "node", (event) => {
      const item = this.itemOf(event.target as NodeSingular);
      const again = item === tapped && event.timeStamp - before < DOUBLE_TAP;
      tapped = again ? null : item;
      before = event.timeStamp;
      if (again) {
        this.toggle(item);
      } else {
        this.select(item);
        this.onChoose({ drawing: this, item });
      }
    });
  }

  private itemOf(node: NodeSingular): Item {
    return node.scratch("item") as Item;
  }

  private draw(): void {
    const visible = visibleOf(this.hierarchy, this.choice);
    const labels = (item: Item): string => labelOf(item, this.graph);
    const layout = layOut(visible, this.hierarchy.root, labels, this.layered);
    this.core.elements().removeClass(PASSING);
    update(this.core, elementsOf(visible, layout, this.graph));
    this.remark();
    this.select(this.chosen);
  }

  /** Keeps an item where it was on the screen. */
  private holdStill(item: Item, place: Point | null): void {
    const node = this.core.getElementById(item.key);
    if (!place || node.empty()) return;
    const now = node.renderedPosition();
    const top = item.open ? node.renderedOuterHeight() / 2 - 30 : 0;
    this.core.panBy({ x: place.x - now.x, y: place.y - now.y + Math.max(top, 0) });
  }

  private remark(): void {
    this.core.nodes().removeClass("marked");
    const keys = new Set<string>();
    for (const op of this.marked) keys.add(drawnFor(this.hierarchy.itemOf(op)).key);
    for (const key of keys) this.core.getElementById(key).addClass("marked");
  }
}

/** The item itself, or the outermost closed scope around it. */
function drawnFor(item: Item): Item {
  let drawn = item;
  for (let up = item.parent; up; up = up.parent) if (!up.open) drawn = up;
  return drawn;
}
