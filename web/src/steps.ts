// Long work in steps, between which the browser draws. A step is a generator's: it yields
// the share that is done, or a promise to wait for.

export type Steps<T> = Generator<number | Promise<unknown>, T, void>;

/** Milliseconds of work before the browser may draw. */
export const SLICE = 10;

/** Returns what is true at every n-th call: a step should take about a millisecond. */
export function every(n: number): () => boolean {
  let calls = 0;
  return () => ++calls % n === 0;
}

/** Does all of it at once; what is waited for must not be asked for then. */
export function atOnce<T>(steps: Steps<T>): T {
  for (;;) {
    const { done, value } = steps.next();
    if (done) return value as T;
    if (typeof value !== "number") throw new Error("steps that wait cannot be taken at once");
  }
}

/** Thrown by `inSteps` where a signal stops it. */
export class Stopped extends Error {}

/** Does it a slice a frame, and tells the share that is done. */
export async function inSteps<T>(
  steps: Steps<T>,
  signal: AbortSignal,
  tell: (share: number) => void,
): Promise<T> {
  for (;;) {
    const start = performance.now();
    while (performance.now() - start < SLICE) {
      const { done, value } = steps.next();
      if (done) return value as T;
      if (typeof value === "number") tell(value);
      else await Promise.race([value, aborted(signal)]);
      if (signal.aborted) throw new Stopped();
    }
    await nextFrame();
    if (signal.aborted) throw new Stopped();
  }
}

function aborted(signal: AbortSignal): Promise<void> {
  return new Promise((done) => signal.addEventListener("abort", () => done(), { once: true }));
}

/** The next frame; where no frames are drawn, as in a hidden tab, a moment later. */
export function nextFrame(): Promise<void> {
  return new Promise((done) => {
    const late = setTimeout(done, 60);
    requestAnimationFrame(() => {
      clearTimeout(late);
      // Behind the drawing of this frame.
      setTimeout(done, 0);
    });
  });
}
