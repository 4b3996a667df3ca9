// One scope as a layered drawing of its children, from the top to the bottom.

import dagre from "@dagrejs/dagre";

import type { Item } from "./scopes";
import type { VisibleEdge } from "./visible";

/** Above this many children, layers are found by the quick method. */
const QUICK = 100;
/** Scopes with more children leave no room for what is written on edges. */
const CROWDED = 80;
/** The width of a letter on an edge. */
const EDGE_LETTER = 4.4;

export interface Point {
  x: number;
  y: number;
}

export interface Box {
  width: number;
  height: number;
}

export interface ScopeLayout {
  size: Box;
  centres: Map<Item, Point>;
  bends: Map<string, Point[]>;
}

export interface InnerEdge {
  from: Item;
  to: Item;
  /** The edges that are drawn for it. */
  drawn: VisibleEdge[];
}

/** Lays out scopes, and remembers them: most are as they were when one is opened. */
export class Layered {
  private readonly known = new Map<Item, { key: string; layout: ScopeLayout }>();

  layOut(
    scope: Item,
    children: Item[],
    edges: InnerEdge[],
    sizes: Map<Item, Box>,
  ): ScopeLayout {
    const key = keyOf(children, edges, sizes);
    const before = this.known.get(scope);
    if (before?.key === key) return before.layout;
    const layout = layOut(children, edges, sizes);
    this.known.set(scope, { key, layout });
    return layout;
  }
}

/** All that a layout depends on, as text. */
function keyOf(children: Item[], edges: InnerEdge[], sizes: Map<Item, Box>): string {
  const boxes = children.map((child) => {
    const { width, height } = sizes.get(child)!;
    return `${child.key} ${width} ${height}`;
  });
  const lines = edges.map(({ from, to, drawn }) =>
    [from.key, to.key, ...drawn.map((edge) => `${edge.key} ${edge.label}`)].join("\n"),
  );
  return [...boxes, "", ...lines].join("\n");
}

function layOut(
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
