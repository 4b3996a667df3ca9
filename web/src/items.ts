// An item of the hierarchy in which a graph is drawn: an op, a scope, or a group.

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
  /** How many items it lies in. */
  depth: number;
}
