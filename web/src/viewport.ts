// A canvas that is moved and zoomed: by pointers, by the wheel, and by the page.

import { element } from "./dom";
import type { Point } from "./layered";
import type { View } from "./painter";

const LEAST = 0.0005;
const MOST = 3;
/** Pixels that a pointer may move in a tap. */
const STEADY = 4;

export class Viewport {
  readonly canvas = element("canvas");
  readonly view: View = { zoom: 1, x: 0, y: 0 };
  size = { width: 0, height: 0 };
  /** Draws. */
  onPaint: () => void = () => {};
  onTap: (place: Point, time: number) => void = () => {};
  onResize: () => void = () => {};
  /** A person moved it. */
  onMoved: () => void = () => {};
  private readonly pointers = new Map<number, Point>();
  private from: Point | null = null;
  private asked = 0;

  constructor(readonly holder: HTMLElement) {
    holder.append(this.canvas);
    this.canvas.onpointerdown = (event) => this.press(event);
    this.canvas.onpointermove = (event) => this.drag(event);
    this.canvas.onpointerup = (event) => this.release(event);
    this.canvas.onpointercancel = (event) => this.pointers.delete(event.pointerId);
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    new ResizeObserver(() => this.resize()).observe(holder);
  }

  /** Draws in the next frame. */
  repaint(): void {
    this.asked ||= requestAnimationFrame(() => {
      this.asked = 0;
      if (this.size.width) this.onPaint();
    });
  }

  /** Takes the size of what it is in; returns whether it has one. */
  measure(): boolean {
    const { clientWidth: width, clientHeight: height } = this.holder;
    this.size = { width, height };
    this.canvas.width = Math.max(1, Math.round(width * devicePixelRatio));
    this.canvas.height = Math.max(1, Math.round(height * devicePixelRatio));
    return width > 0 && height > 0;
  }

  private resize(): void {
    const { width, height } = this.size;
    if (this.holder.clientWidth === width && this.holder.clientHeight === height) return;
    if (!this.measure()) return;
    this.onResize();
    if (this.size.width) this.onPaint();
  }

  set(view: View): void {
    Object.assign(this.view, view);
    this.repaint();
  }

  moveBy(x: number, y: number): void {
    this.set({ ...this.view, x: this.view.x + x, y: this.view.y + y });
  }

  /** Zooms about a point of the canvas; the middle of it unless one is given. */
  zoomBy(factor: number, about: Point = this.middle): void {
    const zoom = Math.min(MOST, Math.max(LEAST, this.view.zoom * factor));
    const share = zoom / this.view.zoom;
    this.set({
      zoom,
      x: about.x - (about.x - this.view.x) * share,
      y: about.y - (about.y - this.view.y) * share,
    });
  }

  /** Brings a point of the scene to the middle. */
  centre({ x, y }: Point, zoom: number): void {
    const { middle } = this;
    this.set({ zoom, x: middle.x - x * zoom, y: middle.y - y * zoom });
  }

  get middle(): Point {
    return { x: this.size.width / 2, y: this.size.height / 2 };
  }

  /** The point of the scene at a point of the canvas. */
  inScene({ x, y }: Point): Point {
    const { view } = this;
    return { x: (x - view.x) / view.zoom, y: (y - view.y) / view.zoom };
  }

  onScreen({ x, y }: Point): Point {
    const { view } = this;
    return { x: x * view.zoom + view.x, y: y * view.zoom + view.y };
  }

  private press(event: PointerEvent): void {
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, placeOf(event));
    this.from = this.pointers.size === 1 ? placeOf(event) : null;
  }

  private drag(event: PointerEvent): void {
    const before = this.pointers.get(event.pointerId);
    if (!before) return;
    const now = placeOf(event);
    if (this.from && Math.hypot(now.x - this.from.x, now.y - this.from.y) < STEADY) return;
    this.from = null;
    const others = [...this.pointers].filter(([id]) => id !== event.pointerId);
    this.pointers.set(event.pointerId, now);
    if (others.length) {
      const [[, other]] = others;
      const spread = (p: Point): number => Math.hypot(p.x - other.x, p.y - other.y) || 1;
      this.zoomBy(spread(now) / spread(before), other);
    } else {
      this.moveBy(now.x - before.x, now.y - before.y);
    }
    this.onMoved();
  }

  private release(event: PointerEvent): void {
    this.pointers.delete(event.pointerId);
    if (this.from) this.onTap(placeOf(event), event.timeStamp);
    this.from = null;
  }

  private wheel(event: WheelEvent): void {
    event.preventDefault();
    const pixels = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 20 : 1;
    this.zoomBy(Math.exp(-event.deltaY * pixels * 0.002), placeOf(event));
    this.onMoved();
  }
}

function placeOf(event: MouseEvent): Point {
  return { x: event.offsetX, y: event.offsetY };
}
