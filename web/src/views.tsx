// One view a question: what matched, who converted, where it runs, when, how fast.

import { useState } from "preact/hooks";
import type { Conversion, Entry, Kernel, Placed, Report, Row, Step } from "./data";
import { amount, seconds } from "./data";
import { Table } from "./table";
import { Lanes } from "./timeline";

interface Props {
  report: Report;
  onNode: (name: string) => void;
}

export function Matches({ report }: Props) {
  const tried = report.steps.filter((step) => step.hits !== null);
  if (!tried.length) return <p class="empty">No pattern was registered for this compile.</p>;
  return (
    <div class="cards">
      {tried.map((step) => (
        <section class={`card ${step.hits!.length ? "hit" : "miss"}`}>
          <h3>
            {step.name} <span class="count">{step.hits!.length} match{step.hits!.length === 1 ? "" : "es"}</span>
          </h3>
          {counted(step.hits!).map(([line, count]) => (
            <p class="code">{count > 1 ? `${count} × ` : ""}{line}</p>
          ))}
          {step.miss && <p><b>Nearest miss:</b> <span class="code">{step.miss}</span></p>}
        </section>
      ))}
    </div>
  );
}

function counted(lines: string[]): [string, number][] {
  const counts = new Map<string, number>();
  lines.forEach((line) => counts.set(line, (counts.get(line) ?? 0) + 1));
  return [...counts];
}

export function Converters({ report, onNode }: Props) {
  return (
    <Table<Conversion>
      label="converters"
      rows={report.conversions}
      empty="No converter was asked: none is registered for an operator of this program."
      onSelect={(c) => onNode(c.node)}
      columns={[
        { title: "node", value: (c) => c.node },
        { title: "operator", value: (c) => c.op },
        { title: "converter", value: (c) => c.converter },
        {
          title: "answer",
          value: (c) => c.reason ?? "converted",
          show: (c) => <span class={c.reason ? "bad" : "good"}>{c.reason ? `declined: ${c.reason}` : "converted"}</span>,
        },
        { title: "line", value: (c) => c.line ?? "" },
        { title: "defined at", value: (c) => c.where },
      ]}
    />
  );
}

export function Places({ report, onNode }: Props) {
  const counts = new Map<string, number>();
  report.placed.forEach((p) => counts.set(p.kind, (counts.get(p.kind) ?? 0) + 1));
  const all = report.placed.length;
  return (
    <div>
      <p>
        <b>{(report.coverage * 100).toFixed(1)} %</b> of {all} nodes are compiled
        ({report.compiled}, in {report.regions} region{report.regions === 1 ? "" : "s"}).
      </p>
      <div class="bars">
        {[...counts].sort((a, b) => b[1] - a[1]).map(([kind, count]) => (
          <div class="share">
            <span>{kind}</span>
            <meter min={0} max={all} value={count} aria-label={kind} />
            <span>{count}</span>
          </div>
        ))}
      </div>
      <Table<Placed>
        label="nodes"
        rows={report.placed}
        empty="The program has no calls."
        onSelect={(p) => onNode(p.node)}
        columns={[
          { title: "node", value: (p) => p.node },
          { title: "operator", value: (p) => p.op },
          { title: "runs", value: (p) => p.runs, show: (p) => <span class={`runs ${p.runs}`}>{p.runs}</span> },
          { title: "in", value: (p) => p.region },
          { title: "stream", value: (p) => report.streams[p.node] ?? "" },
          { title: "why", value: (p) => (p.reason.startsWith(p.kind) ? p.reason : `${p.kind}: ${p.reason}`) },
          { title: "line", value: (p) => p.line ?? "" },
        ]}
      />
    </div>
  );
}

export function Plan({ report, onNode }: Props) {
  const { plan } = report;
  const [which, setWhich] = useState<"predicted" | "measured">(plan.measured ? "measured" : "predicted");
  const [selected, setSelected] = useState<number | null>(null);
  const timeline = plan[which] ?? plan.predicted;
  const kernel = selected === null ? null : plan.kernels[selected];
  return (
    <div>
      <div class="tools">
        <div class="segments" role="group" aria-label="Which times">
          <button aria-pressed={which === "predicted"} onClick={() => setWhich("predicted")}>Predicted</button>
          <button
            aria-pressed={which === "measured"}
            disabled={!plan.measured}
            title={plan.measured ? "" : "compiled.profile(inputs) measures"}
            onClick={() => setWhich("measured")}
          >
            Measured
          </button>
        </div>
        <span class="hint">
          {seconds(timeline.seconds)} in {timeline.spans.length} launches on {timeline.streams.length}{" "}
          stream{timeline.streams.length === 1 ? "" : "s"}; the critical path is red; scroll zooms.
          {which === "predicted" && !plan.machine.measured && " Predicted with round numbers for a machine: only ratios mean something."}
        </span>
      </div>
      <Lanes timeline={timeline} selected={selected} onSelect={setSelected} />
      {kernel && (
        <p>
          <b class="code">{kernel.name}</b>: {kernel.nodes.map((name) => (
            <button class="link" onClick={() => onNode(name)}>{name}</button>
          ))}
        </p>
      )}
      <details open={timeline.spans.length < 40}>
        <summary>The plan as text</summary>
        <pre>{plan.text}</pre>
      </details>
    </div>
  );
}

function first(nodes: string[]): string {
  return nodes.length > 2 ? `${nodes[0]} and ${nodes.length - 1} more` : nodes.join(", ");
}

export function Kernels({ report, onNode }: Props) {
  const { plan } = report;
  const measured = plan.call !== null;
  return (
    <div>
      <p>
        {measured
          ? `A call takes ${seconds(plan.call!)}. Peaks of this machine as measured: `
          : "Not measured: compiled.profile(inputs) fills in times. Peaks assumed: "}
        {amount(plan.machine.bandwidth, "B/s")}, {amount(plan.machine.flops, "FLOP/s")}.
      </p>
      <Table<Kernel>
        label="kernels"
        rows={plan.kernels}
        empty="The plan launches nothing."
        first={1}
        onSelect={(k) => k.nodes.length && onNode(k.nodes[0])}
        columns={[
          { title: "kernel", value: (k) => k.name },
          {
            title: measured ? "time" : "predicted",
            value: (k) => k.seconds ?? k.predicted,
            show: (k) => seconds(k.seconds ?? k.predicted),
            right: true,
          },
          { title: "bytes", value: (k) => k.bytes, show: (k) => amount(k.bytes, "B"), right: true },
          { title: "FLOPs", value: (k) => k.flops, show: (k) => amount(k.flops, "FLOP"), right: true },
          ...(measured
            ? [{
                title: "of roofline",
                value: (k: Kernel) => k.share ?? 0,
                show: (k: Kernel) => <span><meter min={0} max={1} value={k.share ?? 0} /><i class="share">{((k.share ?? 0) * 100).toFixed(1)} %</i></span>,
                right: true,
              }]
            : []),
          { title: "stream", value: (k) => k.stream },
          { title: "nodes", value: (k) => k.nodes.join(" "), show: (k) => first(k.nodes) },
        ]}
      />
    </div>
  );
}

export function Notes({ report }: Props) {
  return (
    <div>
      <dl>
        <dt>program</dt><dd>{report.name} ({report.front_end}, mode {report.mode}, {report.device})</dd>
        <dt>versions</dt><dd>torchgraft {report.torchgraft}, torch {report.torch}</dd>
        {Object.entries(report.seconds).map(([part, took]) => [<dt>{part}</dt>, <dd>{seconds(took)}</dd>])}
      </dl>
      {report.notes.length ? report.notes.map((note) => <p class="note">{note}</p>) : <p class="empty">No notes.</p>}
    </div>
  );
}

interface DetailsProps extends Props {
  entry: Entry;
  onClose: () => void;
}

export function Details({ report, entry, onNode, onClose }: DetailsProps) {
  const { row, old, status } = entry;
  const placed = report.placed.find((p) => p.node === row.name);
  return (
    <div class="details" aria-live="polite">
      <button class="close" onClick={onClose} aria-label="Close the details">×</button>
      <h3 class={status}>{row.name}</h3>
      <p class="state">{status === "same" ? row.kind : `${row.kind}, ${status} here`}</p>
      <dl>
        <dt>op</dt><dd class="code">{row.op}</dd>
        {row.type && [<dt>type</dt>, <dd class="code">{row.type}</dd>]}
        <dt>call</dt><dd class="code">({row.args})</dd>
        {old && [<dt>was</dt>, <dd class="code removed">{old.op}({old.args})</dd>]}
        {row.module && [<dt>module</dt>, <dd class="code">{row.module}</dd>]}
        {row.line && [<dt>line</dt>, <dd class="code">{row.line}</dd>]}
        {placed && [<dt>runs</dt>, <dd>{placed.runs}, {placed.region}: {placed.reason}</dd>]}
        {report.streams[row.name] && [<dt>stream</dt>, <dd>{report.streams[row.name]}</dd>]}
        <dt>inputs</dt>
        <dd>{row.inputs.length ? row.inputs.map((n) => <button class="link" onClick={() => onNode(n)}>{n}</button>) : "none"}</dd>
      </dl>
      {[row.name, ...row.inputs].filter((n) => n in report.branches).map((n) => (
        <details open>
          <summary>branch {n}</summary>
          <pre>{report.branches[n]}</pre>
        </details>
      ))}
    </div>
  );
}

interface ChangesProps {
  step: Step;
  entries: Map<string, Entry>;
  onNode: (name: string) => void;
}

const SIGNS = { added: "+", removed: "−", changed: "~", same: "" };

export function Changes({ step, entries, onNode }: ChangesProps) {
  const [all, setAll] = useState(false);
  const found = [...entries.values()].filter((e) => e.status !== "same");
  const shown = all ? found : found.slice(0, 150);
  const call = (row: Row): string => (row.kind === "call" ? `${row.op}(${row.args})` : row.op);
  return (
    <div class="changes">
      <h3>{step.name}</h3>
      <p class="state">
        {step.stage}: <span class="added">+{step.added}</span> <span class="removed">−{step.removed}</span>{" "}
        <span class="changed">~{step.changed}</span>
      </p>
      {found.length === 0 && <p class="empty">It changed nothing.</p>}
      <ol>
        {shown.map((e) => (
          <li>
            <button class={`change ${e.status}`} onClick={() => onNode(e.row.name)}>
              <b>{SIGNS[e.status]} {e.row.name}</b>
              {e.old && <del>{call(e.old)}</del>}
              <span>{call(e.row)}</span>
            </button>
          </li>
        ))}
      </ol>
      {found.length > shown.length && <button onClick={() => setAll(true)}>Show all {found.length}</button>}
    </div>
  );
}
