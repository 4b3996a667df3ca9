// One graph on the page: what is open is drawn, and follows the pointer.

import cytoscape, { type Core, type ElementDefinition, type NodeSingular } from "cytoscape";

import { colourOf, STATUS_COLOURS } from "./colours";
import { element, button, plural } from "./dom";
import { Graph } from "./graph";
import { boxOf, layOut, type Box, type Layout, type Point } from "./layout";
import { ADDED, REMOVED, REWIRED, SAME, type GraphData } from "./payload";
import { Hierarchy, type Item } from "./scopes";
import { STYLE } from "./style";
import { Choice, visibleOf, type Visible, type VisibleEdge } from "./visible";

export type Chosen = { drawing: Drawing; item: Item } | null;

/** The least zoom at which labels can be read. */
const READABLE = 0.7;

export class Drawing {
  readonly graph: Graph;
  readonly hierarchy: Hierarchy;
  readonly panel: HTMLElement;
  onChoose: (chosen: Chosen) => void = () => {};
  onToggle: (item: Item) => void = () => {};
  private readonly choice: Choice;
  private readonly core: Core;
  private marked: Set<number> = new Set();

  constructor(data: GraphData) {
    this.graph = new Graph(data);
    this.hierarchy = new Hierarchy(this.graph);
    this.choice = new Choice(this.graph, this.graph.size === data.parameters.length);
    const canvas = element("div", { className: "canvas" });
    this.panel = element("section", { className: "drawing" }, this.heading(), canvas);
    this.panel.setAttribute("aria-label", `graph ${data.label}`);
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
    this.fit();
  }

  get openScopes(): number {
    return this.core.nodes(":parent").length;
  }

  /** Opens a closed scope, closes an open one. */
  toggle(item: Item, open = !item.open): void {
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
    this.fit();
  }

  closeAll(): void {
    this.hierarchy.close(this.hierarchy.root);
    this.hierarchy.begin();
    this.draw();
    this.fit();
  }

  fit(): void {
    this.core.fit(undefined, 24);
    if (this.core.zoom() >= READABLE) {
      this.core.zoom({ level: Math.min(this.core.zoom(), 1.2), position: { x: 0, y: 0 } });
      this.core.center();
      return;
    }
    // A long network would be a thread: begin at its top, large enough to read.
    const box = this.core.elements().boundingBox();
    this.core.zoom(READABLE);
    this.core.pan({
      x: this.core.width() / 2 - ((box.x1 + box.x2) / 2) * READABLE,
      y: 24 - box.y1 * READABLE,
    });
  }

  /** Shows an op or scope: opens what is around it, and moves there. */
  show(item: Item): void {
    let changed = this.hierarchy.reveal(item);
    if (!this.choice.shows(item)) {
      this.setParameters(true);
      changed = true;
    }
    if (changed || this.core.getElementById(item.key).empty()) this.draw();
    const node = this.core.getElementById(item.key);
    this.core.stop();
    this.core.zoom(Math.max(this.core.zoom(), 0.8));
    this.core.center(node);
    this.select(item);
  }

  select(item: Item | null): void {
    this.core.elements().removeClass("chosen near");
    if (!item) return;
    const node = this.core.getElementById(item.key);
    node.addClass("chosen");
    node.connectedEdges().addClass("near");
  }

  /** Rings some ops, or the closed scopes that they are in. */
  mark(ops: Iterable<number>): void {
    this.marked = new Set(ops);
    this.remark();
  }

  setParameters(shown: boolean): void {
    this.choice.parameters = shown;
    this.panel.querySelector<HTMLInputElement>("input.parameters")!.checked = shown;
  }

  private heading(): HTMLElement {
    const { data } = this.graph;
    const box = element("input", {
      type: "checkbox",
      className: "parameters",
      checked: this.choice.parameters,
      onchange: () => {
        this.choice.parameters = box.checked;
        this.draw();
      },
    });
    return element(
      "header",
      {},
      element("strong", { textContent: data.label }),
      element("span", { className: "dim", textContent: plural(this.graph.size, "op") }),
      element("label", { title: "ops that hold or read weights and constants" }, box, "weights"),
      button("fit", () => this.fit(), "show all of the drawing"),
      button("open all", () => this.openAll()),
      button("close all", () => this.closeAll()),
    );
  }

  private listen(): void {
    this.core.on("tap", (event) => {
      if (event.target === this.core) this.onChoose(null);
    });
    this.core.on("tap", "node", (event) => {
      const item = this.itemOf(event.target as NodeSingular);
      this.select(item);
      this.onChoose({ drawing: this, item });
    });
    this.core.on("dbltap", "node", (event) => {
      // The innermost node only: its scope must not close with it.
      event.stopPropagation();
      const item = this.itemOf(event.target as NodeSingular);
      this.toggle(item);
      this.onToggle(item);
    });
  }

  private itemOf(node: NodeSingular): Item {
    return node.scratch("item") as Item;
  }

  private draw(): void {
    const visible = visibleOf(this.hierarchy, this.choice);
    const boxes = (item: Item): Box => boxOf(labelOf(item, this.graph));
    const layout = layOut(visible, this.hierarchy.root, boxes);
    this.core.batch(() => {
      this.core.elements().remove();
      this.core.add(elementsOf(visible, layout, this.hierarchy.root, this.graph));
    });
    this.remark();
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
    for (const op of this.marked) {
      let at: Item | null = this.hierarchy.itemOf(op);
      for (let up = at.parent; up; up = up.parent) if (!up.open) at = up;
      keys.add(at.key);
    }
    for (const key of keys) this.core.getElementById(key).addClass("marked");
  }
}

function elementsOf(
  visible: Visible,
  layout: Layout,
  root: Item,
  graph: Graph,
): ElementDefinition[] {
  const nodes = [...visible.open, ...visible.leaves].map((item) => {
    const parent = item.parent === root ? undefined : item.parent!.key;
    return {
      group: "nodes" as const,
      data: { id: item.key, parent, ...looks(item, graph) },
      scratch: { item },
      classes: `${item.kind} ${item.open ? "open" : "closed"}`,
      ...(item.open ? {} : { position: { ...layout.centres.get(item)! } }),
    };
  });
  const edges = visible.edges.map((edge) => edgeElement(edge, layout));
  return [...nodes, ...edges];
}

function looks(item: Item, graph: Graph): Record<string, unknown> {
  const label = labelOf(item, graph);
  const box = boxOf(label);
  const common = { width: box.width, height: box.height, border: border(item, graph), label };
  if (item.kind === "op") {
    return { ...common, colour: colourOf(graph.type(item.op)) };
  }
  return { ...common, colour: "#eef2f7" };
}

function labelOf(item: Item, graph: Graph): string {
  if (item.kind === "op") {
    return `${graph.data.ends[item.op] ?? item.label}\n${graph.type(item.op)}`;
  }
  return `${item.label}  (${changesText(item) || item.ops.length})`;
}

function changesText(item: Item): string {
  const signs: [number, string][] = [
    [ADDED, "+"],
    [REMOVED, "−"],
    [REWIRED, "~"],
  ];
  return signs
    .filter(([status]) => item.changes[status])
    .map(([status, sign]) => `${sign}${item.changes[status]}`)
    .join(" ");
}

/** The colour of the most telling change in it. */
function border(item: Item, graph: Graph): string {
  if (item.kind === "op") {
    const status = graph.status(item.op);
    return status === SAME ? "#8a94a6" : STATUS_COLOURS[status];
  }
  for (const status of [REMOVED, ADDED, REWIRED]) {
    if (item.changes[status]) return STATUS_COLOURS[status];
  }
  return "#8a94a6";
}

function edgeElement(edge: VisibleEdge, layout: Layout): ElementDefinition {
  const bent = bending(edge, layout);
  return {
    group: "edges",
    data: {
      id: `edge\n${edge.key}`,
      source: edge.source.key,
      target: edge.target.key,
      label: edge.label,
      width: Math.min(1 + Math.log2(Math.max(edge.tensors, 1)), 4),
      ...bent,
    },
    classes: `${edge.tensors ? "data" : "control"} ${bent ? "bent" : "straight"}`,
  };
}

/** Bends as cytoscape takes them: along the line between the ends, and off it. */
function bending(
  edge: VisibleEdge,
  layout: Layout,
): { weights: string; distances: string } | null {
  const points = layout.bends.get(edge.key);
  if (!points?.length) return null;
  const from = layout.centres.get(edge.source)!;
  const to = layout.centres.get(edge.target)!;
  const along = { x: to.x - from.x, y: to.y - from.y };
  const length = Math.hypot(along.x, along.y);
  if (length < 1) return null;
  const weights = points.map(
    (p) => ((p.x - from.x) * along.x + (p.y - from.y) * along.y) / length ** 2,
  );
  const distances = points.map(
    (p) => ((p.y - from.y) * along.x - (p.x - from.x) * along.y) / length,
  );
  return { weights: weights.map(short).join(" "), distances: distances.map(short).join(" ") };
}

function short(value: number): string {
  return value.toFixed(3);
}
