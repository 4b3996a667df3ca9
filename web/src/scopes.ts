// The hierarchy in which a graph is drawn: name scopes, and groups of what has names in
// common where a scope holds more than a person wants to see at once.

import type { Graph } from "./graph";
import type { Item } from "./items";
import { isNamed, unitsInOrder, type Unit } from "./order";
import { SAME, STATUS_NAMES } from "./payload";
import { scopesOf } from "./placement";

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
    const scopes = [this.root];
    for (const scope of scopes) {
      for (const child of scope.children) if (child.kind === "scope") scopes.push(child);
    }
    for (const scope of scopes) scope.children = grouped(scope, graph);
    this.number();
  }

  find(key: string): Item | undefined {
    return this.byKey.get(key);
  }

  /** All scopes and groups. */
  get scopes(): Item[] {
    return [...this.byKey.values()];
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
    for (const item of this.begun()) item.open = true;
  }

  /** The root, and in it the scopes that hold nearly all that is drawn. */
  begun(): Item[] {
    const drawn = ({ ops }: Item): number => ops.filter((op) => !this.graph.isParameter(op)).length;
    const found: Item[] = [];
    for (let at: Item | undefined = this.root; at; ) {
      found.push(at);
      const most: number = NEARLY_ALL * drawn(at);
      at = at.children.find((child) => child.kind === "scope" && drawn(child) >= most && most > 0);
    }
    return found;
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
    const scopes = scopesOf(this.graph);
    for (let op = 0; op < this.graph.size; op++) {
      const leaf = this.graph.name(op).split("/").pop()!;
      let scope = this.root;
      for (const part of scopes[op]) scope = this.child(scope, part);
      const made = item(`:${this.graph.name(op)}`, leaf, "op", scope);
      made.op = op;
      scope.children.push(made);
      this.ofOp[op] = made;
      const status = this.graph.status(op);
      for (let at: Item | null = made; at; at = at.parent) {
        at.ops.push(op);
        if (status !== SAME) at.changes[status] += 1;
      }
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

  /** Registers the groups, and tells how deep each item lies. */
  private number(): void {
    const waiting = [this.root];
    while (waiting.length) {
      const at = waiting.pop()!;
      if (at.parent) at.depth = at.parent.depth + 1;
      if (at.kind === "group") this.byKey.set(at.key, at);
      for (const child of at.children) waiting.push(child);
    }
  }
}

function item(key: string, label: string, kind: Item["kind"], parent: Item | null): Item {
  const changes = STATUS_NAMES.map(() => 0);
  return { key, label, kind, parent, children: [], op: -1, ops: [], changes, open: false, depth: 0 };
}

/** The children of a scope, in groups if they are many. */
function grouped(scope: Item, graph: Graph): Item[] {
  if (scope.children.length <= MANY) return scope.children;
  const units = unitsInOrder(scope.children, graph);
  const byName = groupedByName(scope, units, 0, graph);
  if (byName.length <= TOO_MANY) return byName;
  return groupedInOrder(scope, unitsInOrder(byName, graph), graph);
}

/** The members of a unit that give it its name: not its weights, nor what has a number. */
function nameGivers(unit: Unit, graph: Graph): Unit {
  const drawn = unit.filter((child) => isDrawn(child, graph));
  return (drawn.length ? drawn : unit).filter(isNamed);
}

function isDrawn({ ops }: Item, graph: Graph): boolean {
  return ops.some((op) => !graph.isParameter(op));
}

/** The beginning of a name, as far as some underscores. */
function beginning(label: string, depth: number): string {
  return label.split("_").slice(0, depth + 1).join("_");
}

/** How the names of all that give a unit its name begin; "" if they differ, or none does. */
function prefixOf(unit: Unit, depth: number, graph: Graph): string {
  const prefixes = nameGivers(unit, graph).map(({ label }) => beginning(label, depth));
  return prefixes.every((prefix) => prefix === prefixes[0]) ? (prefixes[0] ?? "") : "";
}

/**
 * Puts children whose names begin alike into groups: conv2_block1_conv and
 * conv2_block1_bn into conv2_*, and there into conv2_block1_*.
 *
 * Only those that follow one another along the edges: add_1 and add_2 may be anywhere, and
 * a group of them would tie the drawing into a knot.
 */
function groupedByName(parent: Item, units: Unit[], depth: number, graph: Graph): Item[] {
  const runs: { prefix: string; members: Unit[] }[] = [];
  for (const unit of units) {
    const prefix = prefixOf(unit, depth, graph);
    const last = runs.at(-1);
    if (last && last.prefix === prefix) last.members.push(unit);
    else runs.push({ prefix, members: [unit] });
  }
  const times = new Map<string, number>();
  for (const run of runs) times.set(run.prefix, (times.get(run.prefix) ?? 0) + 1);
  const goesOn = (members: Unit[], prefix: string): boolean =>
    members.some((unit) => nameGivers(unit, graph).some(({ label }) => label !== prefix));
  const [{ prefix: first }, ...others] = runs;
  if (!others.length && first && goesOn(units, first)) {
    return groupedByName(parent, units, depth + 1, graph);
  }
  return runs.flatMap(({ prefix, members }) => {
    const children = members.flat();
    const drawn = children.filter((child) => isDrawn(child, graph)).length;
    if (!prefix || drawn < 3 || times.get(prefix)! > 1) return children;
    const made = group(parent, `${prefix}_*`, children);
    const isLarge = members.length > 1 && children.length > MANY / 2;
    if (isLarge && goesOn(members, prefix)) {
      made.children = groupedByName(made, members, depth + 1, graph);
    }
    return [made];
  });
}

/** Puts neighbours into groups of about the same size, whatever they are called. */
function groupedInOrder(parent: Item, units: Unit[], graph: Graph): Item[] {
  const size = Math.ceil(Math.sqrt(units.flat().length));
  const portions: Item[][] = [[]];
  for (const unit of units) {
    if (portions.at(-1)!.length >= size) portions.push([]);
    for (const member of unit) portions.at(-1)!.push(member);
  }
  const taken = new Map<string, number>();
  return portions.map((members) => {
    const label = labelFor(members, graph);
    const times = (taken.get(label) ?? 0) + 1;
    taken.set(label, times);
    return group(parent, times > 1 ? `${label} (${times})` : label, members);
  });
}

/** By the names that a person may have chosen; without any, by the first type in it. */
function labelFor(members: Item[], graph: Graph): string {
  const named = members.filter(isNamed);
  const [first, last] = [named[0], named.at(-1)];
  if (first !== last) return `${first.label} … ${last!.label}`;
  if (first) return `around ${first.label}`;
  return `${graph.type(members[0].ops[0])} at ${members[0].label}`;
}

function group(parent: Item, label: string, members: Item[]): Item {
  const made = item(`${parent.key}/{${label}}`, label, "group", parent);
  made.children = members;
  for (const member of members) {
    member.parent = made;
    for (const op of member.ops) made.ops.push(op);
    member.changes.forEach((count, status) => (made.changes[status] += count));
  }
  return made;
}
