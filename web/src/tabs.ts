// Panels that take turns in one place.

import { element } from "./dom";

export class Tabs {
  readonly panel: HTMLElement;
  private readonly bar = element("div", { className: "tabs" });
  private readonly panels = new Map<string, HTMLElement>();

  constructor() {
    this.bar.setAttribute("role", "tablist");
    this.bar.onkeydown = (event) => this.turn(event);
    this.panel = element("section", { className: "turns" }, this.bar);
    this.panel.setAttribute("aria-label", "panels");
  }

  add(name: string, content: HTMLElement): void {
    const holder = element("div", { className: "tab", id: `panel-${name}`, tabIndex: 0 }, content);
    holder.setAttribute("role", "tabpanel");
    holder.setAttribute("aria-label", name);
    const choice = element("button", { type: "button", textContent: name });
    choice.onclick = () => this.show(name);
    choice.setAttribute("role", "tab");
    choice.setAttribute("aria-controls", holder.id);
    this.panels.set(name, holder);
    this.bar.append(choice);
    this.panel.append(holder);
    this.show([...this.panels.keys()][0]);
  }

  show(name: string): void {
    for (const [other, holder] of this.panels) holder.hidden = other !== name;
    for (const choice of this.choices) {
      const isShown = choice.textContent === name;
      choice.setAttribute("aria-selected", String(isShown));
      // The key Tab comes to the one that is shown, arrows to the others.
      choice.tabIndex = isShown ? 0 : -1;
    }
  }

  focus(): void {
    this.choices.find((choice) => choice.tabIndex === 0)?.focus();
  }

  private get choices(): HTMLElement[] {
    return [...this.bar.children] as HTMLElement[];
  }

  private turn(event: KeyboardEvent): void {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    const { choices } = this;
    const at = choices.indexOf(document.activeElement as HTMLElement);
    const next = choices[(at + by + choices.length) % choices.length];
    next.click();
    next.focus();
  }
}
