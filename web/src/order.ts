// The order of the children of a scope along the edges between them. Neighbours in it may
// be put into groups without a cycle among the groups.

import type { Graph } from "./graph";
import type { Item } from "./items";

/** Children that stay together: one and its weights, or several in a cycle. */
export type Unit = Item[];

/** Names that a tracer gives: they say nothing, and neighbours in number are no kin. */
const NUMBERED = /^(\d+|(keras_tensor|[Pp]laceholder|unknown|args?|inputs?|Const)(_\d+)*)$/;

/** Whether a person may have chosen the name of an item. */
export function isNamed({ label }: Item): boolean {
  return !NUMBERED.test(label);
}

/**
 * Returns the children in an order in which each comes behind what it reads; of those that
 * could come next, one that a person named, or else the first of the graph. Weights come before their first reader, and
 * children that read each other, as the scopes of a loop do, are one unit.
 */
export function unitsInOrder(children: Item[], graph: Graph): Unit[] {
  const place = new Map<number, number>();
  children.forEach((child, at) => child.ops.forEach((op) => place.set(op, at)));
  const readers = children.map(() => new Set<number>());
  for (const [op, at] of place) {
    // The edge back of a loop says nothing about the order.
    if (graph.type(op) === "NextIteration") continue;
    for (const consumer of graph.consumers[op]) {
      const to = place.get(consumer);
      if (to !== undefined && to !== at) readers[at].add(to);
    }
  }
  const components = strongComponents(readers.map((set) => [...set]));
  const ordered = topological(components, readers, children.map(isNamed));
  return withWeights(ordered, components, children, readers, graph);
}

/** For each vertex the smallest one that it shares a cycle with (Tarjan, without recursion). */
export function strongComponents(edges: number[][]): number[] {
  const count = edges.length;
  const index = new Array<number>(count).fill(-1);
  const low = new Array<number>(count).fill(0);
  const onStack = new Array<boolean>(count).fill(false);
  const component = new Array<number>(count).fill(-1);
  const stack: number[] = [];
  let next = 0;
  for (let root = 0; root < count; root++) {
    if (index[root] >= 0) continue;
    const path: [number, number][] = [[root, 0]];
    while (path.length) {
      const top = path[path.length - 1];
      const [at, edge] = top;
      if (edge === 0) {
        index[at] = low[at] = next++;
        stack.push(at);
        onStack[at] = true;
      }
      if (edge < edges[at].length) {
        top[1] += 1;
        const to = edges[at][edge];
        if (index[to] < 0) path.push([to, 0]);
        else if (onStack[to]) low[at] = Math.min(low[at], index[to]);
        continue;
      }
      path.pop();
      const above = path.at(-1);
      if (above) low[above[0]] = Math.min(low[above[0]], low[at]);
      if (low[at] !== index[at]) continue;
      const members = stack.splice(stack.lastIndexOf(at));
      const first = least(members);
      for (const member of members) {
        component[member] = first;
        onStack[member] = false;
      }
    }
  }
  return component;
}

/** The components in topological order: of those that are ready, named ones first. */
function topological(
  components: number[],
  readers: Set<number>[],
  named: boolean[],
): number[] {
  const after = new Map<number, Set<number>>();
  const waitsFor = new Map<number, number>();
  for (const component of components) {
    after.set(component, new Set());
    waitsFor.set(component, 0);
  }
  readers.forEach((targets, from) => {
    for (const to of targets) {
      const [a, b] = [components[from], components[to]];
      if (a === b || after.get(a)!.has(b)) continue;
      after.get(a)!.add(b);
      waitsFor.set(b, waitsFor.get(b)! + 1);
    }
  });
  const ready = new Heap();
  const count = components.length;
  const add = (component: number): void =>
    ready.push(named[component] ? component : component + count);
  for (const [component, waits] of waitsFor) if (!waits) add(component);
  const ordered: number[] = [];
  for (let first = ready.pop(); first !== undefined; first = ready.pop()) {
    const at = first % count;
    ordered.push(at);
    for (const to of after.get(at)!) {
      waitsFor.set(to, waitsFor.get(to)! - 1);
      if (!waitsFor.get(to)) add(to);
    }
  }
  return ordered;
}

/** Puts weights, which read nothing, before what reads them first. */
function withWeights(
  ordered: number[],
  components: number[],
  children: Item[],
  readers: Set<number>[],
  graph: Graph,
): Unit[] {
  const members = new Map<number, number[]>(ordered.map((component) => [component, []]));
  components.forEach((component, at) => members.get(component)!.push(at));
  const position = new Map(ordered.map((component, at) => [component, at]));
  const unitOf = ordered.map((_, at) => at);
  // Backwards, so that weights of weights go along.
  for (let at = ordered.length - 1; at >= 0; at--) {
    const inside = members.get(ordered[at])!;
    const targets = inside.flatMap((child) =>
      [...readers[child]].map((to) => position.get(components[to])!),
    );
    const reads = targets.filter((to) => to > at).map((to) => unitOf[to]);
    const isWeight = inside.every((c) => children[c].ops.every((op) => graph.isParameter(op)));
    if (isWeight && reads.length) unitOf[at] = least(reads);
  }
  const units = new Map<number, Unit>();
  ordered.forEach((component, at) => {
    const unit = units.get(unitOf[at]) ?? [];
    units.set(unitOf[at], unit);
    for (const child of members.get(component)!) unit.push(children[child]);
  });
  return [...units].sort(([a], [b]) => a - b).map(([, unit]) => unit);
}

function least(values: number[]): number {
  return values.reduce((a, b) => Math.min(a, b));
}

/** Numbers, of which the smallest comes first. */
class Heap {
  private readonly items: number[] = [];

  push(value: number): void {
    const { items } = this;
    let at = items.push(value) - 1;
    while (at > 0) {
      const up = (at - 1) >> 1;
      if (items[up] <= value) break;
      items[at] = items[up];
      at = up;
    }
    items[at] = value;
  }

  pop(): number | undefined {
    const { items } = this;
    const first = items[0];
    const value = items.pop();
    if (!items.length || value === undefined) return first;
    let at = 0;
    for (;;) {
      let down = 2 * at + 1;
      if (down >= items.length) break;
      if (down + 1 < items.length && items[down + 1] < items[down]) down += 1;
      if (items[down] >= value) break;
      items[at] = items[down];
      at = down;
    }
    items[at] = value;
    return first;
  }
}
