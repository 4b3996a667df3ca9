// How much of a drawing is seen; of two, the same part of both.

import { centre, type Rect, type Scene, type SceneNode } from "./scene";
import type { View } from "./painter";
import type { Item } from "./items";

/** The zoom at which labels are read with ease, and the least at which they are. */
const READABLE = 0.8;
const LEGIBLE = 0.5;
/** The zoom of drawings that need less room than there is. */
const LARGEST = 1.2;
/** Pixels around the whole of a drawing. */
const MARGIN = 24;

export interface Framed {
  scene: Scene;
  size: { width: number; height: number };
}

/**
 * Returns the views that show all of some drawings, or with `beginning` the beginning of
 * them where all would be too small to read. They have one zoom, and what `same` says to
 * be one thing is at the same place in all.
 */
export function frame(
  drawings: Framed[],
  same: (item: Item, other: number) => SceneNode | undefined,
  beginning: boolean,
): View[] {
  const anchors = anchorsOf(drawings.map(({ scene }) => scene), same);
  const box = together(drawings, anchors);
  const width = Math.min(...drawings.map(({ size }) => size.width));
  const height = Math.min(...drawings.map(({ size }) => size.height));
  const across = Math.max(1, width - 2 * MARGIN) / Math.max(1, box.x2 - box.x1);
  const down = Math.max(1, height - 2 * MARGIN) / Math.max(1, box.y2 - box.y1);
  const whole = Math.min(across, down, LARGEST);
  const middle = centre(box);
  // The place of the anchors on each canvas.
  let place = { x: width / 2 - middle.x * whole, y: height / 2 - middle.y * whole };
  let zoom = whole;
  if (beginning && whole < READABLE) {
    zoom = Math.min(READABLE, Math.max(across, LEGIBLE));
    const fits = zoom <= across;
    place = { x: fits ? width / 2 - middle.x * zoom : width / 2, y: MARGIN - box.y1 * zoom };
    // Where the anchor is far down, it is seen all the same.
    place.y = Math.min(place.y, height / 2);
  }
  return anchors.map((anchor) => ({
    zoom,
    x: place.x - anchor.x * zoom,
    y: place.y - anchor.y * zoom,
  }));
}

/** What all drawings lie in when their anchors lie upon each other, at the origin. */
function together(drawings: Framed[], anchors: { x: number; y: number }[]): Rect {
  const boxes = drawings.map(({ scene: { box } }, at) => ({
    x1: box.x1 - anchors[at].x,
    y1: box.y1 - anchors[at].y,
    x2: box.x2 - anchors[at].x,
    y2: box.y2 - anchors[at].y,
  }));
  return {
    x1: Math.min(...boxes.map((box) => box.x1)),
    y1: Math.min(...boxes.map((box) => box.y1)),
    x2: Math.max(...boxes.map((box) => box.x2)),
    y2: Math.max(...boxes.map((box) => box.y2)),
  };
}

/** The uppermost thing that is drawn in all; without one, the uppermost of each. */
function anchorsOf(
  scenes: Scene[],
  same: (item: Item, other: number) => SceneNode | undefined,
): { x: number; y: number }[] {
  const closed = scenes.map(({ nodes }) => nodes.filter((node) => !node.open));
  const [first] = closed;
  let best: SceneNode[] | undefined;
  for (const node of first) {
    if (best && best[0].y1 <= node.y1) continue;
    const all = scenes.map((_, at) => (at ? same(node.item, at) : node));
    if (all.every((one) => one !== undefined)) best = all as SceneNode[];
  }
  if (best) return best.map(centre);
  return closed.map((nodes) => {
    const top = nodes.reduce<SceneNode | undefined>(
      (a, b) => (a && a.y1 <= b.y1 ? a : b),
      undefined,
    );
    return top ? centre(top) : { x: 0, y: 0 };
  });
}
