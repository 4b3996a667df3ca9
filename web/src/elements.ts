// What is drawn as cytoscape takes it: labels, colours, places, bends.

import type { ElementDefinition } from "cytoscape";

import { colourOf, noiseColour, precisionColour, STATUS_COLOURS } from "./colours";
import type { Graph } from "./graph";
import { boxOf, headingOf, type Layout } from "./layout";
import { ADDED, ALTERED, FUSED, REMOVED, REWIRED, SAME } from "./payload";
import type { Item } from "./scopes";
import type { Visible, VisibleEdge } from "./visible";

export function elementsOf(
  visible: Visible,
  layout: Layout,
  graph: Graph,
): ElementDefinition[] {
  // Outer scopes come first, so that inner ones are drawn upon them. They are nodes like
  // others: as parents of nodes, they would be measured again at every step.
  const nodes = [...visible.open, ...visible.leaves].map((item) => ({
    group: "nodes" as const,
    data: { id: item.key, ...looks(item, graph), ...openLooks(item, graph, layout) },
    scratch: { item },
    classes: `${item.kind} ${item.open ? "open" : "closed"}`,
    position: { ...layout.centres.get(item)! },
  }));
  const edges = visible.edges.map((edge) => edgeElement(edge, layout));
  return [...nodes, ...edges];
}

function looks(item: Item, graph: Graph): Record<string, unknown> {
  const label = labelOf(item, graph);
  const box = boxOf(label);
  const common = { width: box.width, height: box.height, border: border(item, graph), label };
  const colour = item.kind === "op" ? opColour(item.op, graph) : scopeColour(item, graph);
  return { ...common, colour };
}

function opColour(op: number, graph: Graph): string {
  if (graph.data.noises) return noiseColour(graph.noise(op));
  const precision = graph.precision(op);
  return precision ? precisionColour(precision) : colourOf(graph.type(op));
}

/** The colour of the noisiest op in it, where noise is told; else of what it computes in. */
function scopeColour(item: Item, graph: Graph): string {
  if (!graph.data.noises) return precisionOfScope(item, graph);
  const noises = item.ops.map((op) => graph.noise(op)).filter((noise) => noise >= 0);
  return noises.length ? noiseColour(Math.min(...noises)) : "#eef2f7";
}

/** The colour of what computes in floats, if a scope of a mixed file holds any. */
function precisionOfScope(item: Item, graph: Graph): string {
  const names = graph.data.precisionNames ?? [];
  if (!names.some((name) => /^u?int(2|4|8|16)\b(?! to)/.test(name))) return "#eef2f7";
  return item.ops.some((op) => isFloat(graph.precision(op))) ? "#fbe3d6" : "#eef2f7";
}

function isFloat(precision: string): boolean {
  return precision.startsWith("float") && !precision.includes(" to ");
}

/** The size of an open scope; its label stands at the left, where edges seldom enter. */
function openLooks(item: Item, graph: Graph, layout: Layout): Record<string, number> {
  const box = layout.boxes.get(item);
  if (!box) return {};
  return { ...box, shift: (headingOf(labelOf(item, graph)) - box.width) / 2 };
}

/** What is written on an item that is closed, or above it when it is open. */
export function labelOf(item: Item, graph: Graph): string {
  if (item.kind === "op") {
    return `${graph.data.ends[item.op] ?? item.label}\n${graph.type(item.op)}`;
  }
  return `${item.label}  (${changesText(item) || item.ops.length})`;
}

function changesText(item: Item): string {
  const signs: [number, string][] = [
    [ADDED, "+"],
    [REMOVED, "−"],
    [REWIRED, "~"],
    [ALTERED, "!"],
    [FUSED, "&"],
  ];
  return signs
    .filter(([status]) => item.changes[status])
    .map(([status, sign]) => `${sign}${item.changes[status]}`)
    .join(" ");
}

/** The colour of the most telling change in it. */
function border(item: Item, graph: Graph): string {
  if (item.kind === "op") {
    const status = graph.status(item.op);
    return status === SAME ? "#8a94a6" : STATUS_COLOURS[status];
  }
  for (const status of [REMOVED, ADDED, REWIRED, ALTERED, FUSED]) {
    if (item.changes[status]) return STATUS_COLOURS[status];
  }
  return "#8a94a6";
}

function edgeElement(edge: VisibleEdge, layout: Layout): ElementDefinition {
  const bent = bending(edge, layout);
  return {
    group: "edges",
    data: {
      id: `edge\n${edge.key}`,
      source: edge.source.key,
      target: edge.target.key,
      label: edge.label,
      width: Math.min(1 + Math.log2(Math.max(edge.tensors, 1)), 4),
      ...bent,
    },
    classes: [
      edge.tensors ? "data" : "control",
      bent ? "bent" : "straight",
      edge.source.parent === edge.target.parent ? "within" : "across",
    ].join(" "),
  };
}

/** Bends as cytoscape takes them: along the line between the ends, and off it. */
function bending(
  edge: VisibleEdge,
  layout: Layout,
): { weights: string; distances: string } | null {
  const points = layout.bends.get(edge.key);
  if (!points?.length) return null;
  const from = layout.centres.get(edge.source)!;
  const to = layout.centres.get(edge.target)!;
  const along = { x: to.x - from.x, y: to.y - from.y };
  const length = Math.hypot(along.x, along.y);
  if (length < 1) return null;
  const weights = points.map(
    (p) => ((p.x - from.x) * along.x + (p.y - from.y) * along.y) / length ** 2,
  );
  const distances = points.map(
    (p) => ((p.y - from.y) * along.x - (p.x - from.x) * along.y) / length,
  );
  return { weights: weights.map(short).join(" "), distances: distances.map(short).join(" ") };
}

function short(value: number): string {
  return value.toFixed(3);
}
