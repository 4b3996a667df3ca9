// Builds the page from the data in it. In a worker, it lays out scopes.

import "./viewer.css";

import { element } from "./dom";
import { graphPage } from "./graph_page";
import { memoryPage } from "./memory_page";
import { readPayload } from "./payload";
import { themeSwitch } from "./theme";
import { isWorker, serve } from "./worker";

if (isWorker) serve();
else void show();

async function show(): Promise<void> {
  const payload = await readPayload();
  const heading = element(
    "header",
    { className: "title" },
    element("h1", { textContent: payload.title }),
    element("span", { className: "dim", textContent: payload.versions }),
    themeSwitch(),
  );
  const page = payload.memory ? memoryPage(payload.memory, payload.report) : graphPage(payload);
  document.body.append(heading, page);
}
