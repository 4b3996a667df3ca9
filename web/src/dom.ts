// Short hands for making elements. Text is always set as text, never as markup.

type Child = Node | string | null | undefined;

export function element<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  properties: Partial<HTMLElementTagNameMap[K]> = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const made = Object.assign(document.createElement(tag), properties);
  for (const child of children) if (child != null) made.append(child);
  return made;
}

export function button(label: string, act: () => void, title = ""): HTMLButtonElement {
  return element("button", { type: "button", textContent: label, onclick: act, title });
}

/** A link inside the page, which keyboards reach. */
export function link(label: string, act: () => void): HTMLButtonElement {
  return element("button", {
    type: "button",
    className: "link",
    textContent: label,
    title: label,
    onclick: act,
  });
}

export function plural(count: number, what: string): string {
  return `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;
}

/** How many ops there are, besides inputs and constants of a file, which are none. */
export function countText(ops: number, ends: number): string {
  if (!ends) return plural(ops, "op");
  const words = ends === 1 ? "1 input or constant" : `${ends.toLocaleString("en")} inputs and constants`;
  return ops ? `${plural(ops, "op")}, ${words}` : words;
}

export function bytesText(bytes: number): string {
  if (bytes >= 1e9) return `${(bytes / 1e9).toFixed(2)} GB`;
  if (bytes >= 1e6) return `${(bytes / 1e6).toFixed(1)} MB`;
  if (bytes >= 1e3) return `${(bytes / 1e3).toFixed(1)} kB`;
  return `${bytes} B`;
}
