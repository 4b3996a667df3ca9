// One scope as a layered drawing of its children, from the top to the bottom. It knows
// boxes and edges by their numbers alone, so that a worker can do it.

import dagre from "@dagrejs/dagre";

/** Above this many children, layers are found by the quick method. */
const QUICK = 100;
/** Scopes with more children leave no room for what is written on edges. */
const CROWDED = 80;

export interface Point {
  x: number;
  y: number;
}

export interface Box {
  width: number;
  height: number;
}

/** A scope to lay out: sizes of its children, and edges between them. */
export interface ScopeJob {
  boxes: Box[];
  /** The children that an edge goes from and to, and the room for what is written on it. */
  edges: [from: number, to: number, label: number][];
}

export interface ScopeLayout {
  size: Box;
  /** The middle of each child. */
  centres: Point[];
  /** Where each edge bends. */
  bends: Point[][];
}

export function layOutScope({ boxes, edges }: ScopeJob): ScopeLayout {
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({
    rankdir: "TB",
    nodesep: 22,
    ranksep: 34,
    edgesep: 12,
    ranker: boxes.length > QUICK ? "longest-path" : "network-simplex",
  });
  graph.setDefaultEdgeLabel(() => ({}));
  boxes.forEach((box, at) => graph.setNode(String(at), { ...box }));
  for (const [from, to, label] of edges) {
    const isWritten = label > 0 && boxes.length <= CROWDED;
    const room = isWritten ? { width: label, height: 10, labelpos: "c" } : {};
    graph.setEdge(String(from), String(to), room);
  }
  dagre.layout(graph);
  const { width, height } = graph.graph();
  return {
    size: { width: width ?? 0, height: height ?? 0 },
    centres: boxes.map((_, at) => {
      const { x, y } = graph.node(String(at));
      return { x: x as number, y: y as number };
    }),
    bends: edges.map(([from, to]) => {
      const points = graph.edge(String(from), String(to)).points as Point[];
      return points.slice(1, -1).map(({ x, y }) => ({ x, y }));
    }),
  };
}
