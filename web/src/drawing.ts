// One graph on the page: what is open is drawn, and follows pointers.

import { element } from "./dom";
import { frame } from "./framing";
import { Graph } from "./graph";
import type { Item } from "./items";
import type { Point } from "./layered";
import { layOut, type Known } from "./layout";
import { fillOf, labelOf } from "./looks";
import { paint, type Marks } from "./painter";
import { STATUS_NAMES, type GraphData } from "./payload";
import { Progress } from "./progress";
import { centre, EMPTY, nodeAt, sceneOf, type Scene, type SceneNode } from "./scene";
import { Hierarchy } from "./scopes";
import { atOnce, inSteps, Stopped, type Steps } from "./steps";
import { onTheme } from "./theme";
import { Viewport } from "./viewport";
import { Choice, visibleOf } from "./visible";
import { LayoutWorker } from "./worker";

/** Milliseconds between the two taps of a double tap, at most. */
const DOUBLE_TAP = 400;
/** Graphs and drawings of up to so many ops and boxes are drawn at once. */
const SMALL_GRAPH = 8000;
const SMALL_DRAWING = 200;

export type Chosen = { drawing: Drawing; item: Item } | null;

/** What of the drawing is to be seen, also after the page changed its size. */
type Framing = "beginning" | "whole" | "kept" | Item;

export class Drawing {
  readonly graph: Graph;
  readonly hierarchy: Hierarchy;
  readonly panel: HTMLElement;
  onChoose: (chosen: Chosen) => void = () => {};
  onToggle: (item: Item) => void = () => {};
  /** Frames this drawing; if `asked` by a person, what stands beside it, too. */
  onFrame: (asked: boolean) => void = () => this.frameAlone();
  /** Weights and constants are shown or hidden from now on. */
  onParameters: (shown: boolean) => void = () => {};
  scene: Scene = EMPTY;
  readonly viewport: Viewport;
  framing: Framing = "beginning";
  private readonly choice: Choice;
  private readonly marks: Marks = { chosen: undefined, found: new Set() };
  private readonly told = element("div", { className: "unseen" });
  private readonly progress = new Progress("drawing");
  private readonly known: Known = new Map();
  private readonly worker = new LayoutWorker();
  private work: AbortController | null = null;
  private marked: Iterable<number> = [];
  private chosenItem: Item | null = null;

  constructor(
    data: GraphData,
    /** What it is called on the page. */
    readonly title: string = data.label,
  ) {
    this.graph = new Graph(data);
    this.hierarchy = new Hierarchy(this.graph);
    this.choice = new Choice(this.graph, this.graph.size === data.parameters.length);
    const holder = element("div", { className: "canvas", tabIndex: 0 });
    holder.setAttribute("role", "application");
    this.told.setAttribute("aria-live", "polite");
    this.viewport = new Viewport(holder);
    holder.append(this.progress.panel);
    this.panel = element("section", { className: "drawing" }, holder, this.told);
    this.panel.setAttribute("aria-label", `graph ${title}`);
    this.listen();
    this.hierarchy.begin();
  }

  /** Draws for the first time, when the panel is on the page and has a size. */
  start(): void {
    this.viewport.measure();
    this.redraw(() => this.onFrame(false));
  }

  /** Opens or closes a scope, and tells so: as a person asks for it. */
  toggle(item: Item): void {
    if (item.kind === "op") return;
    this.setOpen(item, !item.open);
    this.onToggle(item);
  }

  setOpen(item: Item, open: boolean): void {
    if (item.kind === "op" || item.open === open) return;
    const before = this.scene.byKey.get(item.key);
    const held = before && this.viewport.onScreen(grip(before));
    const undo = (): void => this.hierarchy[open ? "close" : "open"](item);
    if (open) this.hierarchy.open(item);
    else this.hierarchy.close(item);
    this.redraw(() => {
      this.holdStill(item, held);
      this.tell();
    }, undo);
  }

  openAll(): void {
    const closed: Item[] = [];
    const waiting: Item[] = [this.hierarchy.root];
    while (waiting.length) {
      const at = waiting.pop()!;
      if (at.kind === "op") continue;
      if (!at.open) closed.push(at);
      at.open = true;
      for (const child of at.children) waiting.push(child);
    }
    const undo = (): void => closed.forEach((item) => (item.open = false));
    this.redraw(() => this.reframe("beginning"), undo);
  }

  closeAll(): void {
    this.hierarchy.close(this.hierarchy.root);
    this.hierarchy.begin();
    this.redraw(() => this.reframe("beginning"));
  }

  fit(): void {
    this.reframe("whole");
  }

  /** The keys of the scopes that are open. */
  get openKeys(): string[] {
    return this.hierarchy.scopes.filter((item) => item.open).map(({ key }) => key);
  }

  /** Opens the scopes with some keys and no others; to be drawn afterwards. */
  setOpenKeys(keys: Set<string>): void {
    for (const item of this.hierarchy.scopes) item.open = keys.has(item.key);
    this.hierarchy.root.open = true;
  }

  zoomBy(factor: number): void {
    const chosen = this.chosen;
    const about = chosen && this.seen(chosen) ? centre(chosen) : undefined;
    this.viewport.zoomBy(factor, about && this.viewport.onScreen(about));
    this.framing = "kept";
  }

  /** Shows an op or scope: opens what is around it, and moves there. */
  show(item: Item): void {
    const changed = this.hierarchy.reveal(item);
    const isHidden = !this.choice.shows(item);
    if (isHidden) this.checkParameters(true);
    const move = (): void => {
      this.framing = item;
      this.frameAlone(Math.max(this.viewport.view.zoom, 0.8));
      this.select(item);
    };
    if (changed || isHidden || !this.scene.byKey.has(item.key)) this.redraw(move);
    else move();
  }

  /** Chooses a node, and moves so far that it is seen. */
  goTo(node: SceneNode): void {
    this.select(node.item);
    this.onChoose({ drawing: this, item: node.item });
    if (this.seen(node)) return;
    this.framing = node.item;
    this.frameAlone();
  }

  /** Frames an item, or the closed scope that it is in. */
  select(item: Item | null): void {
    this.chosenItem = item;
    this.remark();
    this.tell();
  }

  /** What is framed. */
  get chosen(): SceneNode | undefined {
    return this.marks.chosen;
  }

  /** Colours what is drawn anew, after what the colours tell has changed. */
  recolour(): void {
    for (const node of this.scene.nodes) node.fill = fillOf(node.item, this.graph);
    this.viewport.repaint();
  }

  /** Rings some ops, or the closed scopes that they are in. */
  mark(ops: Iterable<number>): void {
    this.marked = ops;
    this.remark();
  }

  get found(): Set<SceneNode> {
    return this.marks.found;
  }

  get parameters(): boolean {
    return this.choice.parameters;
  }

  /** Shows or hides weights and constants. */
  setParameters(shown: boolean): void {
    this.checkParameters(shown);
    this.redraw(() => {});
  }

  private checkParameters(shown: boolean): void {
    this.choice.parameters = shown;
    this.onParameters(shown);
  }

  /** Shows something else of the drawing from now on. */
  reframe(framing: Framing): void {
    this.framing = framing;
    this.onFrame(true);
  }

  /** Shows what is to be seen. */
  frameAlone(zoom: number = this.viewport.view.zoom): void {
    const { framing, viewport } = this;
    if (framing === "kept") return;
    if (typeof framing !== "string") {
      const node = this.nodeOf(framing);
      if (node) viewport.centre(node.open ? grip(node) : centre(node), zoom);
      return;
    }
    const framed = [{ scene: this.scene, size: viewport.size }];
    viewport.set(frame(framed, () => undefined, framing === "beginning")[0]);
  }

  /** Draws what is seen with another pen. */
  paintWith(pen: Parameters<typeof paint>[0], ratio = 1): void {
    const { view, size } = this.viewport;
    paint(pen, this.scene, view, this.marks, size, ratio);
  }

  private listen(): void {
    const { viewport } = this;
    const context = viewport.canvas.getContext("2d", { alpha: false })!;
    viewport.onPaint = () => this.paintWith(context, devicePixelRatio);
    viewport.onMoved = () => (this.framing = "kept");
    viewport.onResize = () => this.onFrame(false);
    onTheme(() => viewport.repaint());
    let tapped: Item | null = null;
    let before = 0;
    viewport.onTap = (place, time) => {
      const node = nodeAt(this.scene, viewport.inScene(place));
      if (!node) {
        tapped = null;
        this.onChoose(null);
        return;
      }
      const again = node.item === tapped && time - before < DOUBLE_TAP;
      tapped = again ? null : node.item;
      before = time;
      if (again) return this.toggle(node.item);
      this.select(node.item);
      this.onChoose({ drawing: this, item: node.item });
    };
  }

  /** Draws what is open now: at once where that is quick, else in steps, beside the page. */
  private redraw(then: () => void, undo?: () => void): void {
    this.stopWork();
    const finish = (scene: Scene): void => {
      this.scene = scene;
      this.remark();
      then();
      this.viewport.repaint();
    };
    if (this.isSmall()) return finish(atOnce(this.steps(false)));
    void this.redrawInSteps(finish, undo);
  }

  private async redrawInSteps(finish: (scene: Scene) => void, undo?: () => void): Promise<void> {
    const work = new AbortController();
    this.work = work;
    this.busy(1);
    this.progress.begin();
    this.progress.onStop = () => {
      this.stopWork();
      undo?.();
    };
    try {
      const tell = (share: number): void => this.progress.tell(share);
      finish(await inSteps(this.steps(true), work.signal, tell));
    } catch (error) {
      if (!(error instanceof Stopped)) throw error;
    } finally {
      if (this.work === work) this.work = null;
      if (!this.work) this.progress.end();
      this.busy(-1);
    }
  }

  private *steps(beside: boolean): Steps<Scene> {
    const visible = yield* visibleOf(this.hierarchy, this.choice);
    const labels = (item: Item): string => labelOf(item, this.graph);
    const worker = beside ? this.worker.layOut.bind(this.worker) : undefined;
    const layout = yield* layOut(visible, this.hierarchy.root, labels, this.known, worker);
    return yield* sceneOf(visible, layout, this.graph);
  }

  private stopWork(): void {
    if (!this.work) return;
    this.work.abort();
    this.work = null;
    this.worker.stop();
  }

  /** Tells tests, and styles, that something is being drawn. */
  private busy(by: number): void {
    const { dataset } = document.body;
    const count = Number(dataset.busy ?? 0) + by;
    if (count) dataset.busy = String(count);
    else delete dataset.busy;
  }

  private isSmall(): boolean {
    if (this.graph.size > SMALL_GRAPH) return false;
    let boxes = 0;
    const waiting = [this.hierarchy.root];
    while (waiting.length) {
      const at = waiting.pop()!;
      boxes += 1;
      if (boxes > SMALL_DRAWING) return false;
      if (at.open) for (const child of at.children) waiting.push(child);
    }
    return true;
  }

  /** Keeps an item where it was on the screen. */
  private holdStill(item: Item, held: Point | undefined): void {
    const node = this.scene.byKey.get(item.key);
    if (!held || !node) return;
    const now = this.viewport.onScreen(grip(node));
    this.viewport.moveBy(held.x - now.x, held.y - now.y);
    this.framing = "kept";
  }

  /** The node of an item, or of the closed scope that it is in. */
  private nodeOf(item: Item): SceneNode | undefined {
    for (let at: Item | null = item; at; at = at.parent) {
      const node = this.scene.byKey.get(at.key);
      if (node) return node.open && at !== item ? undefined : node;
    }
    return undefined;
  }

  private remark(): void {
    const { marks } = this;
    marks.chosen = this.chosenItem ? this.nodeOf(this.chosenItem) : undefined;
    marks.found = new Set();
    for (const op of this.marked) {
      const node = this.nodeOf(this.hierarchy.itemOf(op));
      if (node) marks.found.add(node);
    }
    this.viewport.repaint();
  }

  private seen({ x1, y1, x2, y2 }: SceneNode): boolean {
    const { size } = this.viewport;
    const from = this.viewport.onScreen({ x: x1, y: y1 });
    const to = this.viewport.onScreen({ x: x2, y: y2 });
    return from.x >= 0 && from.y >= 0 && to.x <= size.width && to.y <= size.height;
  }

  /** Says to those who do not see it what is chosen. */
  private tell(): void {
    const item = this.chosenItem;
    this.told.textContent = item ? this.wordsFor(item) : "";
  }

  private wordsFor(item: Item): string {
    if (item.kind !== "op") {
      const count = this.graph.countText(item.ops);
      return `${item.label}, ${item.kind} of ${count}, ${item.open ? "open" : "closed"}`;
    }
    const { graph } = this;
    const status = graph.status(item.op);
    const readers = graph.consumers[item.op].length;
    const reads = graph.inputs(item.op).length;
    const words = [item.label, graph.type(item.op), `reads ${reads}`, `read by ${readers}`];
    return [...words, ...(status ? [STATUS_NAMES[status]] : [])].join(", ");
  }
}

/** The place of a node that stays when it opens: the middle of its upper edge. */
function grip(node: SceneNode): Point {
  return { x: centre(node).x, y: node.y1 };
}
