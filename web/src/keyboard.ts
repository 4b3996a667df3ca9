// A drawing by keys: arrows go along edges.

import type { Drawing } from "./drawing";
import { centre, type SceneNode } from "./scene";

const HINT =
  "Arrows go along edges, Enter opens and closes a scope, Backspace goes to the scope " +
  "around, plus, minus and 0 zoom, slash searches, Escape leaves.";

/** How far a key zooms. */
export const STEP = 1.3;

export function listenToKeys(drawing: Drawing, leave: () => void): void {
  const { holder } = drawing.viewport;
  holder.setAttribute("aria-label", `drawing of ${drawing.title}. ${HINT}`);
  const moves: Record<string, () => void> = {
    ArrowDown: () => go(drawing, down),
    ArrowUp: () => go(drawing, up),
    ArrowLeft: () => go(drawing, (d, node) => beside(d, node, -1)),
    ArrowRight: () => go(drawing, (d, node) => beside(d, node, 1)),
    Enter: () => drawing.chosen && drawing.toggle(drawing.chosen.item),
    " ": () => drawing.chosen && drawing.toggle(drawing.chosen.item),
    Backspace: () => go(drawing, around),
    "+": () => drawing.zoomBy(STEP),
    "=": () => drawing.zoomBy(STEP),
    "-": () => drawing.zoomBy(1 / STEP),
    "0": () => drawing.fit(),
    Escape: leave,
  };
  holder.addEventListener("keydown", (event) => {
    const act = event.target === holder ? moves[event.key] : undefined;
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
}

type Way = (drawing: Drawing, node: SceneNode) => SceneNode | undefined;

/** Goes from what is chosen; to the uppermost node where nothing is. */
function go(drawing: Drawing, way: Way): void {
  const from = drawing.chosen;
  const to = from ? way(drawing, from) : uppermost(drawing.scene.nodes.filter((n) => !n.open));
  if (to) drawing.goTo(to);
}

/** To what reads a node; into a scope that is open. */
function down(drawing: Drawing, node: SceneNode): SceneNode | undefined {
  const { nodes, edges } = drawing.scene;
  if (node.open) return uppermost(nodes.filter((one) => !one.open && lies(drawing, one, node)));
  return nearest(node, edges.filter((edge) => edge.source === node).map((edge) => edge.target));
}

/** To what a node reads. */
function up(drawing: Drawing, node: SceneNode): SceneNode | undefined {
  const enters = drawing.scene.edges.filter(({ source, target }) =>
    node.open
      ? lies(drawing, target, node) && !lies(drawing, source, node)
      : target === node,
  );
  return nearest(node, enters.map((edge) => edge.source));
}

/** To a neighbour: first among what is read by the same, or reads the same. */
function beside(drawing: Drawing, node: SceneNode, by: number): SceneNode | undefined {
  const { nodes, edges } = drawing.scene;
  const ends = new Set<SceneNode>();
  for (const { source, target } of edges) {
    if (source === node) ends.add(target);
    if (target === node) ends.add(source);
  }
  const kin = edges.flatMap(({ source, target }) => [
    ...(ends.has(source) ? [target] : []),
    ...(ends.has(target) ? [source] : []),
  ]);
  const there = (one: SceneNode): boolean => by * (centre(one).x - centre(node).x) > 0;
  const level = (one: SceneNode): boolean => one.y1 < node.y2 && one.y2 > node.y1;
  const row = nodes.filter((one) => !one.open && level(one) && there(one));
  return nearest(node, kin.filter((one) => level(one) && there(one))) ?? nearest(node, row);
}

function around(drawing: Drawing, node: SceneNode): SceneNode | undefined {
  return drawing.scene.nodes[node.parent];
}

/** Whether a node lies in an open one. */
function lies(drawing: Drawing, node: SceneNode, scope: SceneNode): boolean {
  const { nodes } = drawing.scene;
  for (let at = nodes[node.parent]; at; at = nodes[at.parent]) if (at === scope) return true;
  return false;
}

function uppermost(nodes: SceneNode[]): SceneNode | undefined {
  return nodes.reduce<SceneNode | undefined>((a, b) => (a && a.y1 <= b.y1 ? a : b), undefined);
}

function nearest(from: SceneNode, nodes: SceneNode[]): SceneNode | undefined {
  const far = (to: SceneNode): number =>
    Math.hypot(centre(to).x - centre(from).x, centre(to).y - centre(from).y);
  return nodes.reduce<SceneNode | undefined>((a, b) => (a && far(a) <= far(b) ? a : b), undefined);
}
