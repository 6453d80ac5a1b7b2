// Collapsing by module: which boxes are drawn for a graph, and what lies in each.

import type { Entry, Status } from "./data";

/** How many boxes are opened without being asked. */
export const BUDGET = 90;
/** More boxes than this are not drawn at once. */
export const MOST = 700;
const CHUNK = 40;

export interface Group {
  id: string;
  label: string;
  parent: Group | null;
  groups: Group[];
  nodes: string[];
  size: number;
  touched: number;
}

export interface Box {
  id: string;
  parent?: string;
  entry?: Entry;
  group?: Group;
  open?: boolean;
  status: Status;
}

export interface Link {
  source: string;
  target: string;
  status: "same" | "added" | "removed";
}

export class Tree {
  readonly root: Group = group("", "");
  readonly home = new Map<string, Group>();
  private readonly groups = new Map<string, Group>([["", this.root]]);

  constructor(readonly entries: Map<string, Entry>, constants: boolean) {
    const users = new Map<string, string>();
    for (const [name, { row }] of entries) {
      for (const input of row.inputs) if (!users.has(input)) users.set(input, name);
    }
    for (const [name, entry] of entries) {
      if (entry.row.kind === "constant" && entry.status === "same" && !constants) continue;
      let module = entry.row.module;
      if (entry.row.kind === "constant") module = entries.get(users.get(name)!)?.row.module ?? "";
      const home = this.at(module);
      home.nodes.push(name);
    }
    this.split(this.root);
    this.count(this.root);
  }

  private at(path: string): Group {
    const known = this.groups.get(path);
    if (known) return known;
    const cut = path.lastIndexOf(".");
    const parent = this.at(cut < 0 ? "" : path.slice(0, cut));
    const made = group(path, cut < 0 ? path : path.slice(cut + 1));
    parent.groups.push(made);
    this.groups.set(path, made);
    return made;
  }

  /** A long row of boxes becomes boxes of neighbours, so that no drawing is endless. */
  private split(one: Group): void {
    one.groups.forEach((inner) => this.split(inner));
    if (one.nodes.length > 2 * CHUNK) {
      const made: Group[] = [];
      for (let i = 0; i < one.nodes.length; i += CHUNK) {
        const nodes = one.nodes.slice(i, i + CHUNK);
        const label = `${nodes[0]} … ${nodes[nodes.length - 1]}`;
        const inner = group(`${one.id}#${i}`, label);
        inner.nodes = nodes;
        made.push(inner);
      }
      one.nodes = [];
      one.groups.push(...made);
    }
    for (let level = 0; one.groups.length > 2 * CHUNK; level++) {
      const made: Group[] = [];
      for (let i = 0; i < one.groups.length; i += CHUNK) {
        const inner = one.groups.slice(i, i + CHUNK);
        const label = `${inner[0].label} … ${inner[inner.length - 1].label}`;
        const outer = group(`${one.id}##${level}.${i}`, label);
        outer.groups = inner;
        made.push(outer);
      }
      one.groups = made;
    }
  }

  private count(one: Group): void {
    this.groups.set(one.id, one);
    one.nodes.forEach((name) => this.home.set(name, one));
    one.size = one.nodes.length;
    one.touched = one.nodes.filter((n) => this.entries.get(n)!.status !== "same").length;
    for (const inner of one.groups) {
      inner.parent = one;
      this.count(inner);
      one.size += inner.size;
      one.touched += inner.touched;
    }
  }

  find(id: string): Group | undefined {
    return this.groups.get(id);
  }

  /** Groups to open at first: what changed before what did not, as far as it stays readable. */
  opening(): Set<string> {
    const open = new Set([""]);
    const queue = [...this.root.groups];
    let drawn = this.root.groups.length + this.root.nodes.length;
    while (queue.length) {
      queue.sort((a, b) => Number(b.touched > 0) - Number(a.touched > 0) || a.size - b.size);
      const next = queue.shift()!;
      const more = next.groups.length + next.nodes.length - 1;
      if (drawn + more > BUDGET) continue;
      drawn += more;
      open.add(next.id);
      queue.push(...next.groups);
    }
    return open;
  }

  /** The groups around a node, to open so that it is seen. */
  around(name: string): string[] {
    const found: string[] = [];
    for (let g: Group | null = this.home.get(name) ?? null; g; g = g.parent) found.push(g.id);
    return found;
  }

  /** What is drawn when these groups are open. */
  boxes(open: Set<string>): { boxes: Box[]; links: Link[] } {
    const boxes: Box[] = [];
    const shown = new Map<string, string>();
    const walk = (one: Group, parent: string | undefined): void => {
      for (const inner of one.groups) {
        if (inner.size === 0) continue;
        const isOpen = open.has(inner.id);
        const status: Status = inner.touched ? "changed" : "same";
        boxes.push({ id: `g:${inner.id}`, parent, group: inner, open: isOpen, status });
        if (isOpen) walk(inner, `g:${inner.id}`);
        else everything(inner, (name) => shown.set(name, `g:${inner.id}`));
      }
      for (const name of one.nodes) {
        const entry = this.entries.get(name)!;
        boxes.push({ id: `n:${name}`, parent, entry, status: entry.status });
        shown.set(name, `n:${name}`);
      }
    };
    walk(this.root, undefined);
    const links = new Map<string, Link>();
    const link = (from: string, to: string, status: Link["status"]): void => {
      const [source, target] = [shown.get(from), shown.get(to)];
      if (!source || !target || source === target) return;
      const key = `${source}>${target}`;
      const known = links.get(key);
      if (!known) links.set(key, { source, target, status });
      else if (known.status !== status) known.status = "same";
    };
    for (const [name, { row, status, old }] of this.entries) {
      const was = new Set(old?.inputs ?? (status === "added" ? [] : row.inputs));
      const is = new Set(status === "removed" ? [] : row.inputs);
      for (const input of is) link(input, name, was.has(input) ? "same" : "added");
      for (const input of was) if (!is.has(input)) link(input, name, "removed");
    }
    return { boxes, links: [...links.values()] };
  }
}

function group(id: string, label: string): Group {
  return { id, label, parent: null, groups: [], nodes: [], size: 0, touched: 0 };
}

function everything(one: Group, see: (name: string) => void): void {
  one.nodes.forEach(see);
  one.groups.forEach((inner) => everything(inner, see));
}
