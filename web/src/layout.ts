// Where things are drawn. Each open scope is laid out by itself, from the inside out, as
// one layered drawing of its children; to what is outside, it is a box of that size.
// So opening a scope moves what is around it and costs no more than that.

import { layOutScope, type Box, type Point, type ScopeJob, type ScopeLayout } from "./layered";
import type { Item } from "./items";
import { every, type Steps } from "./steps";
import type { Visible, VisibleEdge } from "./visible";

export const PADDING = 18;
/** Room for the label of an open scope. */
export const HEADING = 16;

/** Letters of a line. */
const LETTERS = 36;
/** The height of a line in a box. */
export const LINE = 12;
/** The width of a letter in a box, and in bold above an open scope. */
const LETTER = 6.3;
const BOLD_LETTER = 7.2;
/** The width of a letter on an edge. */
const EDGE_LETTER = 4.4;

export interface Layout {
  /** The middle of each drawn item. */
  centres: Map<Item, Point>;
  /** The room of each open scope, below its heading. */
  boxes: Map<Item, Box>;
  /** Where edges between children of one scope bend. */
  bends: Map<string, Point[]>;
}

/** A label in lines; long ones are broken anywhere. */
export function linesOf(label: string): string[] {
  return label.split("\n").flatMap((line) => {
    const parts: string[] = [];
    for (let at = 0; at < line.length; at += LETTERS) parts.push(line.slice(at, at + LETTERS));
    return parts.length ? parts : [""];
  });
}

/** The room that a label takes. */
export function boxOf(label: string): Box {
  const lines = linesOf(label);
  const widest = Math.max(8, ...lines.map((line) => line.length));
  return { width: 18 + widest * LETTER, height: 16 + lines.length * LINE };
}

/** The width of a name above an open scope, which is cut where it is longer. */
export function headingOf(name: string): number {
  return Math.min(name.length, LETTERS) * BOLD_LETTER;
}

/** The edges between two children of a scope, as one. */
interface InnerEdge {
  from: Item;
  to: Item;
  drawn: VisibleEdge[];
}

/** A scope as it is to be laid out, and what the numbers in the job mean. */
interface Inside {
  members: Item[];
  edges: InnerEdge[];
  layout?: ScopeLayout;
}

/** Layouts of scopes: most are as they were when one is opened. */
export type Known = Map<Item, { key: string; layout: ScopeLayout }>;

/**
 * Lays out what is visible. Scopes that hold no open ones are laid out first, beside each
 * other where `beside` is given: else one by one, here.
 */
export function* layOut(
  visible: Visible,
  root: Item,
  labels: (item: Item) => string,
  known: Known,
  beside?: (job: ScopeJob) => Promise<ScopeLayout>,
): Steps<Layout> {
  const scopes = new Map<Item, Inside>([[root, { members: [], edges: [] }]]);
  for (const scope of visible.open) scopes.set(scope, { members: [], edges: [] });
  const pause = every(100);
  for (const items of [visible.open, visible.leaves]) {
    for (const item of items) {
      if (pause()) yield 0;
      scopes.get(item.parent!)!.members.push(item);
    }
  }
  yield* edgesByScope(visible.edges, scopes);
  const sizes = new Map<Item, Box>();
  for (const leaf of visible.leaves) {
    if (pause()) yield 0;
    sizes.set(leaf, boxOf(labels(leaf)));
  }
  let done = 0;
  const keep = (scope: Item, key: string, layout: ScopeLayout): void => {
    known.set(scope, { key, layout });
    scopes.get(scope)!.layout = layout;
    sizes.set(scope, {
      width: Math.max(layout.size.width + 2 * PADDING, headingOf(labels(scope).split("\n")[0])),
      height: layout.size.height + 2 * PADDING + HEADING,
    });
    done += 1;
  };
  for (const wave of wavesOf([...visible.open].reverse().concat(root), scopes)) {
    const waiting: Promise<unknown>[] = [];
    for (const scope of wave) {
      yield done / scopes.size;
      const job = jobOf(scopes.get(scope)!, sizes);
      const key = JSON.stringify(job);
      const before = known.get(scope);
      if (before?.key === key) keep(scope, key, before.layout);
      else if (!beside) keep(scope, key, layOutScope(job));
      else waiting.push(beside(job).then((layout) => keep(scope, key, layout)));
    }
    for (const promise of waiting) {
      yield promise;
      yield done / scopes.size;
    }
  }
  return yield* placed(visible, root, scopes, sizes);
}

/** Scopes by how many open ones lie in each other in them: none, one, and so on. */
function wavesOf(innerFirst: Item[], scopes: Map<Item, Inside>): Item[][] {
  const levels = new Map<Item, number>();
  const waves: Item[][] = [];
  for (const scope of innerFirst) {
    let level = 0;
    for (const child of scopes.get(scope)!.members) {
      if (child.open) level = Math.max(level, levels.get(child)! + 1);
    }
    levels.set(scope, level);
    (waves[level] ??= []).push(scope);
  }
  return waves;
}

function jobOf({ members, edges }: Inside, sizes: Map<Item, Box>): ScopeJob {
  const numbers = new Map(members.map((member, at) => [member, at]));
  return {
    boxes: members.map((member) => sizes.get(member)!),
    edges: edges.map((edge) => [numbers.get(edge.from)!, numbers.get(edge.to)!, roomOf(edge)]),
  };
}

/** The room for what is written in the middle of an edge, in pixels. */
function roomOf({ from, to, drawn }: InnerEdge): number {
  const [edge] = drawn;
  return edge.source === from && edge.target === to ? edge.label.length * EDGE_LETTER : 0;
}

/** Edges by the scope that both ends lie in, between its children. */
function* edgesByScope(edges: VisibleEdge[], scopes: Map<Item, Inside>): Steps<void> {
  const found = new Map<Item, Map<Item, InnerEdge>>();
  const pause = every(100);
  for (const edge of edges) {
    if (pause()) yield 0;
    const [scope, from, to] = meeting(edge.source, edge.target);
    const targets = found.get(from) ?? new Map<Item, InnerEdge>();
    found.set(from, targets);
    const inner = targets.get(to);
    if (inner) {
      inner.drawn.push(edge);
      continue;
    }
    const made = { from, to, drawn: [edge] };
    targets.set(to, made);
    scopes.get(scope)!.edges.push(made);
  }
}

/** The innermost scope around two items, and its children that hold them. */
function meeting(a: Item, b: Item): [Item, Item, Item] {
  let [left, right] = [a, b];
  while (left.depth > right.depth) left = left.parent!;
  while (right.depth > left.depth) right = right.parent!;
  while (left.parent !== right.parent) {
    left = left.parent!;
    right = right.parent!;
  }
  return [left.parent!, left, right];
}

/** Turns places inside of scopes into places on the page. */
function* placed(
  visible: Visible,
  root: Item,
  scopes: Map<Item, Inside>,
  sizes: Map<Item, Box>,
): Steps<Layout> {
  const corners = new Map<Item, Point>([[root, { x: 0, y: 0 }]]);
  const layout: Layout = { centres: new Map(), boxes: new Map(), bends: new Map() };
  const pause = every(100);
  for (const scope of [root, ...visible.open]) {
    const corner = corners.get(scope)!;
    const { members, edges, layout: inside } = scopes.get(scope)!;
    for (let at = 0; at < members.length; at++) {
      if (pause()) yield 1;
      const child = members[at];
      const centre = moved(inside!.centres[at], corner);
      layout.centres.set(child, centre);
      if (!child.open) continue;
      const size = sizes.get(child)!;
      layout.boxes.set(child, { width: size.width, height: size.height - HEADING });
      layout.centres.set(child, { x: centre.x, y: centre.y + HEADING / 2 });
      corners.set(child, {
        x: centre.x - scopes.get(child)!.layout!.size.width / 2,
        y: centre.y - size.height / 2 + PADDING + HEADING,
      });
    }
    for (let at = 0; at < edges.length; at++) {
      if (pause()) yield 1;
      const [edge, ...others] = edges[at].drawn;
      // An edge that ends inside of an open child is drawn straight from there.
      if (others.length || edge.source.parent !== scope || edge.target.parent !== scope) continue;
      layout.bends.set(edge.key, inside!.bends[at].map((point) => moved(point, corner)));
    }
  }
  return layout;
}

function moved(point: Point, by: Point): Point {
  return { x: point.x + by.x, y: point.y + by.y };
}
