// Brings the viewer into a frame of a notebook. The first frame has it, packed; the others
// take it from there, so that a notebook holds it once.

/** Milliseconds between two looks for the viewer, and how often it is looked for. */
const PAUSE = 200;
const LOOKS = 50;

interface Viewer {
  script: string;
  style: string;
}

const MISSING =
  "The viewer was in the output of another cell, which is no more on this page. " +
  "Run this cell again to see the drawing.";

/** Returns the packed viewer: of this frame, or of another one on the page. */
function packedViewer(key: string): string | null {
  const own = document.getElementById("viewer")?.textContent;
  if (own) return own;
  try {
    for (const frame of parent.document.querySelectorAll("iframe")) {
      const text = frame.contentDocument?.getElementById("viewer");
      if (text?.dataset.key === key) return text.textContent;
    }
  } catch {
    // A notebook may forbid its frames to look at each other.
  }
  return null;
}

async function unpacked(text: string): Promise<Viewer> {
  const bytes = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return (await new Response(plain).json()) as Viewer;
}

async function load(): Promise<void> {
  const { key } = document.getElementById("payload")!.dataset;
  let text = packedViewer(key!);
  // The frame that has it may come later: a page with all frames is read in any order.
  for (let look = 0; text === null && look < LOOKS; look++) {
    await new Promise((done) => setTimeout(done, PAUSE));
    text = packedViewer(key!);
  }
  if (text === null) {
    document.body.append(Object.assign(document.createElement("p"), { textContent: MISSING }));
    document.body.dataset.ready = "true";
    return;
  }
  const { script, style } = await unpacked(text);
  document.head.append(Object.assign(document.createElement("style"), { textContent: style }));
  document.body.append(Object.assign(document.createElement("script"), { textContent: script }));
}

void load();

export {};
