// Where the time of a step goes: lanes of bars, the long tail, engines that wait.

import { get, Latest } from "./api.js";
import { Chart } from "./charts.js";
import { figure, fill, h, note, seconds, share } from "./dom.js";
import { LanePlot } from "./lanes.js";
import { stackLines } from "./overview.js";
import { go, wholeOf } from "./route.js";

const PHASES = { "time/rollout_s": "rollout", "time/train_s": "train", "time/sync_s": "sync" };

export class Timeline {
  #context = null;
  #step = null;
  #shown = "";
  #latest = new Latest();
  #host = h("div", { class: "chart-host" });
  #keys = h("div", { class: "chart-keys" });
  #chart = new Chart(this.#host, { format: seconds, fromZero: true, onPick: (step) => this.#go(step) });
  #input = h("input", { type: "number", min: 0, "aria-label": "Step", onchange: () => this.#go(Number(this.#input.value)) });
  #body = h("div");
  #plot = null;

  constructor(root) {
    const step = (by, label, text) => h("button", { class: "button", type: "button", "aria-label": label, onclick: () => this.#move(by) }, text);
    fill(root,
      h("section", { class: "card chart-card", "aria-label": "Time per step" },
        h("div", { class: "chart-head" }, h("h3", {}, "Time per step"), h("span", { class: "chart-note" }, "click a step to open it"), this.#keys),
        this.#host),
      h("div", { class: "section-title" }, h("h2", {}, "Inside a step"),
        h("span", { class: "stepper" }, step(-1, "Previous step", "‹"), this.#input, step(1, "Next step", "›"))),
      this.#body);
  }

  keys = {
    "]": () => this.#move(1),
    "[": () => this.#move(-1),
    "+": () => this.#plot?.zoom(0.6),
    "-": () => this.#plot?.zoom(1 / 0.6),
    0: () => this.#plot?.reset(),
    ArrowLeft: () => this.#plot?.pan(-0.15),
    ArrowRight: () => this.#plot?.pan(0.15),
  };

  async show(context) {
    this.#context = context;
    const run = context.selectedRun;
    if (!run) return;
    const last = run.last_step;
    this.#step = wholeOf(context.values.step) ?? last;
    this.#input.value = this.#step ?? "";
    await this.#latest.run(async (signal) => {
      const { curves } = await get(`runs/${run.id}/metrics`, { names: Object.keys(PHASES).join(), points: 800 }, signal);
      const lines = stackLines(PHASES, curves);
      this.#chart.update(lines);
      fill(this.#keys, [...lines].reverse().map((line) => h("span", { class: "chart-key", "--key-colour": line.colour }, h("i"), line.label)));
      await this.#showStep(run, signal);
    });
  }

  close() {
    this.#latest.stop();
    this.#chart.destroy();
    this.#plot?.destroy();
  }

  async #showStep(run, signal) {
    if (this.#step === null) return fill(this.#body, h("div", { class: "card" }, note("No finished step yet.")));
    const key = `${run.id}/${run.generation}/${this.#step}`;
    if (key === this.#shown) return;
    try {
      const timeline = await get(`runs/${run.id}/timeline`, { step: this.#step }, signal);
      this.#shown = key;
      this.#draw(timeline);
    } catch (error) {
      if (signal.aborted) return;
      this.#shown = "";
      fill(this.#body, h("div", { class: "card" }, note(error.message, true)));
    }
  }

  #draw(timeline) {
    this.#plot?.destroy();
    this.#plot = new LanePlot(timeline);
    const engines = timeline.lanes.filter((lane) => lane.name.startsWith("engine"));
    const idle = engines.length ? 1 - engines.reduce((sum, lane) => sum + lane.busy, 0) / engines.length : null;
    const loop = timeline.lanes.find((lane) => lane.name === "loop");
    const part = (name) => {
      const spans = (loop?.spans || []).filter((span) => span.name === name);
      return spans.length ? spans.reduce((sum, span) => sum + span.end - span.start, 0) : null;
    };
    const tiles = [
      ["Step", seconds(timeline.seconds), `step ${timeline.step}`],
      ["Rollout", share(ratio(part("rollout"), timeline.seconds)), seconds(part("rollout"))],
      ["Train", share(ratio(part("train"), timeline.seconds)), seconds(part("train"))],
      ["Sync", share(ratio(part("sync"), timeline.seconds)), seconds(part("sync"))],
      ["Last tenth", seconds(timeline.tail?.seconds), timeline.tail ? `${share(timeline.tail.share)} of the rollouts` : "no groups recorded"],
      ["Engines idle", share(idle), engines.length ? `${figure(engines.length)} engine${engines.length > 1 ? "s" : ""}, over the step` : "no trace of engines"],
    ];
    fill(this.#body,
      h("div", { class: "tiles" }, tiles.map(([name, value, foot]) => h("div", { class: "card tile", "data-tile": name }, h("div", { class: "tile-name" }, name), h("div", { class: "tile-value" }, value), h("div", { class: "tile-foot" }, foot)))),
      h("div", { class: "section-title" }, h("p", {}, timeline.is_traced ? "From the run's trace; the same files open in Perfetto." : "From the clocks in metrics.jsonl and the ledger's events: this run wrote no trace."),
        timeline.num_left_out ? h("p", {}, `${figure(timeline.num_left_out)} more spans are not drawn`) : null),
      h("div", { class: "card lanes" }, this.#plot.element),
      h("div", { class: "section-title" }, h("h2", {}, "Lanes")),
      h("div", { class: "card table-scroll" }, laneTable(timeline)));
    this.#plot.draw();
  }

  #move(by) {
    if (this.#step !== null) this.#go(this.#step + by);
  }

  #go(step) {
    if (Number.isInteger(step) && step >= 0) go("timeline", { run: this.#context.selectedRun.id, step }, { replace: true });
  }
}

function ratio(part, whole) { return part === null || !whole ? null : part / whole; }

function laneTable({ lanes, seconds: whole }) {
  const head = ["lane", "busy", "busy time", "spans", "longest"];
  return h("table", {}, h("thead", {}, h("tr", {}, head.map((name, at) => h("th", { class: at ? "number" : "" }, name)))),
    h("tbody", {}, lanes.map((lane) => {
      const longest = lane.spans.reduce((best, span) => (span.end - span.start > best.end - best.start ? span : best), lane.spans[0]);
      return h("tr", {}, h("td", {}, lane.name), h("td", { class: "number" }, share(lane.busy)),
        h("td", { class: "number" }, seconds(lane.busy * whole)), h("td", { class: "number" }, figure(lane.spans.length)),
        h("td", { class: "number" }, `${longest.name}: ${seconds(longest.end - longest.start)}`));
    })));
}

