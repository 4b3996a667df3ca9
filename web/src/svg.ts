// What a drawing shows as the text of an SVG file: a pen that writes down what it draws.

import type { Pen } from "./painter";

interface Size {
  width: number;
  height: number;
}

export class SvgPen implements Pen {
  fillStyle: Pen["fillStyle"] = "#000000";
  strokeStyle: Pen["strokeStyle"] = "#000000";
  lineWidth = 1;
  font = "";
  textAlign: Pen["textAlign"] = "left";
  textBaseline: Pen["textBaseline"] = "alphabetic";
  globalAlpha = 1;
  private path = "";
  private last = { x: 0, y: 0 };
  private dash = "";
  private matrix = "";
  private readonly parts: string[] = [];
  private readonly measuring = document.createElement("canvas").getContext("2d")!;

  constructor(private readonly size: Size) {}

  get text(): string {
    const { width, height } = this.size;
    const box = `width="${width}" height="${height}" viewBox="0 0 ${width} ${height}"`;
    const start = `<svg xmlns="http://www.w3.org/2000/svg" ${box}>`;
    return `${start}\n${this.parts.join("\n")}${this.matrix && "</g>"}\n</svg>\n`;
  }

  setTransform(...values: unknown[]): void {
    if (this.matrix) this.parts.push("</g>");
    this.matrix = (values as number[]).map(short).join(" ");
    this.parts.push(`<g transform="matrix(${this.matrix})">`);
  }

  fillRect(x: number, y: number, width: number, height: number): void {
    const [left, top, across, down] = [x, y, width, height].map(short);
    const box = `x="${left}" y="${top}" width="${across}" height="${down}"`;
    this.parts.push(`<rect ${box} ${this.filling}/>`);
  }

  beginPath(): void {
    this.path = "";
  }

  moveTo(x: number, y: number): void {
    this.add("M", x, y);
  }

  lineTo(x: number, y: number): void {
    this.add("L", x, y);
  }

  /** A round corner: as near to the arc as an eye can tell. */
  arcTo(x: number, y: number, toX: number, toY: number, radius: number): void {
    const before = towards({ x, y }, this.last, radius);
    const after = towards({ x, y }, { x: toX, y: toY }, radius);
    this.add("L", before.x, before.y);
    this.path += `Q${short(x)} ${short(y)} ${short(after.x)} ${short(after.y)}`;
    this.last = after;
  }

  rect(x: number, y: number, width: number, height: number): void {
    this.add("M", x, y);
    this.path += `h${short(width)}v${short(height)}h${short(-width)}z`;
  }

  roundRect(x: number, y: number, width: number, height: number, radii?: unknown): void {
    const r = Math.min(radii as number, width / 2, height / 2);
    const [across, down, arc] = [width - 2 * r, height - 2 * r, `a${r} ${r} 0 0 1`].map(
      (value) => (typeof value === "number" ? short(value) : value),
    );
    this.add("M", x + r, y);
    this.path +=
      `h${across}${arc} ${r} ${r}v${down}${arc} ${-r} ${r}` +
      `h-${across}${arc} ${-r} ${-r}v-${down}${arc} ${r} ${-r}z`;
  }

  closePath(): void {
    this.path += "z";
  }

  fill(): void {
    this.parts.push(`<path d="${this.path}" ${this.filling}/>`);
  }

  stroke(): void {
    const dash = this.dash && ` stroke-dasharray="${this.dash}"`;
    const line = `stroke="${this.strokeStyle}" stroke-width="${short(this.lineWidth)}"`;
    this.parts.push(`<path d="${this.path}" fill="none" ${line}${dash}/>`);
  }

  setLineDash(values: Iterable<number>): void {
    this.dash = [...values].join(" ");
  }

  measureText(text: string): TextMetrics {
    this.measuring.font = this.font;
    return this.measuring.measureText(text);
  }

  fillText(text: string, x: number, y: number, most?: number): void {
    const [, weight, size, family] = /^(bold )?(\d+)px (.*)$/.exec(this.font)!;
    const anchor = this.textAlign === "center" ? "middle" : "start";
    const base = this.textBaseline === "middle" ? "central" : "alphabetic";
    const width = this.measureText(text).width;
    const squeezed = most && width > most ? ` textLength="${short(most)}"` : "";
    const adjust = squeezed && ' lengthAdjust="spacingAndGlyphs"';
    this.parts.push(
      `<text x="${short(x)}" y="${short(y)}" font-family="${escaped(family)}" ` +
        `font-size="${size}"${weight ? ' font-weight="bold"' : ""} text-anchor="${anchor}" ` +
        `dominant-baseline="${base}" ${this.filling}${squeezed}${adjust}>` +
        `${escaped(text)}</text>`,
    );
  }

  private get filling(): string {
    const alpha = this.globalAlpha < 1 ? ` fill-opacity="${this.globalAlpha}"` : "";
    return `fill="${this.fillStyle}"${alpha}`;
  }

  private add(command: string, x: number, y: number): void {
    this.path += `${command}${short(x)} ${short(y)}`;
    this.last = { x, y };
  }
}

function towards(from: { x: number; y: number }, to: { x: number; y: number }, by: number) {
  const length = Math.hypot(to.x - from.x, to.y - from.y) || 1;
  const share = Math.min(by / length, 0.5);
  return { x: from.x + (to.x - from.x) * share, y: from.y + (to.y - from.y) * share };
}

function short(value: number): string {
  return String(+value.toFixed(3));
}

/** Text as XML has it; characters that XML forbids are left out. */
function escaped(text: string): string {
  return text
    .replace(/[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\u{10000}-\u{10ffff}]/gu, "")
    .replace(/&/g, "&amp;")
    .replace(/</g, "&lt;")
    .replace(/>/g, "&gt;")
    .replace(/"/g, "&quot;");
}
