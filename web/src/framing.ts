// How much of a drawing is seen.

import type { Core } from "cytoscape";

/** The zoom at which labels are read with ease, and the least at which they are. */
const READABLE = 0.8;
const LEGIBLE = 0.5;
/** The zoom of drawings that need less room than there is. */
const LARGEST = 1.2;
/** Pixels around the whole of a drawing. */
const MARGIN = 24;

/** Shows all of a drawing, however small. */
export function fit(core: Core): void {
  core.fit(undefined, MARGIN);
  if (core.zoom() <= LARGEST) return;
  core.zoom(LARGEST);
  core.center();
}

/** Shows all of a drawing, or its beginning where all of it would be too small to read. */
export function begin(core: Core): void {
  fit(core);
  if (core.zoom() >= READABLE) return;
  const box = core.elements().boundingBox();
  const whole = (core.width() - 2 * MARGIN) / box.w;
  const zoom = Math.min(READABLE, Math.max(whole, LEGIBLE));
  core.zoom(zoom);
  core.pan({
    x: core.width() / 2 - ((box.x1 + box.x2) / 2) * zoom,
    y: MARGIN - box.y1 * zoom,
  });
}
