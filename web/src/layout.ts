// Where things are drawn. Each open scope is laid out by itself, from the inside out, as
// one layered drawing of its children; to what is outside, it is a box of that size.
// So opening a scope moves what is around it and costs no more than that.

import { Layered, type Box, type InnerEdge, type Point, type ScopeLayout } from "./layered";
import type { Item } from "./scopes";
import type { Visible, VisibleEdge } from "./visible";

export const PADDING = 18;
/** Room for the label of an open scope. */
export const HEADING = 16;

/** Letters of a line. */
const LETTERS = 36;
/** The width of a letter in a box, and in bold above an open scope. */
const LETTER = 6.3;
const BOLD_LETTER = 7.2;

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
  return { width: 18 + Math.min(widest, LETTERS) * LETTER, height: 16 + rows * 12 };
}

/** The width of a label above an open scope, which is cut where it is longer. */
export function headingOf(label: string): number {
  return Math.min(label.length, LETTERS) * BOLD_LETTER;
}

export function layOut(
  visible: Visible,
  root: Item,
  labels: (item: Item) => string,
  layered: Layered,
): Layout {
  const members = new Map<Item, Item[]>([[root, []]]);
  for (const scope of visible.open) members.set(scope, []);
  for (const item of [...visible.open, ...visible.leaves]) {
    members.get(item.parent!)!.push(item);
  }
  const edges = edgesByScope(visible.edges, members);
  const sizes = new Map(visible.leaves.map((leaf) => [leaf, boxOf(labels(leaf))]));
  const drawn = new Map<Item, ScopeLayout>();
  for (const scope of [...visible.open].reverse().concat(root)) {
    const layout = layered.layOut(scope, members.get(scope)!, edges.get(scope) ?? [], sizes);
    drawn.set(scope, layout);
    sizes.set(scope, {
      width: Math.max(layout.size.width + 2 * PADDING, headingOf(labels(scope))),
      height: layout.size.height + 2 * PADDING + HEADING,
    });
  }
  return placed(visible, root, drawn, sizes, members);
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
