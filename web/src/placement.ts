// The scopes that ops are drawn in: those of their names, but for ops that would tie
// scopes into a cycle, such as ops inserted behind a layer under its name. As few as can
// be are drawn elsewhere: in the scope of what they read, or of what reads them.

import type { Graph } from "./graph";
import { strongComponents } from "./order";

/** Returns for each op the scopes that it lies in, outer ones first. */
export function scopesOf(graph: Graph): string[][] {
  const paths = graph.data.names.map((name) => name.split("/").slice(0, -1));
  const placement = new Placement(graph, paths);
  const waiting = [{ ops: paths.map((_, op) => op), depth: 0 }];
  while (waiting.length) {
    const { ops, depth } = waiting.pop()!;
    let children = childrenOf(ops, depth, paths);
    if (children.length > 1 && placement.untie(children, depth)) {
      children = childrenOf(ops, depth, paths);
    }
    for (const child of children) {
      if (child.label !== null && child.ops.length > 1) waiting.push({ ops: child.ops, depth: depth + 1 });
    }
  }
  return paths;
}

/** A scope or an op in a scope; an op has no label. */
interface Child {
  label: string | null;
  ops: number[];
}

function childrenOf(ops: number[], depth: number, paths: string[][]): Child[] {
  const scopes = new Map<string, Child>();
  const children: Child[] = [];
  for (const op of ops) {
    const label = paths[op][depth] ?? null;
    const known = label === null ? undefined : scopes.get(label);
    if (known) {
      known.ops.push(op);
      continue;
    }
    const made = { label, ops: [op] };
    if (label !== null) scopes.set(label, made);
    children.push(made);
  }
  return children;
}

class Placement {
  /** The child that each op of the scope, or of the ring, at hand lies in; -1 of others. */
  private readonly childOf: Int32Array;
  private readonly readers: number[][];
  private readonly reads: number[][];
  /** Ops that are no longer in the scope of their name: any scope will do for them. */
  private readonly moved = new Set<number>();

  constructor(
    private readonly graph: Graph,
    private readonly paths: string[][],
  ) {
    this.childOf = new Int32Array(graph.size).fill(-1);
    // The edge back of a loop is the loop's, not that of its parts.
    this.readers = graph.consumers.map((all, op) => (graph.type(op) === "NextIteration" ? [] : all));
    this.reads = this.readers.map(() => []);
    this.readers.forEach((all, op) => all.forEach((reader) => this.reads[reader].push(op)));
  }

  /** Moves ops until no children of a scope read each other; returns whether any did. */
  untie(children: Child[], depth: number): boolean {
    const { childOf } = this;
    children.forEach(({ ops }, at) => ops.forEach((op) => (childOf[op] = at)));
    const edges = children.map(({ ops }, at) => {
      const targets = ops.flatMap((op) => this.readers[op].map((reader) => childOf[reader]));
      return [...new Set(targets)].filter((to) => to >= 0 && to !== at);
    });
    const rings = new Map<number, Child[]>();
    strongComponents(edges).forEach((first, at) => {
      rings.set(first, [...(rings.get(first) ?? []), children[at]]);
    });
    children.forEach(({ ops }) => ops.forEach((op) => (childOf[op] = -1)));
    const tied = [...rings.values()].filter((ring) => ring.length > 1);
    for (const ring of tied) {
      ring.forEach(({ ops }, at) => ops.forEach((op) => (childOf[op] = at)));
      this.untieRing(ring, depth);
      ring.forEach(({ ops }) => ops.forEach((op) => (childOf[op] = -1)));
    }
    return tied.length > 0;
  }

  /** Puts the scopes of a ring in an order, and each op into one at or behind all it reads. */
  private untieRing(ring: Child[], depth: number): void {
    const sources = this.sourcesOf(ring);
    const { ordered, depths } = this.orderOf(ring, sources);
    const isKept = ({ label, ops }: Child): boolean => label !== null && ops.some((op) => !this.moved.has(op));
    const named = [...ring.keys()].filter((at) => ring[at].label !== null);
    const kept = named.filter((at) => isKept(ring[at]));
    const scopes = kept.length ? kept : named;
    // Where the first quarter of a scope ends: single ops may come early, and ops that were
    // inserted late, without telling where a layer is.
    const begins = ring.map(({ ops }) => {
      const own = ops.flatMap((op) => depths.get(op) ?? []).sort((a, b) => a - b);
      return own[(own.length - 1) >> 2] ?? Infinity;
    });
    scopes.sort((a, b) => begins[a] - begins[b] || a - b);
    const rank = new Map(scopes.map((at, place) => [at, place]));
    const isFree = (op: number): boolean => kept.length > 0 && this.moved.has(op);
    const own = (op: number): number => (isFree(op) ? -1 : (rank.get(this.childOf[op]) ?? -1));
    const places = this.placesOf(ordered, own, scopes.length);
    const move = (op: number, place: number): void => {
      this.moved.add(op);
      this.paths[op].splice(depth, 0, ring[scopes[place]].label!);
    };
    this.placeSources(sources, places, own);
    for (const [op, place] of places) if (rank.get(this.childOf[op]) !== place) move(op, place);
  }

  /** Weights, and ops in no scope, that read nothing else in the ring. */
  private sourcesOf(ring: Child[]): Set<number> {
    const { childOf, graph } = this;
    const found = new Set<number>();
    const waiting = ring.flatMap(({ ops }) => ops);
    // The list grows while it is gone through.
    for (const op of waiting) {
      const isLoose = graph.isParameter(op) || ring[childOf[op]].label === null;
      const reads = this.reads[op].every((source) => childOf[source] < 0 || found.has(source));
      if (found.has(op) || !isLoose || !reads) continue;
      found.add(op);
      for (const reader of this.readers[op]) if (childOf[reader] >= 0) waiting.push(reader);
    }
    return found;
  }

  /** The other ops, each behind what it reads, and how many lie before each at the most. */
  private orderOf(ring: Child[], sources: Set<number>): { ordered: number[]; depths: Map<number, number> } {
    const { childOf } = this;
    const isIn = (op: number): boolean => childOf[op] >= 0 && !sources.has(op);
    const ops = ring.flatMap((child) => child.ops).filter(isIn);
    const waits = new Map(ops.map((op) => [op, this.reads[op].filter(isIn).length]));
    const depths = new Map<number, number>();
    // What is in a cycle of ops is left as it is.
    const ordered = ops.filter((op) => !waits.get(op));
    for (const op of ordered) {
      const before = this.reads[op].filter(isIn).map((source) => depths.get(source)!);
      depths.set(op, before.reduce((most, one) => Math.max(most, one + 1), 0));
      for (const reader of this.readers[op].filter(isIn)) {
        waits.set(reader, waits.get(reader)! - 1);
        if (!waits.get(reader)) ordered.push(reader);
      }
    }
    return { ordered, depths };
  }

  /**
   * Returns the place of each op among scopes in their order. Half of the scopes at a time
   * is parted from the other, by a minimum cut: fewest ops change sides.
   */
  private placesOf(ordered: number[], own: (op: number) => number, count: number): Map<number, number> {
    const places = new Map<number, number>();
    const waiting = [{ ops: ordered, from: 0, to: count }];
    while (waiting.length) {
      const { ops, from, to } = waiting.pop()!;
      if (to - from < 2) {
        for (const op of ops) places.set(op, from);
        continue;
      }
      const middle = (from + to) >> 1;
      const low = lowSide(ops, this.reads, (op) => {
        const place = own(op);
        return place < from || place >= to ? FREE : place < middle ? LOW : HIGH;
      });
      waiting.push({ ops: ops.filter((op) => low.has(op)), from, to: middle });
      waiting.push({ ops: ops.filter((op) => !low.has(op)), from: middle, to });
    }
    return places;
  }

  /** Sources go along with their first reader, where that moved or comes before them. */
  private placeSources(sources: Set<number>, places: Map<number, number>, ownOf: (op: number) => number): void {
    const { childOf } = this;
    const waits = new Map<number, number>();
    for (const op of sources) {
      waits.set(op, this.readers[op].filter((reader) => sources.has(reader)).length);
    }
    const ready = [...sources].filter((op) => !waits.get(op));
    for (const op of ready) {
      for (const source of this.reads[op]) {
        if (!sources.has(source)) continue;
        waits.set(source, waits.get(source)! - 1);
        if (!waits.get(source)) ready.push(source);
      }
      const own = ownOf(op);
      const known = this.readers[op].map((reader) => places.get(reader)).filter((at) => at !== undefined);
      const first = Math.min(...known, own < 0 ? Infinity : own);
      const goesAlong = this.readers[op].every(
        (reader) => childOf[reader] === childOf[op] && places.get(reader) !== own,
      );
      const place = goesAlong && known.length ? Math.min(...known) : first;
      if (place !== Infinity) places.set(op, place);
    }
  }
}

const [LOW, HIGH, FREE] = [0, 1, 2];

/**
 * Parts ops into a low and a high side, so that no low one reads a high one and fewest
 * change sides: a maximum flow along reads, from low ops to high ones (Ford and Fulkerson
 * 1956). Of several such cuts, the one with the smallest low side: readers move behind
 * what they read. Ops that are free join what they read.
 */
function lowSide(ops: number[], reads: number[][], sideOf: (op: number) => number): Set<number> {
  const sides = new Map(ops.map((op) => [op, sideOf(op)]));
  /** How much flows from each op to what it reads, and the other way round. */
  const flows = new Map<number, Map<number, number>>();
  const full = new Set<number>();
  // What reaches no high op is low; no later flow comes there.
  const low = new Set<number>();
  for (const start of ops) {
    if (sides.get(start) !== LOW || low.has(start)) continue;
    const cameFrom = new Map([[start, -1]]);
    const waiting = [start];
    let end = -1;
    for (let at = 0; at < waiting.length && end < 0; at++) {
      const op = waiting[at];
      if (low.has(op)) continue;
      if (sides.get(op) === HIGH && !full.has(op)) {
        end = op;
        break;
      }
      for (const next of [...reads[op], ...(flows.get(op)?.keys() ?? [])]) {
        if (!sides.has(next) || cameFrom.has(next)) continue;
        cameFrom.set(next, op);
        waiting.push(next);
      }
    }
    if (end < 0) {
      for (const op of cameFrom.keys()) low.add(op);
      continue;
    }
    full.add(end);
    for (let op = end; cameFrom.get(op)! >= 0; op = cameFrom.get(op)!) send(flows, cameFrom.get(op)!, op);
  }
  for (const op of ops) {
    const own = reads[op].filter((source) => sides.has(source));
    if (sides.get(op) === FREE && own.every((source) => low.has(source))) low.add(op);
  }
  return low;
}

/** Sends one more from an op to another: back what flowed the other way, if anything did. */
function send(flows: Map<number, Map<number, number>>, from: number, to: number): void {
  const back = flows.get(from);
  const count = back?.get(to) ?? 0;
  if (count > 1) back!.set(to, count - 1);
  else if (count) back!.delete(to);
  else {
    const ahead = flows.get(to) ?? new Map<number, number>();
    flows.set(to, ahead.set(from, (ahead.get(from) ?? 0) + 1));
  }
}
