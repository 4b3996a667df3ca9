// A bar over a drawing that takes a while, with a button to stop it.

import { button, element } from "./dom";

/** Milliseconds that nobody minds waiting for. */
const LATE = 150;

export class Progress {
  readonly panel: HTMLElement;
  onStop: () => void = () => {};
  private readonly bar = element("progress", { max: 1, value: 0 });
  private timer = 0;

  constructor(what: string) {
    this.bar.setAttribute("aria-label", what);
    const stop = button("stop", () => this.onStop(), "leave the drawing as it was");
    const words = element("span", {}, what);
    this.panel = element("div", { className: "progress", hidden: true }, words, this.bar, stop);
    this.panel.setAttribute("role", "status");
  }

  begin(): void {
    this.bar.value = 0;
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => (this.panel.hidden = false), LATE);
  }

  tell(share: number): void {
    this.bar.value = share;
  }

  end(): void {
    clearTimeout(this.timer);
    this.panel.hidden = true;
  }
}
