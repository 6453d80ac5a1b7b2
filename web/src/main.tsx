// The page: steps on the left, one view at a time, details on the right.

import { render } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Entry, History, load, Report, seconds } from "./data";
import { Drawing } from "./draw";
import "./style.css";
import { Changes, Converters, Details, Kernels, Matches, Notes, Places, Plan } from "./views";

const VIEWS = { Graph: null, Matches, Converters, "Where it runs": Places, Plan, Kernels, Notes };
type View = keyof typeof VIEWS;
const NAMES = Object.keys(VIEWS) as View[];
type Side = "diff" | "before" | "after";

const KEYS: [string, string][] = [
  ["/", "search"],
  ["j, k or ↓, ↑ in the list", "next and previous step"],
  ["1 … 7", "the views"],
  ["d, b, a", "difference, before, after"],
  ["arrows, +, −, 0 on the graph", "move, zoom, show all"],
  ["t", "light or dark"],
  ["Esc", "close"],
  ["?", "this list"],
];

function App({ report }: { report: Report }) {
  const history = useMemo(() => new History(report), [report]);
  const last = report.steps.length;
  // -1 is the graph as captured, `last` the one that runs.
  const [step, setStep] = useState(last);
  const [side, setSide] = useState<Side>("diff");
  const [view, setView] = useState<View>("Graph");
  const [selected, setSelected] = useState<string | null>(null);
  const [query, setQuery] = useState("");
  const [at, setAt] = useState(0);
  const [theme, setTheme] = useTheme();
  const search = useRef<HTMLInputElement>(null);
  const help = useRef<HTMLDialogElement>(null);
  const list = useRef<HTMLOListElement>(null);

  const isStep = step >= 0 && step < last;
  const entries = useMemo(() => {
    if (!isStep) return history.plain(step < 0 ? 0 : last);
    return side === "diff" ? history.diff(step) : history.plain(step + Number(side === "after"));
  }, [history, step, side]);
  const found = useMemo(() => find(entries, query), [entries, query]);

  const show = (node: string): void => {
    const name = node.split("/")[0]; // a node inside a branch: its branch
    if (!entries.has(name)) {
      // It lived at another time: go to the last graph that has it.
      for (let i = last; i >= 0; i--) {
        if (history.before(i).has(name)) {
          setStep(i === last ? last : i);
          break;
        }
      }
    }
    setView("Graph");
    setSelected(name);
  };
  const choose = (next: (now: number) => number): void => {
    setStep((now) => Math.max(-1, Math.min(last, next(now))));
    setSelected(null);
    setView("Graph");
  };
  const go = (to: number): void => choose(() => to);
  useEffect(() => {
    list.current?.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" });
  }, [step]);
  useEffect(() => {
    const keys = (event: KeyboardEvent): void => {
      const typing = event.target instanceof HTMLInputElement && event.target.type !== "checkbox";
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "Escape") {
        if (query) setQuery("");
        else setSelected(null);
        search.current?.blur();
        return;
      }
      if (typing) return;
      if (event.key === "/") search.current?.focus();
      else if (event.key === "j") choose((now) => now + 1);
      else if (event.key === "k") choose((now) => now - 1);
      else if (event.key >= "1" && event.key <= "7") setView(NAMES[Number(event.key) - 1]);
      else if (event.key === "d") setSide("diff");
      else if (event.key === "b") setSide("before");
      else if (event.key === "a") setSide("after");
      else if (event.key === "t") setTheme();
      else if (event.key === "?") help.current?.showModal();
      else return;
      event.preventDefault();
    };
    document.addEventListener("keydown", keys);
    return () => document.removeEventListener("keydown", keys);
  });

  const searchKeys = (event: KeyboardEvent): void => {
    if (event.key === "Enter" && found.length) {
      show(found[Math.min(at, found.length - 1)].row.name);
      setQuery("");
      search.current?.blur(); // so that the keys of the page work again
    } else if (event.key === "ArrowDown") setAt(Math.min(at + 1, found.length - 1));
    else if (event.key === "ArrowUp") setAt(Math.max(at - 1, 0));
    else return;
    event.preventDefault();
  };
  const listKeys = (event: KeyboardEvent): void => {
    if (event.key === "ArrowDown") choose((now) => now + 1);
    else if (event.key === "ArrowUp") choose((now) => now - 1);
    else if (event.key === "Home") go(-1);
    else if (event.key === "End") go(last);
    else return;
    event.preventDefault();
  };

  const Shown = VIEWS[view];
  const entry = selected === null ? undefined : entries.get(selected);
  return (
    <>
      <header>
        <h1>{report.name}</h1>
        <span class="about">
          {report.front_end}, mode {report.mode}, {report.device} · {report.placed.length} nodes,{" "}
          {(report.coverage * 100).toFixed(0)} % compiled · {Object.entries(report.seconds).map(([k, v]) => `${k} ${seconds(v)}`).join(", ")}
        </span>
        <div class="search">
          <input
            ref={search}
            type="search"
            placeholder="Search nodes: name, op, type, module, line  ( / )"
            aria-label="Search nodes"
            aria-controls="found"
            value={query}
            onInput={(e) => { setQuery(e.currentTarget.value); setAt(0); }}
            onKeyDown={searchKeys}
          />
          {query && (
            <ul id="found" role="listbox">
              {found.length === 0 && <li class="empty">No node has that.</li>}
              {found.map(({ row, status }, i) => (
                <li role="option" aria-selected={i === at} onMouseDown={() => { show(row.name); setQuery(""); }}>
                  <b class={status}>{row.name}</b> {row.op} <span>{row.type}</span> <i>{row.module}</i>
                </li>
              ))}
            </ul>
          )}
        </div>
        <button onClick={setTheme} title="Light or dark (t)">{theme === "dark" ? "☀" : "☾"}</button>
        <button onClick={() => help.current?.showModal()} title="Keys (?)">?</button>
      </header>
      <nav aria-label="Steps">
        <h2>Pipeline</h2>
        <ol role="listbox" tabIndex={0} aria-label="Steps" ref={list} onKeyDown={listKeys}>
          <li role="option" aria-selected={step === -1} onClick={() => go(-1)}>
            <b>captured</b> <span>{history.before(0).size} nodes</span>
          </li>
          {report.steps.map((s, i) => (
            <li
              role="option"
              aria-selected={step === i}
              class={s.added + s.removed + s.changed ? "" : "idle"}
              onClick={() => go(i)}
            >
              <b>{s.name}</b> <em>{s.stage}</em>
              <span class="counts">
                {s.added > 0 && <i class="added">+{s.added}</i>} {s.removed > 0 && <i class="removed">−{s.removed}</i>}{" "}
                {s.changed > 0 && <i class="changed">~{s.changed}</i>} {s.hits && <i>{s.hits.length} hits</i>}{" "}
                {s.seconds !== null && <i class="time">{seconds(s.seconds)}</i>}
              </span>
            </li>
          ))}
          <li role="option" aria-selected={step === last} onClick={() => go(last)}>
            <b>what runs</b> <span>{history.before(last).size} nodes</span>
          </li>
        </ol>
      </nav>
      <main>
        <div class="tabs" role="tablist">
          {NAMES.map((name) => (
            <button role="tab" aria-selected={view === name} onClick={() => setView(name)}>{name}</button>
          ))}
          {view === "Graph" && isStep && (
            <div class="segments" role="group" aria-label="Which side">
              {(["diff", "before", "after"] as Side[]).map((one) => (
                <button aria-pressed={side === one} onClick={() => setSide(one)}>{one}</button>
              ))}
            </div>
          )}
        </div>
        <div class={`view ${view === "Graph" ? "graph" : ""}`} role="tabpanel" aria-label={view}>
          {Shown ? (
            <Shown report={report} onNode={show} />
          ) : (
            <>
              <Drawing entries={entries} selected={selected} theme={theme} onSelect={setSelected} />
              {entry ? (
                <aside><Details report={report} entry={entry} onNode={show} onClose={() => setSelected(null)} /></aside>
              ) : (
                isStep && side === "diff" && (
                  <aside><Changes step={report.steps[step]} entries={entries} onNode={show} /></aside>
                )
              )}
            </>
          )}
        </div>
      </main>
      <dialog ref={help}>
        <h2>Keys</h2>
        <dl>{KEYS.map(([key, what]) => [<dt>{key}</dt>, <dd>{what}</dd>])}</dl>
        <form method="dialog"><button>Close</button></form>
      </dialog>
    </>
  );
}

function find(entries: Map<string, Entry>, query: string): Entry[] {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return [];
  const found: [number, Entry][] = [];
  for (const entry of entries.values()) {
    const { name, op, type, module, line } = entry.row;
    const text = `${name} ${op} ${type} ${module} ${line}`.toLowerCase();
    if (!words.every((word) => text.includes(word))) continue;
    const rank = name.toLowerCase() === words[0] ? 0 : name.toLowerCase().startsWith(words[0]) ? 1 : 2;
    found.push([rank, entry]);
  }
  return found.sort((a, b) => a[0] - b[0]).slice(0, 40).map(([, entry]) => entry);
}

/** The system's theme, or the one that was asked for. */
function useTheme(): [string, () => void] {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const [theme, setTheme] = useState(system.matches ? "dark" : "light");
  document.documentElement.dataset.theme = theme;
  useEffect(() => {
    const follow = (): void => setTheme(system.matches ? "dark" : "light");
    system.addEventListener("change", follow);
    return () => system.removeEventListener("change", follow);
  }, []);
  return [theme, () => setTheme(theme === "dark" ? "light" : "dark")];
}

load().then((report) => render(<App report={report} />, document.getElementById("app")!));
