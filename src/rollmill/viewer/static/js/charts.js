// Line charts over steps, drawn by uPlot, with one cursor shared by all charts of a page.

import uPlot from "../vendor/uplot/uPlot.esm.js";
import { figure, h, fill, resolved, tick } from "./dom.js";

const SYNC = "steps";
const AXIS_FONT = "11px system-ui, sans-serif";
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6];

/**
 * One chart. A line is {label, colour, dash, x, y, low, high, fill}: `low` and `high` draw a band,
 * `fill` an area down to the line before it (stacked charts).
 */
export class Chart {
  #host;
  #options;
  #plot = null;
  #shape = "";
  #lines = [];
  #smoothing = 0;
  #onTheme = () => this.#draw(true);
  #observer;

  constructor(host, { format = figure, onPick = null, fromZero = false } = {}) {
    this.#host = host;
    this.#options = { format, onPick, fromZero };
    host.classList.toggle("chart-pick", Boolean(onPick));
    document.documentElement.addEventListener("themechange", this.#onTheme);
    this.#observer = new ResizeObserver(() => this.#resize());
    this.#observer.observe(host);
  }

  update(lines, { smoothing = 0 } = {}) {
    this.#lines = lines.filter((line) => line.x.length > 0);
    this.#smoothing = smoothing;
    this.#draw(false);
  }

  destroy() {
    document.documentElement.removeEventListener("themechange", this.#onTheme);
    this.#observer.disconnect();
    this.#plot?.destroy();
  }

  #resize() {
    const { clientWidth: width, clientHeight: height } = this.#host;
    if (this.#plot && width > 0 && (width !== this.#plot.width || height !== this.#plot.height)) {
      this.#plot.setSize({ width, height });
    }
  }

  #draw(mustRebuild) {
    if (this.#lines.length === 0) {
      this.#plot?.destroy();
      this.#plot = null;
      fill(this.#host, h("p", { class: "note" }, "nothing yet"));
      return;
    }
    const traces = this.#lines.flatMap((line) => tracesOf(line, this.#smoothing));
    const data = uPlot.join(traces.map((trace) => [trace.x, trace.y]));
    const shape = JSON.stringify(traces.map(({ x, y, ...rest }) => rest));
    if (this.#plot && shape === this.#shape && !mustRebuild) {
      this.#plot.setData(data);
      return;
    }
    this.#plot?.destroy();
    this.#host.replaceChildren();
    this.#shape = shape;
    this.#plot = new uPlot(this.#config(traces), data, this.#host);
  }

  #config(traces) {
    const line = resolved("var(--line)");
    const axis = { stroke: resolved("var(--muted)"), font: AXIS_FONT, ticks: { show: false } };
    return {
      width: this.#host.clientWidth || 320,
      height: this.#host.clientHeight || 178,
      padding: [10, 12, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: SYNC, setSeries: false }, points: { size: 7 }, drag: { x: true, y: false } },
      scales: { x: { time: false, range: stepRange }, y: { range: this.#options.fromZero ? zeroRange : valueRange } },
      axes: [
        { ...axis, incrs: WHOLE, space: 56, size: 26, grid: { show: false }, values: (_, at) => at.map(tick) },
        { ...axis, size: 50, space: 34, gap: 6, grid: { stroke: line, width: 1 }, values: (_, at) => at.map(tick) },
      ],
      series: [{}, ...traces.map(seriesOf)],
      bands: bandsOf(traces),
      plugins: [tooltip(this.#options, () => this.#lines)],
    };
  }
}

/** The traces of a line: its band's edges, the raw values when smoothed, and the line itself. */
function tracesOf(line, smoothing) {
  const base = { label: line.label, colour: line.colour, dash: line.dash || null, area: Boolean(line.fill) };
  const traces = [];
  if (line.high && smoothing === 0) {
    traces.push({ ...base, kind: "edge", x: line.x, y: line.high }, { ...base, kind: "edge", x: line.x, y: line.low });
  }
  if (smoothing > 0) traces.push({ ...base, kind: "raw", x: line.x, y: line.y });
  traces.push({ ...base, kind: "line", x: line.x, y: smoothing > 0 ? smooth(line.y, smoothing) : line.y });
  return traces;
}

/** Exponential moving average without the pull of the first value. */
export function smooth(values, weight) {
  let mean = 0;
  let mass = 0;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

function seriesOf(trace) {
  const colour = resolved(trace.colour);
  const base = { spanGaps: true, label: trace.label, points: { show: sparse, size: 6, fill: colour } };
  if (trace.kind === "edge") return { ...base, stroke: "transparent", points: { show: false } };
  if (trace.kind === "raw") return { ...base, stroke: faded(colour, 0.28), width: 1, points: { show: false } };
  const width = trace.area ? 1 : 1.8;
  return { ...base, stroke: colour, width, dash: trace.dash || undefined, fill: trace.area ? faded(colour, 0.5) : undefined };
}

function bandsOf(traces) {
  const bands = [];
  traces.forEach((trace, number) => {
    const next = traces[number + 1];
    if (trace.kind === "edge" && next?.kind === "edge" && next.label === trace.label) {
      bands.push({ series: [number + 1, number + 2], fill: faded(resolved(trace.colour), 0.14) });
    }
    if (trace.area && next?.area) bands.push({ series: [number + 1, number + 2], fill: faded(resolved(trace.colour), 0.5) });
  });
  return bands;
}

function faded(colour, opacity) {
  const number = parseInt(colour.slice(1), 16);
  return `rgba(${number >> 16}, ${(number >> 8) & 255}, ${number & 255}, ${opacity})`;
}

function sparse(plot) { return plot.data[0].length <= 40; }

/** All steps; a single one has room on both sides (uPlot would draw 0 to 100 around step 0). */
function stepRange(plot, low, high) {
  const steps = plot.data[0];
  if (steps.length === 1) return [steps[0] - 1, steps[0] + 1];
  return low === high ? [low - 1, high + 1] : [low, high];
}

function zeroRange(_, low, high) { return [0, high > 0 ? high * 1.08 : 1]; }

function valueRange(_, low, high) {
  if (low === null) return [0, 1];
  const margin = low === high ? Math.abs(low) * 0.1 || 0.5 : (high - low) * 0.09;
  const from = low >= 0 && low - margin < 0 ? 0 : low - margin;
  return [from, high + margin];
}

/** Shows the step and every line's value under the mouse. */
function tooltip({ format, onPick }, lines) {
  const box = h("div", { class: "chart-tip", hidden: true });
  let isOver = false;
  const show = (plot) => {
    const { left, top, idx } = plot.cursor;
    box.hidden = !isOver || idx === null || idx === undefined || left < 0;
    if (box.hidden) return;
    const step = plot.data[0][idx];
    const rows = lines().map((line) => {
      const place = nearest(line.x, step);
      const value = line.shown ? line.shown[place] : line.y[place];
      const range = line.high ? ` (${format(line.low[place])} … ${format(line.high[place])})` : "";
      return h("div", { class: "chart-tip-row", "--key-colour": line.colour }, h("i"), line.label, h("b", {}, format(value) + range));
    });
    fill(box, h("div", { class: "chart-tip-step" }, `step ${figure(step)}`), ...rows);
    const isRight = left > plot.over.clientWidth / 2;
    box.style.left = isRight ? "" : `${left + 14}px`;
    box.style.right = isRight ? `${plot.over.clientWidth - left + 14}px` : "";
    box.style.top = `${Math.max(0, Math.min(top, plot.over.clientHeight - box.clientHeight))}px`;
  };
  return {
    hooks: {
      init: (plot) => {
        plot.over.append(box);
        plot.over.addEventListener("mouseenter", () => { isOver = true; });
        plot.over.addEventListener("mouseleave", () => { isOver = false; box.hidden = true; });
        if (onPick) plot.over.addEventListener("click", () => {
          if (plot.cursor.idx !== null && plot.select.width === 0) onPick(plot.data[0][plot.cursor.idx]);
        });
      },
      setCursor: show,
    },
  };
}

/** Index of the entry of ascending `values` that is nearest to `wanted`. */
function nearest(values, wanted) {
  let low = 0;
  let high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] <= wanted) low = middle;
    else high = middle;
  }
  return Math.abs(values[high] - wanted) < Math.abs(values[low] - wanted) ? high : low;
}
