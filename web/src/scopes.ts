// The hierarchy in which a graph is drawn: name scopes, and groups of what has names in
// common where a scope holds more than a person wants to see at once.

import type { Graph } from "./graph";
import { SAME, STATUS_NAMES } from "./payload";

export interface Item {
  /** What it is known by: the path of a scope, or the name of an op behind a colon. */
  key: string;
  label: string;
  kind: "op" | "scope" | "group";
  parent: Item | null;
  children: Item[];
  /** The op that it is; -1 for scopes and groups. */
  op: number;
  /** All ops in it. */
  ops: number[];
  /** How many of its ops were added, removed, rewired: by status. */
  changes: number[];
  open: boolean;
}

/** More children than these are put into groups, where names suggest some. */
const MANY = 24;
/** More than these are put into groups in any case, in the order of the graph. */
const TOO_MANY = 300;
/** A scope with this share of the ops is the network itself. */
const NEARLY_ALL = 0.7;

export class Hierarchy {
  readonly root: Item;
  private readonly byKey = new Map<string, Item>();
  private readonly ofOp: Item[];

  constructor(readonly graph: Graph) {
    this.root = item("", "", "scope", null);
    this.ofOp = new Array<Item>(graph.size);
    this.addOps();
    const waiting = [this.root];
    while (waiting.length) {
      const scope = waiting.pop()!;
      scope.children = grouped(scope);
      waiting.push(...scope.children.filter((child) => child.kind === "scope"));
    }
    this.count();
  }

  find(key: string): Item | undefined {
    return this.byKey.get(key);
  }

  itemOf(op: number): Item {
    return this.ofOp[op];
  }

  /** Opens all that an item lies in; returns whether anything was closed. */
  reveal(wanted: Item): boolean {
    let changed = false;
    for (let at = wanted.parent; at; at = at.parent) {
      changed ||= !at.open;
      at.open = true;
    }
    return changed;
  }

  /** Opens what is open at first: the root, and in it what holds nearly everything. */
  begin(): void {
    for (let at: Item | undefined = this.root; at; ) {
      at.open = true;
      const most: number = NEARLY_ALL * at.ops.length;
      at = at.children.find((child) => child.kind === "scope" && child.ops.length >= most);
    }
  }

  /** Opens scopes that hold a single thing, which says nothing closed. */
  open(wanted: Item): void {
    for (let at = wanted; ; at = at.children[0]) {
      at.open = true;
      if (at.children.length !== 1 || at.children[0].kind === "op") return;
    }
  }

  close(wanted: Item): void {
    const waiting = [wanted];
    while (waiting.length) {
      const at = waiting.pop()!;
      at.open = at === this.root;
      waiting.push(...at.children);
    }
  }

  private addOps(): void {
    for (let op = 0; op < this.graph.size; op++) {
      const parts = this.graph.name(op).split("/");
      const leaf = parts.pop()!;
      let scope = this.root;
      for (const part of parts) scope = this.child(scope, part);
      const made = item(`:${this.graph.name(op)}`, leaf, "op", scope);
      made.op = op;
      scope.children.push(made);
      this.ofOp[op] = made;
    }
  }

  private child(scope: Item, part: string): Item {
    const key = scope.key ? `${scope.key}/${part}` : part;
    let found = this.byKey.get(key);
    if (!found) {
      found = item(key, part, "scope", scope);
      this.byKey.set(key, found);
      scope.children.push(found);
    }
    return found;
  }

  /** Fills in what each item holds, and registers the groups. */
  private count(): void {
    for (let op = 0; op < this.graph.size; op++) {
      const status = this.graph.status(op);
      for (let at: Item | null = this.ofOp[op]; at; at = at.parent) {
        at.ops.push(op);
        if (status !== SAME) at.changes[status] += 1;
        if (at.kind === "group") this.byKey.set(at.key, at);
      }
    }
  }
}

function item(key: string, label: string, kind: Item["kind"], parent: Item | null): Item {
  const rest = { children: [], op: -1, ops: [], changes: STATUS_NAMES.map(() => 0), open: false };
  return { key, label, kind, parent, ...rest };
}

/** The children of a scope, in groups if they are many. */
function grouped(scope: Item): Item[] {
  if (scope.children.length <= MANY) return scope.children;
  const byName = groupedByName(scope, scope.children, 0);
  return byName.length <= TOO_MANY ? byName : groupedInOrder(scope, byName);
}

/**
 * Puts children whose names begin alike into groups: conv2_block1_conv and
 * conv2_block1_bn into conv2_*, and there into conv2_block1_*.
 *
 * Only those that follow one another in the graph: add_1 and add_2 may be anywhere, and
 * a group of them would tie the drawing into a knot.
 */
function groupedByName(parent: Item, children: Item[], depth: number): Item[] {
  const runs: { prefix: string; members: Item[] }[] = [];
  for (const child of children) {
    const prefix = child.label.split("_").slice(0, depth + 1).join("_");
    const last = runs.at(-1);
    if (last && last.prefix === prefix) last.members.push(child);
    else runs.push({ prefix, members: [child] });
  }
  const times = new Map<string, number>();
  for (const run of runs) times.set(run.prefix, (times.get(run.prefix) ?? 0) + 1);
  if (runs.length === 1 && children.some((child) => child.label !== runs[0].prefix)) {
    return groupedByName(parent, children, depth + 1);
  }
  return runs.flatMap(({ prefix, members }) => {
    if (members.length < 3 || times.get(prefix)! > 1) return members;
    const made = group(parent, `${prefix}_*`, members);
    if (members.length > MANY / 2 && members.some((member) => member.label !== prefix)) {
      made.children = groupedByName(made, members, depth + 1);
    }
    return [made];
  });
}

/** Puts children into groups of the same size, whatever they are called. */
function groupedInOrder(parent: Item, children: Item[]): Item[] {
  const size = Math.ceil(Math.sqrt(children.length));
  const groups: Item[] = [];
  for (let start = 0; start < children.length; start += size) {
    const members = children.slice(start, start + size);
    const label = `${members[0].label} … ${members.at(-1)!.label}`;
    groups.push(group(parent, label, members));
  }
  return groups;
}

function group(parent: Item, label: string, members: Item[]): Item {
  const made = item(`${parent.key}/{${label}}`, label, "group", parent);
  made.children = members;
  for (const member of members) member.parent = made;
  return made;
}
