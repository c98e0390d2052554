// Lanes of bars on a canvas, with zoom and pan. Overlapping bars of a lane are put in rows.

import { fill, h, resolved, seconds, tick, visible } from "./dom.js";

const LABEL_WIDTH = 92;
const AXIS_HEIGHT = 26;
const ROW_HEIGHT = 16;
const THIN_ROW = 5;
const LANE_GAP = 12;
const MANY_ROWS = 16;
const COLOURS = { rollout: 0, train: 1, sync: 2, eval: 3, save: 4, offload: 5 };
const STATES = { consumed: 0, ready: 0, rejected: 1, failed: 3, waiting: 5, issued: 6 };

export class LanePlot {
  #lanes;
  #whole;
  #from = 0;
  #to;
  #canvas = h("canvas", { tabindex: 0, role: "img" });
  #tip = h("div", { class: "tip", hidden: true });
  #dragged = null;
  #observer = new ResizeObserver(() => this.draw());
  #onTheme = () => this.draw();

  constructor(timeline) {
    this.#whole = timeline.seconds || 1;
    this.#to = this.#whole;
    this.#lanes = timeline.lanes.map((lane) => ({ ...lane, ...rowsOf(lane.spans) }));
    this.#canvas.setAttribute("aria-label", `Lanes: ${this.#lanes.map((lane) => lane.name).join(", ")}; see the table below`);
    this.element = h("div", {}, this.#canvas, this.#tip);
    this.#listen();
    this.#observer.observe(this.element);
    document.documentElement.addEventListener("themechange", this.#onTheme);
  }

  destroy() {
    this.#observer.disconnect();
    document.documentElement.removeEventListener("themechange", this.#onTheme);
  }

  zoom(factor, around = (this.#from + this.#to) / 2) {
    const width = Math.min(this.#whole, Math.max(this.#whole / 5000, (this.#to - this.#from) * factor));
    const left = around - ((around - this.#from) / (this.#to - this.#from)) * width;
    this.#from = Math.max(0, Math.min(left, this.#whole - width));
    this.#to = this.#from + width;
    this.draw();
  }

  pan(part) {
    const width = this.#to - this.#from;
    this.#from = Math.max(0, Math.min(this.#from + part * width, this.#whole - width));
    this.#to = this.#from + width;
    this.draw();
  }

  reset() {
    this.#from = 0;
    this.#to = this.#whole;
    this.draw();
  }

  draw() {
    const width = this.element.clientWidth;
    if (!width) return;
    const height = this.#place();
    const ratio = devicePixelRatio || 1;
    this.#canvas.width = width * ratio;
    this.#canvas.height = height * ratio;
    this.#canvas.style.height = `${height}px`;
    const pen = this.#canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11.5px system-ui, sans-serif";
    pen.textBaseline = "middle";
    this.#drawAxis(pen, width, height);
    for (const lane of this.#lanes) this.#drawLane(pen, lane, width);
  }

  #place() {
    let top = AXIS_HEIGHT + 6;
    for (const lane of this.#lanes) {
      lane.rowHeight = lane.numRows > MANY_ROWS ? THIN_ROW : ROW_HEIGHT;
      lane.top = top;
      lane.height = lane.numRows * lane.rowHeight;
      top += Math.max(lane.height, 14) + LANE_GAP;
    }
    return top;
  }

  #x(time, width) { return LABEL_WIDTH + ((time - this.#from) / (this.#to - this.#from)) * (width - LABEL_WIDTH - 12); }

  #drawAxis(pen, width, height) {
    const step = niceStep((this.#to - this.#from) / Math.max(2, (width - LABEL_WIDTH) / 90));
    pen.strokeStyle = resolved("var(--line)");
    pen.fillStyle = resolved("var(--muted)");
    pen.textAlign = "center";
    for (let time = Math.ceil(this.#from / step) * step; time <= this.#to; time += step) {
      const x = this.#x(time, width);
      pen.beginPath();
      pen.moveTo(x, AXIS_HEIGHT);
      pen.lineTo(x, height);
      pen.stroke();
      pen.fillText(`${tick(time)} s`, Math.min(x, width - 22), AXIS_HEIGHT / 2);
    }
  }

  #drawLane(pen, lane, width) {
    pen.fillStyle = resolved("var(--muted)");
    pen.textAlign = "left";
    pen.fillText(lane.name, 16, lane.top + Math.min(lane.height, ROW_HEIGHT) / 2, LABEL_WIDTH - 22);
    pen.save();
    pen.beginPath();
    pen.rect(LABEL_WIDTH, 0, width - LABEL_WIDTH - 10, 1e5);
    pen.clip();
    lane.spans.forEach((span, number) => {
      if (span.end < this.#from || span.start > this.#to) return;
      const left = this.#x(span.start, width);
      const size = Math.max(1.5, this.#x(span.end, width) - left);
      const top = lane.top + lane.rows[number] * lane.rowHeight;
      pen.fillStyle = resolved(colourOf(lane.name, span, number));
      pen.globalAlpha = 0.85;
      roundRect(pen, left, top, size - (size > 4 ? 1 : 0), lane.rowHeight - (lane.rowHeight > 6 ? 2 : 1));
      pen.globalAlpha = 1;
      if (lane.rowHeight >= ROW_HEIGHT && size > 46) {
        pen.fillStyle = resolved("var(--surface)");
        pen.fillText(visible(span.name), Math.max(left, LABEL_WIDTH) + 6, top + lane.rowHeight / 2 + 0.5, size - 10);
      }
    });
    pen.restore();
  }

  #spanAt(x, y) {
    const width = this.element.clientWidth;
    for (const lane of this.#lanes) {
      const row = Math.floor((y - lane.top) / lane.rowHeight);
      if (row < 0 || row >= lane.numRows) continue;
      const number = lane.spans.findIndex((span, at) => lane.rows[at] === row && this.#x(span.start, width) - 1 <= x && x <= this.#x(span.end, width) + 1);
      if (number >= 0) return lane.spans[number];
    }
    return null;
  }

  #listen() {
    const timeAt = (x) => this.#from + ((x - LABEL_WIDTH) / (this.element.clientWidth - LABEL_WIDTH - 12)) * (this.#to - this.#from);
    this.#canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey && Math.abs(event.deltaX) < Math.abs(event.deltaY) && !this.#isZoomed() && event.deltaY > 0) return;
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX / 800);
      else this.zoom(event.deltaY > 0 ? 1.15 : 1 / 1.15, timeAt(event.offsetX));
    }, { passive: false });
    this.#canvas.addEventListener("pointerdown", (event) => { this.#dragged = event.offsetX; this.#canvas.setPointerCapture(event.pointerId); });
    this.#canvas.addEventListener("pointerup", () => { this.#dragged = null; });
    this.#canvas.addEventListener("pointermove", (event) => {
      if (this.#dragged !== null) {
        this.pan((this.#dragged - event.offsetX) / (this.element.clientWidth - LABEL_WIDTH));
        this.#dragged = event.offsetX;
      }
      this.#showTip(this.#spanAt(event.offsetX, event.offsetY), event);
    });
    this.#canvas.addEventListener("pointerleave", () => { this.#tip.hidden = true; });
    this.#canvas.addEventListener("dblclick", () => this.reset());
  }

  #isZoomed() { return this.#to - this.#from < this.#whole * 0.999; }

  #showTip(span, event) {
    this.#tip.hidden = !span;
    if (!span) return;
    const rows = [["took", seconds(span.end - span.start)], ["from", seconds(span.start)], ...Object.entries(span.details)];
    fill(this.#tip, h("div", { class: "tip-title" }, visible(span.name)),
      h("table", {}, rows.map(([name, value]) => h("tr", {}, h("td", { class: "muted" }, visible(name)), h("td", {}, visible(value))))));
    this.#tip.style.left = `${Math.min(event.clientX + 14, innerWidth - this.#tip.clientWidth - 12)}px`;
    this.#tip.style.top = `${Math.min(event.clientY + 16, innerHeight - this.#tip.clientHeight - 8)}px`;
  }
}

/** The first free row for every span, in order of their starts. */
export function rowsOf(spans) {
  const ends = [];
  const rows = spans.map((span) => {
    let row = ends.findIndex((end) => end <= span.start + 1e-9);
    if (row < 0) row = ends.length;
    ends[row] = span.end;
    return row;
  });
  return { rows, numRows: Math.max(1, ends.length) };
}

function colourOf(lane, span, number) {
  const known = COLOURS[span.name] ?? STATES[span.details.became];
  if (known !== undefined) return `var(--run-${known})`;
  return `var(--run-${lane.startsWith("engine") ? [0, 6][number % 2] : lane === "rewards" ? 2 : 5})`;
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
}

function roundRect(pen, left, top, width, height) {
  pen.beginPath();
  pen.roundRect(left, top, Math.max(1, width), height, Math.min(3, width / 2, height / 2));
  pen.fill();
}
