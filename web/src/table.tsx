// A table that sorts and filters; long ones are shown in parts.

import type { ComponentChildren } from "preact";
import { useMemo, useState } from "preact/hooks";

export interface Column<T> {
  title: string;
  value: (row: T) => string | number;
  show?: (row: T) => ComponentChildren;
  right?: boolean;
}

const PART = 200;

interface Props<T> {
  columns: Column<T>[];
  rows: T[];
  empty: string;
  label: string;
  first?: number;
  onSelect?: (row: T) => void;
}

export function Table<T>({ columns, rows, empty, label, first, onSelect }: Props<T>) {
  const [by, setBy] = useState<[number, boolean] | null>(first === undefined ? null : [first, true]);
  const [filter, setFilter] = useState("");
  const [parts, setParts] = useState(1);
  const shown = useMemo(() => {
    const wanted = filter.toLowerCase();
    const found = wanted
      ? rows.filter((r) => columns.some((c) => String(c.value(r)).toLowerCase().includes(wanted)))
      : rows.slice();
    if (by) {
      const [index, down] = by;
      const value = columns[index].value;
      found.sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
      });
    }
    return found;
  }, [rows, by, filter]);
  if (!rows.length) return <p class="empty">{empty}</p>;
  return (
    <div class="table">
      <input
        type="search"
        placeholder={`Filter ${rows.length} rows`}
        aria-label={`Filter ${label}`}
        value={filter}
        onInput={(e) => setFilter(e.currentTarget.value)}
      />
      <table aria-label={label}>
        <thead>
          <tr>
            {columns.map((c, i) => (
              <th class={c.right ? "right" : ""} aria-sort={by?.[0] === i ? (by[1] ? "descending" : "ascending") : "none"}>
                <button onClick={() => setBy([i, by?.[0] === i ? !by[1] : !!c.right])}>
                  {c.title}
                  {by?.[0] === i ? (by[1] ? " ↓" : " ↑") : ""}
                </button>
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {shown.slice(0, parts * PART).map((row) => (
            <tr
              class={onSelect ? "pick" : ""}
              tabIndex={onSelect ? 0 : undefined}
              onClick={() => onSelect?.(row)}
              onKeyDown={(e) => e.key === "Enter" && onSelect?.(row)}
            >
              {columns.map((c) => (
                <td class={c.right ? "right" : ""}>{c.show ? c.show(row) : c.value(row)}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
      {shown.length > parts * PART && (
        <button onClick={() => setParts(parts + 1)}>
          Show more ({shown.length - parts * PART} left)
        </button>
      )}
    </div>
  );
}
