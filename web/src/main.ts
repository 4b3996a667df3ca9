// Builds the page from the data in it.

import "./viewer.css";

import { element } from "./dom";
import { graphPage } from "./graph_page";
import { memoryPage } from "./memory_page";
import { readPayload } from "./payload";

const payload = readPayload();
const heading = element(
  "header",
  { className: "title" },
  element("h1", { textContent: payload.title }),
  element("span", { className: "dim", textContent: payload.versions }),
);
const page = payload.memory ? memoryPage(payload.memory, payload.report) : graphPage(payload);
document.body.append(heading, page);
