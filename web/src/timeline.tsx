// The plan on a time axis: a lane a stream, an arrow a wait, memory below. D3 scales and zooms.

import { axisBottom, axisLeft } from "d3-axis";
import { scaleLinear } from "d3-scale";
import { select } from "d3-selection";
import { area, curveStepAfter } from "d3-shape";
import { zoom } from "d3-zoom";
import { useEffect, useRef } from "preact/hooks";
import type { Span, Timeline } from "./data";
import { amount, seconds } from "./data";

const LANE = 46;
const BAR = 26;
const LEFT = 96;
/** Room for half of the last tick's text. */
const RIGHT = 36;
const MEMORY = 120;

interface Props {
  timeline: Timeline;
  selected: number | null;
  onSelect: (index: number | null) => void;
}

export function Lanes({ timeline, selected, onSelect }: Props) {
  const place = useRef<SVGSVGElement>(null);
  const height = timeline.streams.length * LANE + MEMORY + 70;

  useEffect(() => {
    const svg = select(place.current!);
    svg.selectAll("*").remove();
    const width = place.current!.clientWidth || 900;
    const full = scaleLinear([0, timeline.seconds || 1e-6], [LEFT, width - RIGHT]);
    let x = full;
    const lane = new Map(timeline.streams.map((name, i) => [name, 14 + i * LANE]));
    const bottom = timeline.streams.length * LANE + 14;

    svg
      .append("defs")
      .append("marker")
      .attr("id", "tip")
      .attr("viewBox", "0 0 8 8")
      .attr("refX", 7)
      .attr("refY", 4)
      .attr("markerWidth", 7)
      .attr("markerHeight", 7)
      .attr("orient", "auto")
      .append("path")
      .attr("d", "M0,0L8,4L0,8z")
      .attr("class", "tip");
    svg
      .append("clipPath")
      .attr("id", "inside")
      .append("rect")
      .attr("x", LEFT)
      .attr("width", width - LEFT - RIGHT + 8)
      .attr("height", height);
    svg
      .append("g")
      .selectAll("text")
      .data(timeline.streams)
      .join("text")
      .attr("class", "lane")
      .attr("x", 8)
      .attr("y", (name) => lane.get(name)! + BAR / 2 + 4)
      .text((name) => name);
    const inside = svg.append("g").attr("clip-path", "url(#inside)");
    const axis = svg.append("g").attr("class", "axis").attr("transform", `translate(0,${bottom})`);
    const top = bottom + 44;
    const most = Math.max(1, ...timeline.memory.map(([, size]) => size));
    const y = scaleLinear([0, most], [top + MEMORY - 16, top]).nice();
    svg
      .append("g")
      .attr("class", "axis")
      .attr("transform", `translate(${LEFT},0)`)
      .call(axisLeft(y).ticks(4).tickFormat((v) => amount(Number(v), "B")));
    svg.append("text").attr("class", "lane").attr("x", 8).attr("y", top - 8).text("memory");

    const draw = (): void => {
      inside.selectAll("*").remove();
      // Of bars that end on one pixel of a lane, the first stands for all.
      const reached = new Map<string, number>();
      const seen = timeline.spans.filter((s) => {
        const end = x(s.end);
        if (end < LEFT || x(s.start) > width || end < (reached.get(s.stream) ?? 0) + 1) return false;
        reached.set(s.stream, end);
        return true;
      });
      const bars = inside
        .selectAll<SVGGElement, Span>("g.bar")
        .data(seen)
        .join("g")
        .attr("class", (s) => `bar${s.critical ? " critical" : ""}${s.index === selected ? " on" : ""}`)
        .attr("transform", (s) => `translate(${x(s.start)},${lane.get(s.stream)!})`)
        .on("click", (_, s) => onSelect(s.index));
      bars
        .append("rect")
        .attr("width", (s) => Math.max(1, x(s.end) - x(s.start) - 0.5))
        .attr("height", BAR)
        .attr("rx", 2);
      bars
        .append("title")
        .text((s) => `${s.kernel}\n${seconds(s.end - s.start)} from ${seconds(s.start)}`);
      bars
        .filter((s) => x(s.end) - x(s.start) > 34)
        .append("text")
        .attr("x", 4)
        .attr("y", BAR / 2 + 4)
        .text((s) => s.kernel.slice(0, Math.floor((x(s.end) - x(s.start) - 8) / 6.4)));
      inside
        .selectAll("path.wait")
        .data(timeline.arrows)
        .join("path")
        .attr("class", "wait")
        .attr("marker-end", "url(#tip)")
        .attr("d", (arrow) => {
          const [from, to] = [timeline.spans[arrow.before], timeline.spans[arrow.after]];
          const [x1, y1] = [x(from.end), lane.get(from.stream)! + BAR / 2];
          const [x2, y2] = [x(to.start), lane.get(to.stream)! + BAR / 2];
          return `M${x1},${y1}C${x1 + 14},${y1} ${x2 - 14},${y2} ${x2},${y2}`;
        })
        .append("title")
        .text((arrow) => arrow.event);
      const ends: [number, number][] = [
        ...timeline.memory,
        [timeline.seconds, timeline.memory[timeline.memory.length - 1]?.[1] ?? 0],
      ];
      const shape = area<[number, number]>()
        .x(([at]) => x(at))
        .y0(y(0))
        .y1(([, size]) => y(size))
        .curve(curveStepAfter);
      inside.append("path").attr("class", "memory").attr("d", shape(ends));
      axis.call(axisBottom(x).ticks(8).tickFormat((v) => seconds(Number(v))));
    };
    draw();
    svg.call(
      zoom<SVGSVGElement, unknown>()
        .scaleExtent([1, 2000])
        .extent([[LEFT, 0], [width - RIGHT, height]])
        .translateExtent([[LEFT, 0], [width - RIGHT, height]])
        .on("zoom", (event) => {
          x = event.transform.rescaleX(full);
          draw();
        }) as never,
    );
  }, [timeline, selected]);

  return <svg class="lanes" ref={place} height={height} role="img" aria-label="Timeline of the plan" />;
}
