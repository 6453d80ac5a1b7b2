// The drawn graph: Cytoscape draws, dagre lays out, modules open and close.

import cytoscape from "cytoscape";
import dagre from "cytoscape-dagre";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Entry } from "./data";
import { MOST, Tree } from "./groups";

cytoscape.use(dagre as unknown as cytoscape.Ext);

const READABLE = 0.8;

interface Props {
  entries: Map<string, Entry>;
  selected: string | null;
  theme: string;
  onSelect: (name: string | null) => void;
}

export function Drawing({ entries, selected, theme, onSelect }: Props) {
  const [constants, setConstants] = useState(false);
  const tree = useMemo(() => new Tree(entries, constants), [entries, constants]);
  const [open, setOpen] = useState<Set<string>>(() => tree.opening());
  const [said, setSaid] = useState("");
  const place = useRef<HTMLDivElement>(null);
  const cy = useRef<cytoscape.Core | null>(null);

  // Another graph: open what changed, and what the selected node lies in.
  useEffect(() => {
    const next = tree.opening();
    if (selected) tree.around(selected).forEach((id) => next.add(id));
    setOpen(next);
  }, [tree]);
  useEffect(() => {
    if (!selected) return;
    const missing = tree.around(selected).filter((id) => !open.has(id));
    if (missing.length) setOpen(new Set([...open, ...missing]));
  }, [selected]);

  const toggle = (id: string): void => {
    const next = new Set(open);
    if (!next.delete(id)) next.add(id);
    if (tree.boxes(next).boxes.length > MOST) {
      setSaid(`That would draw more than ${MOST} boxes. Close others first.`);
      return;
    }
    setSaid("");
    setOpen(next);
  };

  useEffect(() => {
    const { boxes, links } = tree.boxes(open);
    const elements: cytoscape.ElementDefinition[] = [
      ...boxes.map((box) => ({
        data: { id: box.id, parent: box.parent, ...sized(label(box.entry, box.group, box.open)) },
        classes: [box.status, box.group ? "group" : box.entry!.row.kind, box.open ? "open" : ""]
          .filter(Boolean)
          .join(" "),
      })),
      ...links.map((link) => ({
        data: { id: `${link.source}>${link.target}`, source: link.source, target: link.target },
        classes: link.status,
      })),
    ];
    const drawn = cytoscape({
      container: place.current!,
      elements,
      style: style(),
      minZoom: 0.05,
      maxZoom: 3,
      layout: {
        name: "dagre",
        rankDir: "TB",
        nodeSep: 18,
        rankSep: 34,
        animate: false,
        fit: true,
        padding: 20,
      } as cytoscape.LayoutOptions,
    });
    drawn.on("tap", "node", (event) => {
      const id = event.target.id() as string;
      if (id.startsWith("n:")) onSelect(id.slice(2));
      else toggle(id.slice(2));
    });
    drawn.on("tap", (event) => {
      if (event.target === drawn) onSelect(null);
    });
    // Small graphs are not blown up; of large ones the first change, or the start, is readable.
    if (drawn.zoom() > 1.2) {
      drawn.zoom(1.2);
      drawn.center();
    } else if (drawn.zoom() < READABLE) {
      const leaves = drawn.nodes(":childless");
      const touched = leaves.filter(".added, .removed, .changed");
      const top = (touched.nonempty() ? touched : leaves).min((node) => node.position("y")).ele;
      drawn.zoom(READABLE);
      drawn.center(top);
      drawn.panBy({ x: 0, y: 60 - top.renderedPosition().y });
      fill(drawn);
    }
    cy.current = drawn;
    place.current!.dataset.boxes = String(boxes.length);
    (place.current! as unknown as { drawn: cytoscape.Core }).drawn = drawn;
    return () => drawn.destroy();
  }, [tree, open, theme]);

  useEffect(() => {
    const drawn = cy.current;
    if (!drawn) return;
    drawn.$(":selected").unselect();
    const node = selected ? drawn.getElementById(`n:${selected}`) : drawn.collection();
    if (node.nonempty()) {
      node.select();
      if (drawn.zoom() < 0.6) drawn.zoom(0.6);
      drawn.center(node);
    }
  }, [selected, tree, open, theme]);

  const zoom = (by: number): void => {
    const drawn = cy.current!;
    drawn.zoom({
      level: drawn.zoom() * by,
      renderedPosition: { x: drawn.width() / 2, y: drawn.height() / 2 },
    });
  };
  const keys = (event: KeyboardEvent): void => {
    const pan = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] };
    const move = pan[event.key as keyof typeof pan];
    if (move) cy.current!.panBy({ x: move[0], y: move[1] });
    else if (event.key === "+" || event.key === "=") zoom(1.25);
    else if (event.key === "-") zoom(0.8);
    else if (event.key === "0") cy.current!.fit(undefined, 20);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };

  return (
    <div class="drawing">
      <div class="tools">
        <button onClick={() => zoom(1.25)} title="Zoom in (+)">+</button>
        <button onClick={() => zoom(0.8)} title="Zoom out (-)">−</button>
        <button onClick={() => cy.current!.fit(undefined, 20)} title="Show all (0)">Fit</button>
        <button onClick={() => setOpen(new Set([""]))} title="Close every module">Collapse</button>
        <button onClick={() => setOpen(tree.opening())} title="Open what changed">Reset</button>
        <label>
          <input
            type="checkbox"
            checked={constants}
            onChange={(e) => setConstants(e.currentTarget.checked)}
          />{" "}
          constants
        </label>
        <span class="hint" role="status">{said || "A box with a count is a module: click to open or close it."}</span>
      </div>
      <div
        class="canvas"
        ref={place}
        tabIndex={0}
        role="application"
        aria-label="The graph. Arrow keys move it, plus and minus zoom, 0 shows all."
        onKeyDown={keys}
      />
    </div>
  );
}

/** No empty room beside a graph that is wider than the canvas; a narrow one stands in its middle. */
function fill(drawn: cytoscape.Core): void {
  const edge = 20;
  const { x1, x2 } = drawn.elements().renderedBoundingBox();
  const [left, right] = [edge - x1, drawn.width() - edge - x2];
  const by = left > right ? Math.min(left, Math.max(right, 0)) : (left + right) / 2;
  drawn.panBy({ x: by, y: 0 });
}

function label(entry?: Entry, group?: { label: string; size: number; touched: number }, open = false) {
  if (group) {
    const touched = group.touched ? `, ${group.touched} changed` : "";
    return open ? group.label : `${group.label}\n${group.size} nodes${touched}`;
  }
  const { name, op, type, kind } = entry!.row;
  if (kind === "output") return "output";
  return kind === "call" ? `${name}\n${op.replace(/^aten\./, "")}\n${type}` : `${name}\n${type}`;
}

/** A label with the room that it takes: the font has one width for all letters. */
function sized(text: string) {
  const lines = text.split("\n");
  const widest = Math.max(...lines.map((line) => line.length));
  return { label: text, width: widest * 6.7 + 4, height: lines.length * 13 };
}

function style(): cytoscape.StylesheetJson {
  const css = getComputedStyle(document.documentElement);
  const color = (name: string): string => css.getPropertyValue(`--${name}`).trim();
  const node = (status: string) => ({
    selector: `node.${status}`,
    style: { "background-color": color(`${status}-bg`), "border-color": color(status) },
  });
  return [
    {
      selector: "node",
      style: {
        label: "data(label)",
        "text-wrap": "wrap",
        "text-valign": "center",
        "text-halign": "center",
        "font-size": 11,
        "font-family": "ui-monospace, monospace",
        color: color("text"),
        shape: "round-rectangle",
        width: "data(width)",
        height: "data(height)",
        padding: "7px",
        "border-width": 1,
        "border-color": color("line"),
        "background-color": color("box"),
      },
    },
    { selector: "node.input, node.output", style: { shape: "round-tag" } },
    { selector: "node.constant", style: { "border-style": "dashed" } },
    {
      selector: "node.group",
      style: { "background-color": color("group"), "font-weight": "bold", "border-width": 1.5 },
    },
    ...(["added", "removed", "changed"].map(node) as cytoscape.StylesheetJson),
    {
      selector: "node.open",
      style: {
        "background-color": color("group"),
        "background-opacity": 0.35,
        "text-valign": "top",
        "text-halign": "center",
        "font-weight": "normal",
        padding: "12px",
      },
    },
    {
      selector: "node:selected",
      style: { "border-width": 3, "border-color": color("accent") },
    },
    {
      selector: "edge",
      style: {
        width: 1.2,
        "line-color": color("edge"),
        "target-arrow-color": color("edge"),
        "target-arrow-shape": "triangle",
        "arrow-scale": 0.8,
        "curve-style": "bezier",
      },
    },
    ...(["added", "removed"].map((status) => ({
      selector: `edge.${status}`,
      style: {
        "line-color": color(status),
        "target-arrow-color": color(status),
        "line-style": status === "removed" ? "dashed" : "solid",
      },
    })) as cytoscape.StylesheetJson),
  ] as cytoscape.StylesheetJson;
}
