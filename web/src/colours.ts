// Colours by what an op does, told apart by the colour-blind, too (after Okabe and Ito).

import { ADDED, ALTERED, FUSED, REMOVED, REWIRED } from "./payload";

export const STATUS_COLOURS: Record<number, string> = {
  [ADDED]: "#009e73",
  [REMOVED]: "#d55e00",
  [REWIRED]: "#b8578a",
  [ALTERED]: "#0072b2",
  [FUSED]: "#7a6a00",
};

/** The border of what did not change, and the fill of closed scopes. */
export const PLAIN = "#7b8794";
export const GROUP = "#c7d8d8";
/** The fill of a closed scope of a mixed file with ops in it that compute in floats. */
export const FLOAT_SCOPE = "#fde3d0";
/** The fill of what no colour tells anything of. */
export const WHITE = "#ffffff";

// Any two fills of a legend are told apart, with normal eyes and without red, green or
// blue cones (Machado, Oliveira and Fernandes 2009): tests/report/test_themes.py has how
// far. So the dark ones are chosen, and not mixed.

/** What ops of TFLite files compute in; the first that fits counts. */
const PRECISIONS: [string, string, RegExp][] = [
  ["converts", "#ffb703", / to /],
  ["int8 weights, float", "#f6c6a0", /hybrid/],
  ["float", "#f08a5d", /float/],
  ["4-bit weights", "#8d86e0", /int[24] weights/],
  ["int16", "#b9c6f5", /^int16/],
  ["int8", "#35b5a0", /^u?int8/],
];
const OTHER_INTEGERS = "#f4f6f8";

export function precisionColour(precision: string): string {
  return PRECISIONS.find(([, , pattern]) => pattern.test(precision))?.[1] ?? OTHER_INTEGERS;
}

/** The colours of some precisions, with what they mean. */
export function precisionLegend(precisions: string[]): [string, string][] {
  const used = new Set(precisions.map(precisionColour));
  const entries: [string, string][] = PRECISIONS.map(([label, colour]) => [label, colour]);
  entries.push(["other types", OTHER_INTEGERS]);
  return entries.filter(([, colour]) => used.has(colour));
}

/** Noise of single layers, the noisiest first; from vermilion to blue; all zeros are grey. */
const NOISES = ["#f0661e", "#e9a882", "#f2dc66", "#89ebfe", "#89b7f3", "#529ab1", "#aaa2a1"];

export function noiseColour(noise: number): string {
  return NOISES[noise] ?? WHITE;
}

/** The colours of noise, with what they mean. */
export function noiseLegend(names: string[]): [string, string][] {
  const entries = names.map((name, noise): [string, string] => [name, noiseColour(noise)]);
  return [...entries, ["not quantized", WHITE]];
}

/** What is held of the results of ops, as shares of the peak; and none of it. */
const HELD: [number, string, string][] = [
  [0.2, "20 % of the peak and more", "#f0703c"],
  [0.05, "5 to 20 %", "#f6a85f"],
  [0.01, "1 to 5 %", "#fbd692"],
  [0, "less than 1 %", "#fff5cf"],
];

export function heldColour(share: number): string {
  return HELD.find(([least]) => share > 0 && share >= least)?.[2] ?? WHITE;
}

export const HELD_LEGEND: [string, string][] = HELD.map(([, label, colour]) => [label, colour]);
HELD_LEGEND.push(["nothing held", WHITE]);

const KINDS: [string, string, RegExp][] = [
  ["input", "#f0e442", /^(Placeholder|Arg|_Arg|IteratorGetNext|INPUT)/],
  ["parameter", "#b0a8a2", /^(Const|VarHandleOp|VariableV2|ReadVariableOp|Assign|CONST|VARIABLE)/],
  ["multiplies", "#7fd0f0", /Conv|MatMul|Einsum|DepthwiseConv/],
  ["quantizes", "#f99b1c", /Quant/],
  ["activation", "#bdf3b4", /Relu|Tanh|Sigmoid|Softmax|Elu|Selu|Gelu|Swish/],
  ["pools", "#9a97e0", /Pool|^Mean$|^Max$|^Sum$/],
  ["calls", "#f58cc4", /Call|^(Stateless)?(While|If|Case)$|^(Switch|Merge|Enter|Exit)$/],
];

export function colourOf(type: string): string {
  return KINDS.find(([, , pattern]) => pattern.test(type))?.[1] ?? WHITE;
}

export const LEGEND: [string, string][] = KINDS.map(([label, colour]) => [label, colour]);
LEGEND.push(["other", WHITE]);

/** The fills of the dark page, by those of the light one; text in light stands upon them. */
export const DARK_FILLS: Record<string, string> = {
  [WHITE]: "#20262d",
  [OTHER_INTEGERS]: "#20262d",
  [GROUP]: "#49494c",
  [FLOAT_SCOPE]: "#4b2200",
  "#ffb703": "#606401",
  "#f6c6a0": "#866657",
  "#f08a5d": "#d7162f",
  "#8d86e0": "#7c56cc",
  "#b9c6f5": "#004883",
  "#35b5a0": "#007a75",
  "#f0661e": "#c92f0a",
  "#e9a882": "#876746",
  "#f2dc66": "#50391a",
  "#89ebfe": "#003e53",
  "#89b7f3": "#306873",
  "#529ab1": "#036cd0",
  "#aaa2a1": "#6a6e66",
  "#f0e442": "#7c6d00",
  "#b0a8a2": "#6b6e69",
  "#7fd0f0": "#00748a",
  "#f99b1c": "#844224",
  "#bdf3b4": "#57754e",
  "#9a97e0": "#6161c6",
  "#f58cc4": "#be2d85",
  "#f0703c": "#bb3a12",
  "#f6a85f": "#86653a",
  "#fbd692": "#5e4c30",
  "#fff5cf": "#3a3328",
};
