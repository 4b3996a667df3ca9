// Panels that take turns in one place.

import { element } from "./dom";

export class Tabs {
  readonly panel: HTMLElement;
  private readonly bar = element("nav", { className: "tabs" });
  private readonly panels = new Map<string, HTMLElement>();

  constructor() {
    this.bar.setAttribute("role", "tablist");
    this.panel = element("section", { className: "turns" }, this.bar);
  }

  add(name: string, content: HTMLElement): void {
    const holder = element("div", { className: "tab", hidden: this.panels.size > 0 }, content);
    holder.setAttribute("role", "tabpanel");
    holder.setAttribute("aria-label", name);
    const choice = element("button", { type: "button", textContent: name });
    choice.onclick = () => this.show(name);
    choice.setAttribute("role", "tab");
    choice.setAttribute("aria-selected", String(this.panels.size === 0));
    this.panels.set(name, holder);
    this.bar.append(choice);
    this.panel.append(holder);
  }

  show(name: string): void {
    for (const [other, holder] of this.panels) holder.hidden = other !== name;
    for (const choice of this.bar.children) {
      choice.setAttribute("aria-selected", String(choice.textContent === name));
    }
  }
}
