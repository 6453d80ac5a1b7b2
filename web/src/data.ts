// What `torchgraft.inspect.page.data` gives, and every graph that follows from it.

export interface Row {
  name: string;
  kind: "input" | "constant" | "call" | "output";
  op: string;
  type: string;
  args: string;
  inputs: string[];
  module: string;
  line: string;
}

export interface Step {
  name: string;
  stage: string;
  seconds: number | null;
  added: number;
  removed: number;
  changed: number;
  nodes: number;
  hits: string[] | null;
  miss: string;
  diff: { added: string[]; removed: number[]; changed: number[] };
}

export interface Placed {
  node: string;
  op: string;
  runs: string;
  region: string;
  reason: string;
  line: string | null;
  kind: string;
}

export interface Conversion {
  node: string;
  op: string;
  converter: string;
  where: string;
  reason: string | null;
  line: string | null;
}

export interface Span {
  index: number;
  kernel: string;
  stream: string;
  start: number;
  end: number;
  critical: boolean;
}

export interface Timeline {
  streams: string[];
  seconds: number;
  spans: Span[];
  arrows: { event: string; before: number; after: number }[];
  memory: [number, number][];
}

export interface Kernel {
  name: string;
  stream: string;
  bytes: number;
  flops: number;
  nodes: string[];
  predicted: number;
  seconds?: number;
  share?: number;
}

export interface Report {
  name: string;
  front_end: string;
  mode: string;
  device: string;
  torchgraft: string;
  torch: string;
  seconds: Record<string, number>;
  coverage: number;
  compiled: number;
  regions: number;
  notes: string[];
  versions: { [field in keyof Row]: Row[field][] };
  final: number[];
  steps: Step[];
  placed: Placed[];
  streams: Record<string, string>;
  branches: Record<string, string>;
  conversions: Conversion[];
  plan: {
    text: string;
    machine: { bandwidth: number; flops: number; launch: number; measured: boolean };
    kernels: Kernel[];
    predicted: Timeline;
    measured: Timeline | null;
    call: number | null;
  };
}

export async function load(): Promise<Report> {
  const text = document.getElementById("data")!.textContent!.trim();
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text()) as Report;
}

export type Graph = Map<string, Row>;
export type Status = "same" | "added" | "removed" | "changed";

/** A node of the graph before a step, after it, or both. */
export interface Entry {
  row: Row;
  status: Status;
  old?: Row;
}

/** Every graph from the one that was captured (0) to the one that runs (after the last step). */
export class History {
  readonly rows: Row[];
  private readonly graphs: Graph[];

  constructor(readonly report: Report) {
    const v = report.versions;
    this.rows = v.name.map((name, i) => ({
      name,
      kind: v.kind[i],
      op: v.op[i],
      type: v.type[i],
      args: v.args[i],
      inputs: v.inputs[i],
      module: v.module[i],
      line: v.line[i],
    }));
    let graph: Graph = new Map(report.final.map((i) => [this.rows[i].name, this.rows[i]]));
    this.graphs = [graph];
    for (const step of report.steps.slice().reverse()) {
      const { added, removed, changed } = step.diff;
      if (added.length + removed.length + changed.length > 0) {
        graph = new Map(graph);
        added.forEach((name) => graph.delete(name));
        for (const i of [...changed, ...removed]) graph.set(this.rows[i].name, this.rows[i]);
      }
      this.graphs.unshift(graph);
    }
  }

  /** The graph before step `i`; after the last one it is what runs. */
  before(i: number): Graph {
    return this.graphs[i];
  }

  /** Both sides of step `i` in one graph, in an order that respects every edge. */
  diff(i: number): Map<string, Entry> {
    const step = this.report.steps[i];
    const [before, after] = [this.graphs[i], this.graphs[i + 1]];
    const changed = new Set(step.diff.changed.map((k) => this.rows[k].name));
    const both = new Map<string, Entry>();
    for (const [name, row] of after) {
      const old = before.get(name);
      if (!old) both.set(name, { row, status: "added" });
      else if (changed.has(name)) both.set(name, { row, status: "changed", old });
      else both.set(name, { row, status: "same" });
    }
    for (const [name, row] of before) {
      if (!after.has(name)) both.set(name, { row, status: "removed" });
    }
    return ordered(both);
  }

  /** The graph before step `i` as entries. */
  plain(i: number): Map<string, Entry> {
    const entries = [...this.graphs[i]].map(([name, row]) => [name, { row, status: "same" }]);
    return ordered(new Map(entries as [string, Entry][]));
  }
}

function ordered(graph: Map<string, Entry>): Map<string, Entry> {
  const result = new Map<string, Entry>();
  const open = new Set<string>();
  for (const first of graph.keys()) {
    const stack = [first];
    while (stack.length) {
      const name = stack[stack.length - 1];
      const entry = graph.get(name);
      const missing =
        entry && !result.has(name) && !open.has(name)
          ? entry.row.inputs.filter((n) => graph.has(n) && !result.has(n) && !open.has(n))
          : [];
      open.add(name);
      if (missing.length) {
        stack.push(...missing.reverse());
      } else {
        stack.pop();
        if (entry) result.set(name, entry);
      }
    }
  }
  return result;
}

export function seconds(value: number): string {
  if (value >= 1) return `${value.toFixed(2)} s`;
  if (value >= 1e-3) return `${(value * 1e3).toFixed(2)} ms`;
  return `${(value * 1e6).toFixed(1)} µs`;
}

export function amount(value: number, unit: string): string {
  const scales: [number, string][] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  for (const [scale, prefix] of scales) {
    if (value >= scale) return `${(value / scale).toFixed(2)} ${prefix}${unit}`;
  }
  return `${value} ${unit}`;
}
