// What items look like: labels and colours.

import {
  colourOf,
  FLOAT_SCOPE,
  GROUP,
  heldColour,
  noiseColour,
  PLAIN,
  precisionColour,
  STATUS_COLOURS,
} from "./colours";
import type { Graph } from "./graph";
import { ADDED, ALTERED, FUSED, REMOVED, REWIRED, SAME, STATUS_NAMES } from "./payload";
import type { Item } from "./items";

/** What is written on an item that is closed, or above it when it is open. */
export function labelOf(item: Item, graph: Graph): string {
  if (item.kind === "op") {
    return `${graph.data.ends[item.op] ?? item.label}\n${graph.type(item.op)}`;
  }
  return [item.label, ...countLines(item, graph)].join("\n");
}

/** How many ops a scope holds, and how many of them changed; two kinds of changes a line. */
function countLines(item: Item, graph: Graph): string[] {
  const changed = [ADDED, REMOVED, REWIRED, ALTERED, FUSED]
    .filter((status) => item.changes[status])
    .map((status) => `${item.changes[status]} ${STATUS_NAMES[status]}`);
  const lines = [graph.countText(item.ops)];
  for (let at = 0; at < changed.length; at += 2) lines.push(changed.slice(at, at + 2).join(", "));
  return lines;
}

/** The colour that an item is filled with. */
export function fillOf(item: Item, graph: Graph): string {
  if (graph.held) return heldColour(item.ops.reduce((sum, op) => sum + graph.held![op], 0));
  return item.kind === "op" ? opColour(item.op, graph) : scopeColour(item, graph);
}

function opColour(op: number, graph: Graph): string {
  if (graph.data.noises) return noiseColour(graph.noise(op));
  const precision = graph.precision(op);
  return precision ? precisionColour(precision) : colourOf(graph.type(op));
}

/** The colour of the noisiest op in it, where noise is told; else of what it computes in. */
function scopeColour(item: Item, graph: Graph): string {
  if (!graph.data.noises) return precisionOfScope(item, graph);
  let worst = -1;
  for (const op of item.ops) {
    const noise = graph.noise(op);
    if (noise >= 0 && (worst < 0 || noise < worst)) worst = noise;
  }
  return worst < 0 ? GROUP : noiseColour(worst);
}

/** The colour of what computes in floats, if a scope of a mixed file holds any. */
function precisionOfScope(item: Item, graph: Graph): string {
  const names = graph.data.precisionNames ?? [];
  if (!names.some((name) => /^u?int(2|4|8|16)\b(?! to)/.test(name))) return GROUP;
  return item.ops.some((op) => isFloat(graph.precision(op))) ? FLOAT_SCOPE : GROUP;
}

function isFloat(precision: string): boolean {
  return precision.startsWith("float") && !precision.includes(" to ");
}

/** The colour of the most telling change in it. */
export function borderOf(item: Item, graph: Graph): string {
  if (item.kind === "op") {
    const status = graph.status(item.op);
    return status === SAME ? PLAIN : STATUS_COLOURS[status];
  }
  for (const status of [REMOVED, ADDED, REWIRED, ALTERED, FUSED]) {
    if (item.changes[status]) return STATUS_COLOURS[status];
  }
  return PLAIN;
}
