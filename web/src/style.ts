// What the parts of a drawing look like.

import type { StylesheetJson } from "cytoscape";

const FONT = "system-ui, sans-serif";

export const STYLE: StylesheetJson = [
  {
    selector: "node",
    style: {
      label: "data(label)",
      "font-family": FONT,
      "font-size": 11,
      "min-zoomed-font-size": 5,
      color: "#1f2933",
      shape: "round-rectangle",
      "border-width": 1.2,
      "border-color": "data(border)",
      width: "data(width)",
      height: "data(height)",
      "background-color": "data(colour)",
    },
  },
  {
    selector: "node.closed",
    style: {
      "text-valign": "center",
      "text-halign": "center",
      "text-wrap": "wrap",
      "text-max-width": "data(width)",
      "text-overflow-wrap": "anywhere",
    },
  },
  { selector: "node.scope.closed, node.group.closed", style: { "border-width": 2 } },
  { selector: "node.group", style: { "border-style": "dashed" } },
  {
    selector: "node.open",
    style: {
      "z-compound-depth": "bottom",
      // The heading can be clicked, too.
      "text-events": "yes",
      "background-color": "#f6f8fb",
      "background-opacity": 0.7,
      "text-valign": "top",
      "text-halign": "center",
      "text-margin-x": "data(shift)" as never,
      "text-margin-y": -2,
      "text-wrap": "ellipsis",
      "text-max-width": "data(width)",
      "font-weight": "bold",
    },
  },
  { selector: "node.op.closed", style: { shape: "round-rectangle" } },
  {
    selector: "edge",
    style: {
      width: "data(width)",
      "line-color": "#9aa5b1",
      "target-arrow-color": "#9aa5b1",
      "target-arrow-shape": "triangle",
      "arrow-scale": 0.8,
      "font-family": FONT,
      "font-size": 8,
      "min-zoomed-font-size": 7,
      color: "#52606d",
      "text-background-color": "#ffffff",
      "text-background-opacity": 0.8,
      "curve-style": "straight",
    },
  },
  { selector: "edge.within", style: { label: "data(label)" } },
  // The middle of an edge into an open scope may be anywhere, such as on its heading.
  {
    selector: "edge.across",
    style: { "source-label": "data(label)", "source-text-offset": 26 },
  },
  {
    selector: "edge.bent",
    style: {
      "curve-style": "round-segments",
      "segment-weights": "data(weights)" as never,
      "segment-distances": "data(distances)" as never,
      "edge-distances": "node-position",
    },
  },
  { selector: "edge.control", style: { "line-style": "dashed", "line-color": "#c5ccd6" } },
  {
    selector: "node.marked",
    style: { "outline-width": 4, "outline-color": "#ffb703", "outline-offset": 2 },
  },
  {
    selector: "node.chosen",
    style: { "border-width": 3.5, "border-color": "#1d4ed8" },
  },
  {
    selector: "edge.near",
    style: {
      "line-color": "#1d4ed8",
      "target-arrow-color": "#1d4ed8",
      "z-index": 9,
    },
  },
];
