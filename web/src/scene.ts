// What is drawn, as shapes at places: boxes, lines, and what is written on them.

import type { Graph } from "./graph";
import type { Point } from "./layered";
import { boxOf, HEADING, headingOf, linesOf, type Layout } from "./layout";
import { borderOf, fillOf, labelOf } from "./looks";
import type { Item } from "./items";
import { every, type Steps } from "./steps";
import type { Visible, VisibleEdge } from "./visible";

/** Pixels from the beginning of an edge to what is written on it, if its middle is unclear. */
const LABEL_OFFSET = 26;

export interface Rect {
  x1: number;
  y1: number;
  x2: number;
  y2: number;
}

export interface SceneNode extends Rect {
  key: string;
  item: Item;
  /** The number of the open scope that it lies in, among the nodes; -1 in none. */
  parent: number;
  /** Closed: the lines in it. Open: the heading above it. */
  lines: string[];
  fill: string;
  border: string;
  open: boolean;
}

export interface SceneEdge extends Rect {
  source: SceneNode;
  target: SceneNode;
  /** From the border of one box to that of the other. */
  points: Point[];
  label: string;
  /** Where the label is. */
  middle: Point;
  width: number;
  control: boolean;
}

export interface Scene {
  /** Open scopes first, outer ones before inner ones. */
  nodes: SceneNode[];
  byKey: Map<string, SceneNode>;
  edges: SceneEdge[];
  /** What all of it lies in. */
  box: Rect;
}

export const EMPTY: Scene = {
  nodes: [],
  byKey: new Map(),
  edges: [],
  box: { x1: 0, y1: 0, x2: 0, y2: 0 },
};

export function* sceneOf(visible: Visible, layout: Layout, graph: Graph): Steps<Scene> {
  const nodes: SceneNode[] = [];
  const byKey = new Map<string, SceneNode>();
  const places = new Map<Item, number>();
  const box = { x1: Infinity, y1: Infinity, x2: -Infinity, y2: -Infinity };
  const pause = every(50);
  for (const items of [visible.open, visible.leaves]) {
    for (const item of items) {
      if (pause()) yield 1;
      const node = nodeOf(item, layout, graph, places.get(item.parent!) ?? -1);
      places.set(item, nodes.push(node) - 1);
      byKey.set(node.key, node);
      include(box, node);
    }
  }
  const edges: SceneEdge[] = [];
  for (const edge of visible.edges) {
    if (pause()) yield 1;
    const ends = [edge.source, edge.target].map((item) => nodes[places.get(item)!]);
    const made = edgeOf(edge, layout, ends[0], ends[1]);
    if (made) edges.push(made);
  }
  return { nodes, byKey, edges, box: nodes.length ? box : EMPTY.box };
}

function nodeOf(item: Item, layout: Layout, graph: Graph, parent: number): SceneNode {
  const label = labelOf(item, graph);
  const { width, height } = layout.boxes.get(item) ?? boxOf(label);
  const { x, y } = layout.centres.get(item)!;
  return {
    key: item.key,
    item,
    parent,
    x1: x - width / 2,
    y1: y - height / 2,
    x2: x + width / 2,
    y2: y + height / 2,
    lines: item.open ? [headline(label, width)] : linesOf(label),
    fill: fillOf(item, graph),
    border: borderOf(item, graph),
    open: item.open,
  };
}

/** A heading: the name, cut where its scope is too narrow, and what else has room. */
function headline(label: string, width: number): string {
  const letters = Math.floor((width / headingOf("0")) * 1.1);
  const [name, ...others] = label.split("\n");
  if (name.length > letters) return `${name.slice(0, letters - 1)}…`;
  let text = name;
  for (const part of others) {
    const longer = `${text} · ${part}`;
    if (longer.length > letters) break;
    text = longer;
  }
  return text;
}

function edgeOf(
  edge: VisibleEdge,
  layout: Layout,
  source: SceneNode,
  target: SceneNode,
): SceneEdge | null {
  const bends = layout.bends.get(edge.key) ?? [];
  const points = [centre(source), ...bends, centre(target)];
  points[0] = leaving(source, points[1]);
  points[points.length - 1] = leaving(target, points[points.length - 2]);
  if (points.length === 2 && distance(points[0], points[1]) < 1) return null;
  const within = edge.source.parent === edge.target.parent;
  const length = points.slice(1).reduce((sum, p, at) => sum + distance(points[at], p), 0);
  // The middle of an edge into an open scope may be anywhere, such as on its heading.
  const made: SceneEdge = {
    source,
    target,
    points,
    label: edge.label,
    middle: along(points, within ? length / 2 : Math.min(LABEL_OFFSET, length / 2)),
    width: Math.min(1 + Math.log2(Math.max(edge.tensors, 1)), 4),
    control: !edge.tensors,
    x1: Infinity,
    y1: Infinity,
    x2: -Infinity,
    y2: -Infinity,
  };
  for (const { x, y } of points) include(made, { x1: x, y1: y, x2: x, y2: y });
  return made;
}

function include(box: Rect, other: Rect): void {
  box.x1 = Math.min(box.x1, other.x1);
  box.y1 = Math.min(box.y1, other.y1);
  box.x2 = Math.max(box.x2, other.x2);
  box.y2 = Math.max(box.y2, other.y2);
}

export function centre({ x1, y1, x2, y2 }: Rect): Point {
  return { x: (x1 + x2) / 2, y: (y1 + y2) / 2 };
}

/** Where the line from the middle of a box to a point leaves the box. */
function leaving(box: Rect, to: Point): Point {
  const from = centre(box);
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const share = Math.min(
    dx ? (box.x2 - box.x1) / 2 / Math.abs(dx) : Infinity,
    dy ? (box.y2 - box.y1) / 2 / Math.abs(dy) : Infinity,
    1,
  );
  return { x: from.x + dx * share, y: from.y + dy * share };
}

function distance(a: Point, b: Point): number {
  return Math.hypot(b.x - a.x, b.y - a.y);
}

/** The point so far along a line of several parts. */
function along(points: Point[], length: number): Point {
  let left = length;
  for (let at = 1; at < points.length; at++) {
    const [a, b] = [points[at - 1], points[at]];
    const part = distance(a, b);
    if (part >= left && part > 0) {
      const share = left / part;
      return { x: a.x + (b.x - a.x) * share, y: a.y + (b.y - a.y) * share };
    }
    left -= part;
  }
  return points[points.length - 1];
}

/** The node at a point: the innermost one; headings count as their scopes. */
export function nodeAt(scene: Scene, { x, y }: Point): SceneNode | undefined {
  return scene.nodes.findLast((node) => {
    const top = node.open ? node.y1 - HEADING : node.y1;
    const right = node.open && y < node.y1 ? node.x1 + headingOf(node.lines[0]) : node.x2;
    return x >= node.x1 && x <= right && y >= top && y <= node.y2;
  });
}
