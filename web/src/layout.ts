// Where things are drawn. Each open scope is laid out by itself, from the inside out, as
// one layered drawing of its children; to what is outside, it is a box of that size.
// So opening a scope moves what is around it and costs no more than that.

import dagre from "@dagrejs/dagre";

import type { Item } from "./scopes";
import type { Visible, VisibleEdge } from "./visible";

export const PADDING = 18;
/** Room for the label of an open scope. */
export const HEADING = 16;
/** Above this many children, layers are found by the quick method. */
const QUICK = 250;

/** Scopes with more children leave no room for what is written on edges. */
const CROWDED = 80;

/** Letters of a line. */
const LETTERS = 36;
/** The width of a letter in a box, in bold above an open scope, and on an edge. */
const LETTER = 6.6;
const BOLD_LETTER = 7.2;
const EDGE_LETTER = 4.4;

export interface Point {
  x: number;
  y: number;
}

export interface Box {
  width: number;
  height: number;
}

export interface Layout {
  /** The middle of each drawn item. */
  centres: Map<Item, Point>;
  /** The room of each open scope, below its heading. */
  boxes: Map<Item, Box>;
  /** Where edges between children of one scope bend. */
  bends: Map<string, Point[]>;
}

/** The room that a label takes; longer ones are wrapped. */
export function boxOf(label: string): Box {
  const lines = label.split("\n");
  const widest = Math.max(8, ...lines.map((line) => line.length));
  const rows = lines.reduce((sum, line) => sum + Math.ceil(line.length / LETTERS), 0);
  return { width: 24 + Math.min(widest, LETTERS) * LETTER, height: 16 + rows * 12 };
}

/** The width of a label above an open scope, which is cut where it is longer. */
export function headingOf(label: string): number {
  return Math.min(label.length, LETTERS) * BOLD_LETTER;
}

export function layOut(visible: Visible, root: Item, labels: (item: Item) => string): Layout {
  const members = new Map<Item, Item[]>([[root, []]]);
  for (const scope of visible.open) members.set(scope, []);
  for (const item of [...visible.open, ...visible.leaves]) {
    members.get(item.parent!)!.push(item);
  }
  const edges = edgesByScope(visible.edges, members);
  const sizes = new Map(visible.leaves.map((leaf) => [leaf, boxOf(labels(leaf))]));
  const drawn = new Map<Item, ScopeLayout>();
  for (const scope of [...visible.open].reverse().concat(root)) {
    const layout = layOutScope(members.get(scope)!, edges.get(scope) ?? [], sizes);
    drawn.set(scope, layout);
    sizes.set(scope, {
      width: Math.max(layout.size.width + 2 * PADDING, headingOf(labels(scope))),
      height: layout.size.height + 2 * PADDING + HEADING,
    });
  }
  return placed(visible, root, drawn, sizes, members);
}

interface ScopeLayout {
  size: Box;
  centres: Map<Item, Point>;
  bends: Map<string, Point[]>;
}

interface InnerEdge {
  from: Item;
  to: Item;
  /** The edges that are drawn for it. */
  drawn: VisibleEdge[];
}

/** Edges by the scope that both ends lie in, between its children. */
function edgesByScope(
  edges: VisibleEdge[],
  members: Map<Item, Item[]>,
): Map<Item, InnerEdge[]> {
  const found = new Map<Item, Map<string, InnerEdge>>();
  for (const edge of edges) {
    const [scope, from, to] = meeting(edge.source, edge.target);
    if (!members.has(scope) || from === to) continue;
    const inside = found.get(scope) ?? new Map<string, InnerEdge>();
    found.set(scope, inside);
    const key = `${from.key}\n${to.key}`;
    const inner = inside.get(key) ?? { from, to, drawn: [] };
    inner.drawn.push(edge);
    inside.set(key, inner);
  }
  return new Map([...found].map(([scope, inside]) => [scope, [...inside.values()]]));
}

/** The innermost scope around two items, and its children that hold them. */
function meeting(a: Item, b: Item): [Item, Item, Item] {
  const above = new Map<Item, Item>();
  for (let at = a; at.parent; at = at.parent) above.set(at.parent, at);
  for (let at = b; at.parent; at = at.parent) {
    const other = above.get(at.parent);
    if (other) return [at.parent, other, at];
  }
  throw new Error("the items are of two hierarchies");
}

function layOutScope(
  children: Item[],
  edges: InnerEdge[],
  sizes: Map<Item, Box>,
): ScopeLayout {
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({
    rankdir: "TB",
    nodesep: 22,
    ranksep: 34,
    edgesep: 12,
    ranker: children.length > QUICK ? "longest-path" : "network-simplex",
  });
  graph.setDefaultEdgeLabel(() => ({}));
  const names = new Map(children.map((child, index) => [child, String(index)]));
  for (const [child, name] of names) {
    graph.setNode(name, { ...sizes.get(child)! });
  }
  for (const edge of edges) {
    const room = children.length > CROWDED ? {} : roomOf(edge);
    graph.setEdge(names.get(edge.from)!, names.get(edge.to)!, room);
  }
  dagre.layout(graph);
  const size = graph.graph();
  const bends = new Map<string, Point[]>();
  for (const { from, to, drawn } of edges) {
    if (drawn.length > 1) continue;
    const points = graph.edge(names.get(from)!, names.get(to)!).points as Point[];
    bends.set(drawn[0].key, points.slice(1, -1));
  }
  const centres = new Map<Item, Point>();
  for (const [child, name] of names) {
    const { x, y } = graph.node(name);
    centres.set(child, { x: x as number, y: y as number });
  }
  return { size: { width: size.width ?? 0, height: size.height ?? 0 }, centres, bends };
}

/** The room for what is written in the middle of an edge. */
function roomOf({ from, to, drawn }: InnerEdge): Partial<Box> & { labelpos?: string } {
  const [edge] = drawn;
  if (edge.source !== from || edge.target !== to || !edge.label) return {};
  return { width: edge.label.length * EDGE_LETTER, height: 10, labelpos: "c" };
}

/** Turns places inside of scopes into places on the page. */
function placed(
  visible: Visible,
  root: Item,
  drawn: Map<Item, ScopeLayout>,
  sizes: Map<Item, Box>,
  members: Map<Item, Item[]>,
): Layout {
  const corners = new Map<Item, Point>([[root, { x: 0, y: 0 }]]);
  const layout: Layout = { centres: new Map(), boxes: new Map(), bends: new Map() };
  const ends = new Map(visible.edges.map((edge) => [edge.key, edge]));
  for (const scope of [root, ...visible.open]) {
    const corner = corners.get(scope)!;
    const inside = drawn.get(scope)!;
    for (const child of members.get(scope)!) {
      const centre = moved(inside.centres.get(child)!, corner);
      layout.centres.set(child, centre);
      if (child.open) {
        const size = sizes.get(child)!;
        layout.boxes.set(child, { width: size.width, height: size.height - HEADING });
        layout.centres.set(child, { x: centre.x, y: centre.y + HEADING / 2 });
        corners.set(child, {
          x: centre.x - drawn.get(child)!.size.width / 2,
          y: centre.y - size.height / 2 + PADDING + HEADING,
        });
      }
    }
    for (const [key, points] of inside.bends) {
      const edge = ends.get(key)!;
      // An edge that ends inside of an open child is drawn straight from there.
      if (edge.source.parent !== scope || edge.target.parent !== scope) continue;
      layout.bends.set(key, points.map((point) => moved(point, corner)));
    }
  }
  return layout;
}

function moved(point: Point, by: Point): Point {
  return { x: point.x + by.x, y: point.y + by.y };
}
