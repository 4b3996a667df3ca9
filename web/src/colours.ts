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
export const GROUP = "#eef2f7";

/** What ops of TFLite files compute in; the first that fits counts. */
const PRECISIONS: [string, string, RegExp][] = [
  ["converts", "#ffb703", / to /],
  ["int8 weights, float", "#f6c6a0", /hybrid/],
  ["float", "#f08a5d", /float/],
  ["4-bit weights", "#b39ddb", /int[24] weights/],
  ["int16", "#a9b8f0", /^int16/],
  ["int8", "#8fd3c8", /^u?int8/],
];
const OTHER_INTEGERS = "#eef1f4";

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
const NOISES = ["#e07a5f", "#f0a58f", "#f9dcc4", "#e4f0f6", "#b5d8ea", "#8ecae6", "#cbd2d9"];
const NO_NOISE = "#ffffff";

export function noiseColour(noise: number): string {
  return NOISES[noise] ?? NO_NOISE;
}

/** The colours of noise, with what they mean. */
export function noiseLegend(names: string[]): [string, string][] {
  const entries = names.map((name, noise): [string, string] => [name, noiseColour(noise)]);
  return [...entries, ["not quantized", NO_NOISE]];
}

/** What is held of the results of ops, as shares of the peak; and none of it. */
const HELD: [number, string, string][] = [
  [0.2, "20 % of the peak and more", "#f08a5d"],
  [0.05, "5 to 20 %", "#f6b26b"],
  [0.01, "1 to 5 %", "#fbd99b"],
  [0, "less than 1 %", "#fff3c4"],
];
const NOT_HELD = "#ffffff";

export function heldColour(share: number): string {
  return HELD.find(([least]) => share > 0 && share >= least)?.[2] ?? NOT_HELD;
}

export const HELD_LEGEND: [string, string][] = HELD.map(([, label, colour]) => [label, colour]);
HELD_LEGEND.push(["nothing held", NOT_HELD]);

const KINDS: [string, string, RegExp][] = [
  ["input", "#f0e442", /^(Placeholder|Arg|_Arg|IteratorGetNext|INPUT)/],
  ["parameter", "#dddddd", /^(Const|VarHandleOp|VariableV2|ReadVariableOp|Assign|CONST|VARIABLE)/],
  ["multiplies", "#8ecae6", /Conv|MatMul|Einsum|DepthwiseConv/],
  ["quantizes", "#ffb703", /Quant/],
  ["activation", "#b7e4c7", /Relu|Tanh|Sigmoid|Softmax|Elu|Selu|Gelu|Swish/],
  ["pools", "#cdb4db", /Pool|^Mean$|^Max$|^Sum$/],
  ["calls", "#ffafcc", /Call|^(Stateless)?(While|If|Case)$|^(Switch|Merge|Enter|Exit)$/],
];

export function colourOf(type: string): string {
  return KINDS.find(([, , pattern]) => pattern.test(type))?.[1] ?? "#ffffff";
}

export const LEGEND: [string, string][] = KINDS.map(([label, colour]) => [label, colour]);
LEGEND.push(["other", "#ffffff"]);
