// Scopes are laid out in a worker, where a page may have one: it runs the page's own script,
// from the text of it, as a page is one file.

import { layOutScope, type ScopeJob, type ScopeLayout } from "./layered";
import { nextFrame, SLICE } from "./steps";

/** Whether this script runs in the worker. */
export const isWorker = typeof document === "undefined";

/** The script of the page; only known while it runs for the first time. */
const source = isWorker ? "" : (document.currentScript?.textContent ?? "");

interface Asked {
  number: number;
  job: ScopeJob;
}

/** Answers jobs; to be called in the worker. */
export function serve(): void {
  self.onmessage = ({ data }: MessageEvent<Asked>) => {
    self.postMessage({ number: data.number, layout: layOutScope(data.job) });
  };
}

interface Waiting {
  job: ScopeJob;
  answer: (layout: ScopeLayout | Promise<ScopeLayout>) => void;
}

export class LayoutWorker {
  private worker: Worker | null | undefined;
  private next = 0;
  private readonly waiting = new Map<number, Waiting>();

  /** Lays out a scope beside the page; where no worker may run, in the page. */
  layOut(job: ScopeJob): Promise<ScopeLayout> {
    if (this.worker === undefined) this.worker = this.start();
    const { worker } = this;
    if (!worker) return inThePage(job);
    const number = this.next++;
    worker.postMessage({ number, job } satisfies Asked);
    return new Promise((answer) => this.waiting.set(number, { job, answer }));
  }

  /** Ends what is being laid out. */
  stop(): void {
    this.worker?.terminate();
    this.worker = this.worker === null ? null : undefined;
    this.waiting.clear();
  }

  private start(): Worker | null {
    const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
    try {
      const worker = new Worker(url);
      worker.onmessage = ({ data }) => {
        this.waiting.get(data.number)?.answer(data.layout);
        this.waiting.delete(data.number);
      };
      worker.onerror = (event) => {
        event.preventDefault();
        this.goWithout();
      };
      return worker;
    } catch {
      return null;
    }
  }

  /** A notebook's policy may forbid workers; then steps on the page have to do. */
  private goWithout(): void {
    this.worker?.terminate();
    this.worker = null;
    for (const { job, answer } of this.waiting.values()) answer(inThePage(job));
    this.waiting.clear();
  }
}

let last: Promise<unknown> = Promise.resolve();
let frameAt = 0;

/** One scope after the other, with a frame between where it is time for one. */
function inThePage(job: ScopeJob): Promise<ScopeLayout> {
  const made = last.then(async () => {
    if (performance.now() - frameAt > SLICE) {
      await nextFrame();
      frameAt = performance.now();
    }
    return layOutScope(job);
  });
  last = made.catch(() => {});
  return made;
}
