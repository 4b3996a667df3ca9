// What is drawn of a hierarchy in which some scopes are open, and the edges between.
// It is found in steps: see steps.ts.

import type { Graph } from "./graph";
import type { Item } from "./items";
import type { Hierarchy } from "./scopes";
import { every, type Steps } from "./steps";

export interface VisibleEdge {
  key: string;
  source: Item;
  target: Item;
  /** How many tensors go along it; 0 if it only keeps the order. */
  tensors: number;
  /** What the tensor holds, where there is one. */
  label: string;
}

export interface Visible {
  /** Closed scopes and ops: what has no drawn children. */
  leaves: Item[];
  /** Open scopes, outer ones first, without the root. */
  open: Item[];
  edges: VisibleEdge[];
}

export class Choice {
  constructor(
    private readonly graph: Graph,
    public parameters: boolean,
  ) {}

  /** Whether an item is drawn at all, when what it lies in is open. */
  shows(item: Item): boolean {
    if (this.parameters) return true;
    return item.ops.some((op) => !this.hides(op));
  }

  hides(op: number): boolean {
    return !this.parameters && this.graph.isParameter(op);
  }
}

export function* visibleOf(hierarchy: Hierarchy, choice: Choice): Steps<Visible> {
  const { graph, root } = hierarchy;
  const leaves: Item[] = [];
  const open: Item[] = [];
  const leafOf = new Array<Item | undefined>(graph.size);
  const waiting = [root];
  const pause = every(100);
  while (waiting.length) {
    if (pause()) yield 0;
    const at = waiting.pop()!;
    if (at !== root && !choice.shows(at)) continue;
    if (at.open) {
      if (at !== root) open.push(at);
      for (let i = at.children.length - 1; i >= 0; i--) waiting.push(at.children[i]);
    } else {
      leaves.push(at);
      for (const op of at.ops) leafOf[op] = at;
    }
  }
  return { leaves, open, edges: yield* edgesBetween(graph, choice, leafOf) };
}

function* edgesBetween(
  graph: Graph,
  choice: Choice,
  leafOf: (Item | undefined)[],
): Steps<VisibleEdge[]> {
  const found = new Map<string, VisibleEdge>();
  // A tensor that many ops of a closed scope read goes there once.
  const told = new Map<VisibleEdge, Set<string>>();
  const add = (from: number, op: number, output: number | null): void => {
    const source = leafOf[from];
    const target = leafOf[op];
    if (!source || !target || source === target) return;
    const key = `${source.key}\n${target.key}`;
    let edge = found.get(key);
    if (!edge) {
      edge = { key, source, target, tensors: 0, label: "" };
      found.set(key, edge);
      told.set(edge, new Set());
    }
    const tensor = `${from}:${output}`;
    if (output === null || told.get(edge)!.has(tensor)) return;
    told.get(edge)!.add(tensor);
    edge.tensors += 1;
    edge.label =
      edge.tensors === 1 ? graph.data.outputs[from][output] : `${edge.tensors} tensors`;
  };
  const pause = every(100);
  for (let op = 0; op < graph.size; op++) {
    if (pause()) yield 0;
    if (choice.hides(op)) continue;
    for (const read of graph.inputs(op)) {
      if (!choice.hides(read.op)) add(read.op, op, read.output);
    }
    for (const before of graph.data.controls[op]) {
      if (!choice.hides(before)) add(before, op, null);
    }
  }
  return [...found.values()];
}
