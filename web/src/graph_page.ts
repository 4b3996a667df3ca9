// The pages that draw graphs: one, or two side by side.

import { details, type Surroundings } from "./details";
import { Drawing, type Chosen } from "./drawing";
import { element } from "./dom";
import { LEGEND, STATUS_COLOURS } from "./colours";
import { STATUS_NAMES, type Payload, type ReportRow } from "./payload";
import { changesPanel, reportPanel } from "./rows";
import { searchPanel, type Match } from "./search";
import { Tabs } from "./tabs";

export function graphPage(payload: Payload): HTMLElement {
  const page = new GraphPage(payload);
  requestAnimationFrame(() => page.start());
  return page.element;
}

class GraphPage {
  readonly element: HTMLElement;
  private readonly tabs = new Tabs();
  private readonly stage = element("div", { className: "stage" });
  private readonly made = new Map<number, Drawing>();
  /** The graphs that are on the page now. */
  private shown: number[];
  private readonly around: Surroundings;

  constructor(private readonly payload: Payload) {
    this.shown = payload.kind === "diff" ? [0, 1] : [0];
    this.around = {
      other: (drawing) =>
        payload.kind === "diff" ? this.drawings.find((d) => d !== drawing) : undefined,
      show: (drawing, op) => this.show({ drawing, op }),
      open: (name) => this.switchTo(payload.graphs.findIndex((g) => g.label === name)),
      rows: payload.report?.rows ?? [],
    };
    const search = searchPanel(
      () => this.drawings,
      (match) => this.show(match),
    );
    this.tabs.add("search", search);
    const [first] = this.drawings;
    this.tabs.add("details", details(first, first.hierarchy.root, this.around));
    if (payload.kind === "diff") {
      this.tabs.add("changes", changesPanel(this.drawings, (match) => this.show(match)));
    }
    if (payload.report) {
      this.tabs.add("report", reportPanel(payload.report, (row) => this.showRow(row)));
      this.tabs.show("report");
    } else {
      this.tabs.show(payload.kind === "diff" ? "changes" : "details");
    }
    this.element = element("main", { className: payload.kind }, this.stage, this.tabs.panel);
    this.stage.append(...this.drawings.map((drawing) => drawing.panel), this.legend());
  }

  start(): void {
    for (const drawing of this.drawings) drawing.start();
    document.body.dataset.ready = "true";
  }

  private get drawings(): Drawing[] {
    return this.shown.map((index) => this.drawing(index));
  }

  private drawing(index: number): Drawing {
    let drawing = this.made.get(index);
    if (!drawing) {
      drawing = new Drawing(this.payload.graphs[index]);
      drawing.onChoose = (chosen) => this.choose(chosen);
      drawing.onToggle = (item) => this.follow(drawing!, item.key, item.open);
      this.made.set(index, drawing);
    }
    return drawing;
  }

  private switchTo(index: number): void {
    if (index < 0) return;
    const isNew = !this.made.has(index);
    this.shown = [index];
    const [drawing] = this.drawings;
    this.stage.replaceChildren(drawing.panel, this.legend());
    const picker = document.querySelector<HTMLSelectElement>("select.graphs");
    if (picker) picker.selectedIndex = index;
    if (isNew) drawing.start();
  }

  /** Opens and closes the same scope on the other side. */
  private follow(drawing: Drawing, key: string, open: boolean): void {
    const other = this.around.other(drawing);
    const item = other?.hierarchy.find(key);
    if (other && item) other.toggle(item, open);
  }

  private choose(chosen: Chosen): void {
    if (!chosen) return;
    const { drawing, item } = chosen;
    this.tabs.fill("details", details(drawing, item, this.around));
    this.tabs.show("details");
    const other = this.around.other(drawing);
    const op = item.kind === "op" ? other?.graph.find(drawing.graph.name(item.op)) : undefined;
    other?.select(op === undefined ? null : other.hierarchy.itemOf(op));
  }

  private show({ drawing, op }: Match): void {
    const item = drawing.hierarchy.itemOf(op);
    drawing.show(item);
    const other = this.around.other(drawing);
    const counterpart = other?.graph.find(drawing.graph.name(op));
    if (other && counterpart !== undefined) other.show(other.hierarchy.itemOf(counterpart));
    this.choose({ drawing, item });
  }

  /** Rings all that a line of the report is about, and goes to its first op. */
  private showRow(row: ReportRow): void {
    for (const drawing of this.drawings) {
      const ops = row.names.flatMap((name) => drawing.graph.within(name));
      if (ops.length) drawing.show(drawing.hierarchy.itemOf(ops[0]));
      drawing.mark(ops);
    }
  }

  private legend(): HTMLElement {
    const entries: [string, string][] =
      this.payload.kind === "diff"
        ? Object.entries(STATUS_COLOURS).map(([s, colour]) => [STATUS_NAMES[+s], colour])
        : LEGEND;
    const marks = entries.map(([label, colour]) => {
      const mark = element("i");
      mark.style.background = colour;
      return element("span", {}, mark, label);
    });
    const hint = element("span", { className: "dim" }, "double-click opens and closes");
    const legend = element("footer", { className: "legend" }, ...marks, hint);
    if (this.payload.kind === "view" && this.payload.graphs.length > 1) {
      legend.prepend(this.picker());
    }
    return legend;
  }

  private picker(): HTMLElement {
    const picker = element("select", { className: "graphs" });
    picker.setAttribute("aria-label", "graph");
    for (const graph of this.payload.graphs) picker.append(element("option", {}, graph.label));
    picker.selectedIndex = this.shown[0];
    picker.onchange = () => this.switchTo(picker.selectedIndex);
    return picker;
  }
}
