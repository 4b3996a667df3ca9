// Draws a scene on a canvas: what is seen of it, and of that what is large enough to be
// told apart.

import type { Point } from "./layered";
import { LINE } from "./layout";
import { PLAIN } from "./colours";
import type { Rect, Scene, SceneEdge, SceneNode } from "./scene";
import { fill, stroke, tones, type Tones } from "./theme";

export const FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
/** Pixels below which nothing is drawn of what is inside. */
const SPECK = 5;
/** The least sizes on the screen at which letters, corners and arrows are drawn. */
const LETTERS = 4.5;
const EDGE_LETTERS = 6;
const ROUND = 0.35;

export interface View {
  zoom: number;
  /** Where the scene's origin is on the screen. */
  x: number;
  y: number;
}

/** What is drawn with: a canvas, or what writes a file. */
export type Pen = Pick<
  CanvasRenderingContext2D,
  | "setTransform" | "fillRect" | "beginPath" | "moveTo" | "lineTo" | "arcTo" | "rect"
  | "roundRect" | "closePath" | "fill" | "stroke" | "fillText" | "measureText"
  | "setLineDash" | "fillStyle" | "strokeStyle" | "lineWidth" | "font" | "textAlign"
  | "textBaseline" | "globalAlpha"
>;

/** What is framed at the moment. */
export interface Marks {
  chosen: SceneNode | undefined;
  found: Set<SceneNode>;
}

export function paint(
  context: Pen,
  scene: Scene,
  view: View,
  marks: Marks,
  size: { width: number; height: number },
  ratio: number,
): void {
  const colours = tones();
  const seen = {
    x1: -view.x / view.zoom,
    y1: -view.y / view.zoom,
    x2: (size.width - view.x) / view.zoom,
    y2: (size.height - view.y) / view.zoom,
  };
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.fillStyle = colours.page;
  context.fillRect(0, 0, size.width, size.height);
  context.setTransform(
    ratio * view.zoom, 0, 0, ratio * view.zoom, ratio * view.x, ratio * view.y,
  );
  const painter = new Painter(context, view.zoom, seen, marks, colours);
  const nodes = painter.visible(scene.nodes);
  for (const node of nodes) if (node.open) painter.scope(node);
  painter.edges(scene.edges);
  painter.boxes(nodes.filter((node) => !node.open));
}

class Painter {
  constructor(
    private readonly context: Pen,
    private readonly zoom: number,
    private readonly seen: Rect,
    private readonly marks: Marks,
    private readonly colours: Tones,
  ) {}

  /** The nodes to draw: a scope that is a speck stands for all in it. */
  visible(nodes: SceneNode[]): SceneNode[] {
    const specks = new Uint8Array(nodes.length);
    return nodes.filter((node, at) => {
      if (node.parent >= 0 && specks[node.parent]) specks[at] = 1;
      else if (node.open) {
        specks[at] = +(this.zoom * Math.min(node.x2 - node.x1, node.y2 - node.y1) < SPECK);
        return this.sees(node);
      } else return this.sees(node);
      return false;
    });
  }

  private sees({ x1, y1, x2, y2 }: Rect): boolean {
    const { seen } = this;
    return x1 < seen.x2 && x2 > seen.x1 && y1 < seen.y2 && y2 > seen.y1;
  }

  scope(node: SceneNode): void {
    const { context, colours } = this;
    this.outline(node);
    context.fillStyle = colours.scope;
    context.fill();
    this.border(node, 2);
    if (this.zoom * 11 < LETTERS) return;
    context.fillStyle = colours.text;
    context.font = `bold 11px ${FONT}`;
    context.textAlign = "left";
    context.textBaseline = "alphabetic";
    context.fillText(node.lines[0], node.x1 + 2, node.y1 - 4);
  }

  /** Closed scopes and ops; small ones of one colour at once. */
  boxes(nodes: SceneNode[]): void {
    const plain = this.zoom < ROUND;
    const groups = new Map<string, SceneNode[]>();
    for (const node of nodes) {
      if (!plain || node === this.marks.chosen || this.marks.found.has(node)) continue;
      const key = `${node.fill}${node.border}`;
      const group = groups.get(key);
      if (group) group.push(node);
      else groups.set(key, [node]);
    }
    for (const group of groups.values()) this.rectangles(group);
    for (const node of nodes) {
      if (plain && node !== this.marks.chosen && !this.marks.found.has(node)) continue;
      this.outline(node);
      this.context.fillStyle = fill(node.fill);
      this.context.fill();
      this.border(node, node.item.kind === "op" ? 1.2 : 2);
    }
    if (this.zoom * 11 >= LETTERS) for (const node of nodes) this.lines(node);
  }

  private rectangles(group: SceneNode[]): void {
    const { context } = this;
    context.beginPath();
    for (const { x1, y1, x2, y2 } of group) context.rect(x1, y1, x2 - x1, y2 - y1);
    context.fillStyle = fill(group[0].fill);
    context.fill();
    context.strokeStyle = stroke(group[0].border);
    context.lineWidth = Math.max(1.2, (group[0].border === PLAIN ? 0.4 : 1) / this.zoom);
    context.stroke();
  }

  private outline({ x1, y1, x2, y2 }: Rect): void {
    this.context.beginPath();
    this.context.roundRect(x1, y1, x2 - x1, y2 - y1, 6);
  }

  private border(node: SceneNode, width: number): void {
    const { context, colours, marks } = this;
    if (marks.found.has(node)) {
      context.beginPath();
      const { x1, y1, x2, y2 } = node;
      context.roundRect(x1 - 4, y1 - 4, x2 - x1 + 8, y2 - y1 + 8, 9);
      context.strokeStyle = colours.found;
      context.lineWidth = Math.max(4, 2 / this.zoom);
      context.stroke();
      this.outline(node);
    }
    const isChosen = marks.chosen === node;
    context.setLineDash(node.item.kind === "group" ? [5, 3] : []);
    context.strokeStyle = isChosen ? colours.chosen : stroke(node.border);
    context.lineWidth = Math.max(isChosen ? 3.5 : width, (isChosen ? 2.5 : 0.7) / this.zoom);
    context.stroke();
    context.setLineDash([]);
  }

  private lines({ lines, x1, x2, y1, y2 }: SceneNode): void {
    const { context } = this;
    context.fillStyle = this.colours.text;
    context.font = `11px ${FONT}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    const top = (y1 + y2) / 2 - ((lines.length - 1) * LINE) / 2;
    lines.forEach((line, at) => {
      context.fillText(line, (x1 + x2) / 2, top + at * LINE + 0.5, x2 - x1 - 6);
    });
  }

  edges(edges: SceneEdge[]): void {
    const { chosen } = this.marks;
    const drawn = new Map<string, SceneEdge[]>();
    const near: SceneEdge[] = [];
    for (const edge of edges) {
      if (!this.sees(edge)) continue;
      if (chosen && (edge.source === chosen || edge.target === chosen)) {
        near.push(edge);
        continue;
      }
      if (this.zoom * Math.max(edge.x2 - edge.x1, edge.y2 - edge.y1) < SPECK) continue;
      const key = edge.control ? "control" : String(Math.round(edge.width));
      const group = drawn.get(key);
      if (group) group.push(edge);
      else drawn.set(key, [edge]);
    }
    const { edge, control } = this.colours;
    for (const [key, group] of drawn) this.lineGroup(group, key === "control" ? control : edge);
    this.lineGroup(near, this.colours.chosen);
    if (this.zoom * 8 < EDGE_LETTERS) return;
    for (const group of drawn.values()) group.forEach((one) => this.edgeLabel(one));
    near.forEach((one) => this.edgeLabel(one));
  }

  private lineGroup(group: SceneEdge[], colour: string): void {
    if (!group.length) return;
    const { context } = this;
    context.beginPath();
    for (const edge of group) trace(context, edge.points, this.zoom >= ROUND);
    context.strokeStyle = colour;
    context.lineWidth = Math.max(Math.round(group[0].width), 0.6 / this.zoom);
    context.setLineDash(group[0].control ? [4, 3] : []);
    context.stroke();
    context.setLineDash([]);
    if (this.zoom < ROUND) return;
    context.beginPath();
    for (const { points } of group) {
      arrowOf(points).forEach(({ x, y }, at) =>
        at ? context.lineTo(x, y) : context.moveTo(x, y),
      );
      context.closePath();
    }
    context.fillStyle = colour;
    context.fill();
  }

  private edgeLabel({ label, middle }: SceneEdge): void {
    const { context, colours } = this;
    if (!label) return;
    context.font = `8px ${FONT}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    const width = context.measureText(label).width;
    context.fillStyle = colours.page;
    context.globalAlpha = 0.8;
    context.fillRect(middle.x - width / 2 - 1, middle.y - 5, width + 2, 10);
    context.globalAlpha = 1;
    context.fillStyle = colours.dim;
    context.fillText(label, middle.x, middle.y);
  }
}

/** A line through points, with round corners. */
function trace(context: Pen, points: Point[], round: boolean): void {
  context.moveTo(points[0].x, points[0].y);
  for (let at = 1; at < points.length; at++) {
    const [point, next] = [points[at], points[at + 1]];
    if (round && next) context.arcTo(point.x, point.y, next.x, next.y, 8);
    else context.lineTo(point.x, point.y);
  }
}

/** The corners of the arrow at the end of a line. */
export function arrowOf(points: Point[]): Point[] {
  const [tip, before] = [points[points.length - 1], points[points.length - 2]];
  const length = Math.hypot(tip.x - before.x, tip.y - before.y) || 1;
  const [dx, dy] = [(tip.x - before.x) / length, (tip.y - before.y) / length];
  const back = { x: tip.x - 8 * dx, y: tip.y - 8 * dy };
  return [
    tip,
    { x: back.x + 4 * dy, y: back.y - 4 * dx },
    { x: back.x - 4 * dy, y: back.y + 4 * dx },
  ];
}
