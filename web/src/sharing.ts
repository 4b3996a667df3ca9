// What leaves the page: pictures, names, and links to an op.

import { element } from "./dom";
import type { Drawing } from "./drawing";
import { SvgPen } from "./svg";

/** Pictures have at least so many dots for a pixel of the page, to be read when enlarged. */
const DENSITY = 2;

export function saveAsPng(drawing: Drawing): void {
  const { width, height } = drawing.viewport.size;
  const ratio = Math.max(DENSITY, devicePixelRatio);
  const canvas = element("canvas", { width: width * ratio, height: height * ratio });
  drawing.paintWith(canvas.getContext("2d")!, ratio);
  canvas.toBlob((blob) => blob && save(blob, `${fileName(drawing)}.png`));
}

export function saveAsSvg(drawing: Drawing): void {
  const pen = new SvgPen(drawing.viewport.size);
  drawing.paintWith(pen);
  save(new Blob([pen.text], { type: "image/svg+xml" }), `${fileName(drawing)}.svg`);
}

function fileName({ title }: Drawing): string {
  return title.replace(/[^\p{L}\p{N}.-]+/gu, "_") || "graph";
}

function save(blob: Blob, name: string): void {
  const url = URL.createObjectURL(blob);
  element("a", { href: url, download: name }).click();
  // The browser reads it after the click.
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Copies a text; returns whether the browser let it. */
export async function copy(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Frames of notebooks may only copy what is selected.
    const area = element("textarea", { value: text, className: "unseen" });
    const before = document.activeElement as HTMLElement | null;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    before?.focus();
    return done;
  }
}

/** An op or a scope that a link leads to, and the graph of the page that it is in. */
export interface Place {
  op: string;
  graph: string | null;
  /** Which stages of a pipeline are shown, such as "1-2"; null where there are none. */
  stages: string | null;
}

export function placeInLink(): Place | null {
  const parameters = new URLSearchParams(location.hash.slice(1));
  const op = parameters.get("op");
  return op ? { op, graph: parameters.get("graph"), stages: parameters.get("stages") } : null;
}

/** Puts a place into the address of the page, where a person copies it from. */
export function linkTo(place: Place | null): void {
  const parts = place && [
    `op=${encodeURIComponent(place.op)}`,
    ...(place.stages === null ? [] : [`stages=${place.stages}`]),
    ...(place.graph === null ? [] : [`graph=${encodeURIComponent(place.graph)}`]),
  ];
  const { pathname, search } = location;
  try {
    history.replaceState(null, "", parts ? `#${parts.join("&")}` : pathname + search);
  } catch {
    // Frames of notebooks have no address.
  }
}
