// A graph to look at: ops with what they read and who reads them.

import { countText } from "./dom";
import { SAME, type GraphData } from "./payload";

/** Types of nodes that are drawn though they are no ops of the file. */
const NO_OPS = new Set(["INPUT", "CONST", "VARIABLE"]);

export interface Read {
  op: number;
  output: number;
}

export class Graph {
  readonly size: number;
  /** The share of the peak that is held of each op's results; null where memory is not told. */
  held: Float64Array | null = null;
  /** For each op: the ops that read a tensor of it, or wait for it. */
  readonly consumers: number[][];
  private readonly parameters: Set<number>;
  private readonly byName = new Map<string, number>();

  constructor(readonly data: GraphData) {
    this.size = data.names.length;
    this.parameters = new Set(data.parameters);
    this.consumers = data.names.map(() => []);
    data.names.forEach((name, op) => {
      this.byName.set(name, op);
      const producers = new Set(data.controls[op]);
      for (const read of this.inputs(op)) producers.add(read.op);
      for (const producer of producers) this.consumers[producer].push(op);
    });
  }

  name(op: number): string {
    return this.data.names[op];
  }

  type(op: number): string {
    return this.data.typeNames[this.data.types[op]];
  }

  device(op: number): string {
    return this.data.deviceNames[this.data.devices[op]];
  }

  status(op: number): number {
    return this.data.status?.[op] ?? SAME;
  }

  /** What an op of a TFLite file computes in, such as "int8"; "" of other ops. */
  precision(op: number): string {
    return this.data.precisionNames?.[this.data.precisions?.[op] ?? -1] ?? "";
  }

  /** How much noise an op adds by itself, as a place in `noiseNames`; -1 of other ops. */
  noise(op: number): number {
    return this.data.noises?.[op] ?? -1;
  }

  /** What an output holds, and what its integers stand for. */
  holds(op: number, output: number): string {
    const quantization = this.data.quantizations?.[op][output];
    const what = this.data.outputs[op][output];
    return quantization ? `${what}, ${quantization}` : what;
  }

  /** The ops of another graph that an op belongs to: by its partners, or its name. */
  counterparts(op: number, other: Graph): number[] {
    if (this.data.partners) return this.data.partners[op] ?? [];
    const same = other.find(this.name(op));
    return same === undefined ? [] : [same];
  }

  /** How many ops some nodes are, in words: inputs and constants of a file are no ops. */
  countText(nodes: number[]): string {
    const ends = this.data.precisionNames ? nodes.filter((op) => NO_OPS.has(this.type(op))).length : 0;
    return countText(nodes.length - ends, ends);
  }

  isParameter(op: number): boolean {
    return this.parameters.has(op);
  }

  find(name: string): number | undefined {
    return this.byName.get(name);
  }

  /** The ops with a name, or in a scope with it; of a function, also behind its name. */
  within(name: string): number[] {
    const found = this.withinOwn(name);
    const own = `${this.data.label}/`;
    return found.length || !name.startsWith(own) ? found : this.withinOwn(name.slice(own.length));
  }

  private withinOwn(name: string): number[] {
    const op = this.byName.get(name);
    if (op !== undefined) return [op];
    const start = `${name}/`;
    const found: number[] = [];
    this.data.names.forEach((other, index) => {
      if (other.startsWith(start)) found.push(index);
    });
    return found;
  }

  inputs(op: number): Read[] {
    const flat = this.data.inputs[op];
    const reads: Read[] = [];
    for (let i = 0; i < flat.length; i += 2) {
      reads.push({ op: flat[i], output: flat[i + 1] });
    }
    return reads;
  }
}
