// Colours by what an op does, told apart by the colour-blind, too (after Okabe and Ito).

import { ADDED, ALTERED, REMOVED, REWIRED } from "./payload";

export const STATUS_COLOURS: Record<number, string> = {
  [ADDED]: "#009e73",
  [REMOVED]: "#d55e00",
  [REWIRED]: "#cc79a7",
  [ALTERED]: "#0072b2",
};

const KINDS: [string, string, RegExp][] = [
  ["input", "#f0e442", /^(Placeholder|Arg|_Arg|IteratorGetNext)/],
  ["parameter", "#dddddd", /^(Const|VarHandleOp|VariableV2|ReadVariableOp|Assign)/],
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
