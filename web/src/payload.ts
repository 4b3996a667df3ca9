// What a page is given: the JSON that geutil.report writes into it.

export const SAME = 0;
export const ADDED = 1;
export const REMOVED = 2;
export const REWIRED = 3;
export const ALTERED = 4;
/** Several ops of a graph that are one op of a TFLite file. */
export const FUSED = 5;
export const STATUS_NAMES = ["same", "added", "removed", "rewired", "altered", "fused"];

/** A graph in columns: entry i of each belongs to op i. */
export interface GraphData {
  label: string;
  names: string[];
  /** Places in `typeNames`. */
  types: number[];
  typeNames: string[];
  /** For each op: the op and the output that each input comes from, flat. */
  inputs: number[][];
  controls: number[][];
  /** For each op: what each output holds, such as "float32 [?, 8]". */
  outputs: string[][];
  devices: number[];
  deviceNames: string[];
  attributes: Record<string, string>[];
  /** Ops that hold or read weights and constants: not drawn unless asked for. */
  parameters: number[];
  /** Names of the model's inputs and outputs, by the op. */
  ends: Record<number, string>;
  /** Graphs of the page that an op calls, by the op. */
  calls: Record<number, string[]>;
  /** How many ops of the graph are not drawn: what no output of the model needs. */
  leftOut: number;
  /** What became of each op; absent where nothing is compared. */
  status?: number[];
  /** Ops of the other side that an op belongs to; absent where names tell. */
  partners?: Record<number, number[]>;
  /** What the integers of each output of a TFLite file stand for; "" if for themselves. */
  quantizations?: string[][];
  /** What each op of a TFLite file computes in: a place in `precisionNames`, or -1. */
  precisions?: number[];
  precisionNames?: string[];
  /** How much noise each op adds by itself: a place in `noiseNames`, or -1. */
  noises?: number[];
  /** The noisiest first. */
  noiseNames?: string[];
}

/** One line of a report: what happened to an op, or why nothing did. */
export interface ReportRow {
  outcome: string;
  good: boolean;
  what: string;
  detail: string;
  /** Ops or scopes that it is about. */
  names: string[];
}

export interface ReportData {
  title: string;
  summary: string[];
  rows: ReportRow[];
}

export interface HeldTensor {
  name: string;
  type: string;
  bytes: number;
}

export interface TimelineData {
  label: string;
  source: string;
  ops: string[];
  bytes: number[];
  /** About how long each op takes, in a unit of the timeline's own; 0 where not known. */
  times: number[];
  /** The phase of each op: a place in `phaseNames`. */
  phases: number[];
  held: HeldTensor[];
  variables: number;
  constants: number;
}

/** A plan of a step under a budget: its peak, and how much longer the step takes. */
export interface PlanData {
  budget: number;
  peak: number;
  extraTime: number;
  bound: number;
  /** How many ops run again, counted each time. */
  again: number;
  /** The types of the ops that run again most often, each with its count. */
  types: [string, number][];
  /** How many loops compute values again, each time they turn. */
  loops: number;
  /** Whether the step on the page is this one. */
  chosen: boolean;
}

export interface CurveData {
  plain: number;
  ordered: number;
  plans: PlanData[];
  unmet: number[];
}

export interface MemoryData {
  timelines: TimelineData[];
  phaseNames: string[];
  /** Lines by heading: the peak, its moment, the layers that hold most, advice. */
  answers: Record<string, string[]>;
  curve?: CurveData;
}

/** When which buffers of a step are held; ops are places in the graph, -1 of others. */
export interface LivesData {
  timeline: TimelineData;
  phaseNames: string[];
  /** The op of each moment. */
  steps: number[];
  /** For each buffer: its name, the op that made it, its bytes, its moments. */
  names: string[];
  ops: number[];
  bytes: number[];
  first: number[];
  last: number[];
}

export interface StageData {
  label: string;
  ops: number;
  /** Inputs and constants of a file, which are drawn and are no ops. */
  ends: number;
  inFunctions: number;
  /** Bytes by what takes them: constants and variables, or the file. */
  sizes: Record<string, number>;
}

/** Two stages: places of their graphs, -1 of none, and the status of each op as a digit. */
export interface ComparisonData {
  stages: [number, number];
  counts: Record<string, number>;
  sheets: {
    graphs: number[];
    labels: string[];
    status: string[];
    partners?: Record<number, number[]>[];
  }[];
}

export interface PipelineData {
  stages: StageData[];
  comparisons: ComparisonData[];
}

export interface Payload {
  kind: "view" | "diff" | "memory" | "pipeline";
  title: string;
  versions: string;
  /** Of a comparison: before and after in turn, first of the models, then of functions. */
  graphs: GraphData[];
  report?: ReportData;
  memory?: MemoryData;
  pipeline?: PipelineData;
  lives?: LivesData;
}

/** In notebooks the data are packed: as bytes of a deflated text, in base 64. */
export async function readPayload(): Promise<Payload> {
  const holder = document.getElementById("payload")!;
  const text = holder.textContent!;
  if (holder.dataset.packed === undefined) return JSON.parse(text) as Payload;
  const bytes = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return (await new Response(plain).json()) as Payload;
}
