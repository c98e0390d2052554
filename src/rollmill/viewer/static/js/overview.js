// Does the run learn? The figures that answer it, for one run or several over one another.

import { get, Latest } from "./api.js";
import { Chart } from "./charts.js";
import { figure, fill, h, note, runColour, seconds, share } from "./dom.js";
import { figuresOf, SECTIONS, singlePanel } from "./panels.js";
import { recall, remember } from "./route.js";

const POINTS = 500;
const DASHES = [null, [6, 4], [2, 3], [10, 4, 2, 4]];
const SMOOTHING = [["none", 0], ["some", 0.6], ["much", 0.9]];

export class Overview {
  #root;
  #cards = new Map();
  #latest = new Latest();
  #smoothing = recall("smoothing", 0);
  #extra = recall("figures", []);
  #available = [];
  #curves = new Map();
  #tiles = h("div");
  #sections = h("div");
  #more = h("section");
  #problem = h("div");

  constructor(root) {
    this.#root = root;
    fill(root, this.#problem, this.#tiles, this.#bar(), this.#sections, this.#more);
  }

  async show(context) {
    this.context = context;
    this.#showTiles();
    await this.#latest.run(async (signal) => {
      const runs = context.shownRuns;
      try {
        const names = await Promise.all(runs.map((run) => get(`runs/${run.id}/names`, {}, signal)));
        this.#available = [...new Set(names.flatMap((answer) => answer.names))].sort();
        const wanted = this.#wanted().join(",");
        const answers = await Promise.all(
          runs.map((run) => get(`runs/${run.id}/metrics`, { names: wanted, points: POINTS }, signal)),
        );
        this.#curves = new Map(runs.map((run, at) => [run.id, answers[at].curves]));
        fill(this.#problem);
      } catch (error) {
        if (signal.aborted) return;
        fill(this.#problem, note(error.message, true));
        return;
      }
      this.#showSections();
    });
  }

  close() {
    this.#latest.stop();
    for (const card of this.#cards.values()) card.chart.destroy();
  }

  #panels() {
    return [...SECTIONS.flatMap((section) => section.panels), ...this.#extra.map(singlePanel)];
  }

  #wanted() {
    return this.#panels().flatMap((panel) => figuresOf(panel, this.#available).map((f) => f.name));
  }

  #bar() {
    const buttons = SMOOTHING.map(([label, weight]) =>
      h("button", {
        type: "button",
        "aria-pressed": String(weight === this.#smoothing),
        onclick: (event) => {
          this.#smoothing = weight;
          remember("smoothing", weight);
          for (const other of event.target.parentNode.children) {
            other.setAttribute("aria-pressed", String(other === event.target));
          }
          this.#showSections();
        },
      }, label));
    return h("div", { class: "overview-bar toolbar" },
      h("label", {}, "smoothing", h("span", { class: "choice", role: "group", "aria-label": "Smoothing" }, buttons)));
  }

  #showTiles() {
    const { selectedRun: run, shownRuns } = this.context;
    const parts = [];
    if (shownRuns.length > 1) parts.push(comparison(shownRuns, this.context));
    if (run) parts.push(h("div", { class: "tiles" }, tilesOf(run)));
    fill(this.#tiles, parts);
  }

  #showSections() {
    if (this.#available.length === 0) {
      fill(this.#sections, note("No figures yet: they appear when the first step or evaluation is done."));
      return;
    }
    const blocks = SECTIONS.map((section) => this.#section(section.title, section.hint, section.panels));
    const extra = this.#extra.map(singlePanel);
    if (extra.length) blocks.push(this.#section("Chosen figures", "", extra));
    const isSame = blocks.flatMap((b) => b.ids).join() === this.#sections.dataset.ids;
    if (!isSame) {
      fill(this.#sections, blocks.map((block) => block.element()));
      this.#sections.dataset.ids = blocks.flatMap((b) => b.ids).join();
    }
    this.#showMore();
    for (const block of blocks) for (const update of block.updates) update();
  }

  #section(title, hint, panels) {
    const shown = panels.filter((panel) => !panel.optional || figuresOf(panel, this.#available).length);
    const cards = shown.map((panel) => this.#card(panel));
    // Made only when the sections change: making it moves the cards into it.
    const element = () => h("section", { "aria-label": title },
      h("div", { class: "section-title" }, h("h2", {}, title), hint ? h("p", {}, hint) : null),
      h("div", { class: "charts" }, cards.map((card) => card.element)));
    return {
      element,
      ids: shown.map((panel) => panel.id),
      updates: shown.map((panel, at) => () => this.#update(panel, cards[at])),
    };
  }

  #card(panel) {
    const known = this.#cards.get(panel.id);
    if (known) return known;
    const now = h("span", { class: "chart-now", "data-panel": panel.id });
    const keys = h("div", { class: "chart-keys" });
    const host = h("div", { class: "chart-host" });
    const close = panel.isExtra
      ? h("button", { class: "icon-button chart-close", type: "button", "aria-label": `Remove ${panel.title}`, onclick: () => this.#toggle(panel.title) }, "×")
      : null;
    const element = h("article", { class: `card chart-card${panel.isWide ? " is-wide" : ""}`, "aria-label": panel.title },
      h("div", { class: "chart-head" }, h("h3", {}, panel.title), h("span", { class: "chart-note" }, panel.note), now, close),
      host, keys);
    const chart = new Chart(host, { format: panel.format || figure, fromZero: panel.fromZero || Boolean(panel.stack) });
    const card = { element, chart, now, keys };
    this.#cards.set(panel.id, card);
    return card;
  }

  #update(panel, card) {
    const lines = panel.stack ? this.#stacked(panel) : this.#lines(panel);
    card.chart.update(lines, { smoothing: panel.stack ? 0 : this.#smoothing });
    const format = panel.format || figure;
    const selected = lines.find((line) => line.isSelected);
    const value = panel.stack ? lines[0]?.y.at(-1) : selected?.y.at(-1);
    fill(card.now, value === undefined || (lines.length > 1 && !panel.stack && !this.#isOneFigure(panel)) ? "" : format(value));
    const keys = lines.length > 1 ? [...lines].sort((a, b) => a.order - b.order) : [];
    fill(card.keys, keys.map((line) => h("span", { class: "chart-key", "--key-colour": line.colour },
      h("i", { class: line.dash ? "is-dashed" : "" }), line.label)));
  }

  #isOneFigure(panel) { return figuresOf(panel, this.#available).length === 1; }

  #lines(panel) {
    const { shownRuns, selectedRun } = this.context;
    const figures = figuresOf(panel, this.#available);
    const isSingle = shownRuns.length === 1;
    return shownRuns.flatMap((run) => figures.map(({ name, label }, number) => {
      const curve = this.#curves.get(run.id)?.[name];
      return {
        label: isSingle ? label : figures.length > 1 ? `${run.name} · ${label}` : run.name,
        colour: runColour(isSingle ? run.id + number : run.id),
        dash: isSingle ? null : DASHES[number % DASHES.length],
        isSelected: run === selectedRun,
        order: run.id * 100 + number,
        ...(curve || { x: [], y: [] }),
      };
    })).filter((line) => line.x.length);
  }

  /** The selected run's parts, each on top of the one before; the highest first, for the fills. */
  #stacked(panel) {
    return stackLines(panel.stack, this.#curves.get(this.context.selectedRun?.id) || {});
  }

  #showMore() {
    if (this.#more.dataset.names === this.#available.join()) return this.#markMore();
    this.#more.dataset.names = this.#available.join();
    const search = h("input", { type: "search", placeholder: "find a figure…", "aria-label": "Find a figure", oninput: () => filter() });
    const list = h("div", { class: "figure-list" }, this.#available.map((name) =>
      h("button", { type: "button", "data-name": name, onclick: () => this.#toggle(name) }, name)));
    const filter = () => {
      for (const button of list.children) button.hidden = !button.dataset.name.includes(search.value.trim().toLowerCase());
    };
    fill(this.#more,
      h("div", { class: "section-title" }, h("h2", {}, "All figures"), h("p", {}, "choose any to draw it"), search),
      list);
    this.#markMore();
  }

  #markMore() {
    for (const button of this.#more.querySelectorAll("[data-name]")) {
      button.setAttribute("aria-pressed", String(this.#extra.includes(button.dataset.name)));
    }
  }

  #toggle(name) {
    const isOn = this.#extra.includes(name);
    this.#extra = isOn ? this.#extra.filter((other) => other !== name) : [...this.#extra, name];
    remember("figures", this.#extra);
    if (isOn) {
      this.#cards.get(`figure:${name}`)?.chart.destroy();
      this.#cards.delete(`figure:${name}`);
    }
    this.show(this.context);
  }
}

/** Curves as layers of a stack: the sum of all first, so that each fill ends at the next. */
export function stackLines(parts, curves) {
  const present = Object.entries(parts).filter(([name]) => curves[name]?.x.length);
  const layers = [];
  let below = null;
  present.forEach(([name, label], number) => {
    const { x, y } = curves[name];
    const top = y.map((value, at) => value + (below && below.length === y.length ? below[at] : 0));
    layers.push({ label, colour: runColour([0, 1, 2, 3, 4][number % 5]), x, y: top, shown: y, fill: true, order: number });
    below = top;
  });
  return layers.reverse();
}

function comparison(runs, context) {
  const head = ["run", "step", "reward", "evaluation", "length", "truncated", "tokens/s", "step time"];
  return h("div", { class: "card compare table-scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, head.map((name, at) => h("th", { class: at ? "number" : "" }, name)))),
    h("tbody", {}, runs.map((run) => {
      const now = run.latest || {};
      return h("tr", { class: "is-link", onclick: () => context.select(run.id) },
        h("td", { "--part-colour": runColour(run.id) }, h("i", { class: "swatch" }), run.name),
        [figure(run.last_step), figure(now["reward/mean"]), figure(firstEval(now)?.value),
          figure(now["rollout/response_length_mean"]), share(now["rollout/truncated"]),
          figure(now["rollout/tokens_per_second"]), seconds(now["time/step_s"])]
          .map((text) => h("td", { class: "number" }, text)));
    }))));
}

function tilesOf(run) {
  const now = run.latest || {};
  const evaluation = firstEval(now);
  const planned = run.num_steps;
  const progress = planned ? (run.last_step || 0) / planned : null;
  return [
    tile("step", "Step", [figure(run.last_step ?? 0), planned ? h("small", {}, ` of ${figure(planned)}`) : null],
      progress === null ? "" : h("div", { class: "progress" }, progressBar(progress))),
    tile("reward", "Reward", figure(now["reward/mean"]), now["reward/std"] === undefined ? "" : `spread ${figure(now["reward/std"])}`),
    tile("eval", "Evaluation", figure(evaluation?.value), evaluation ? evaluation.name : "not evaluated yet"),
    tile("length", "Response length", [figure(now["rollout/response_length_mean"]), h("small", {}, " tokens")], `${share(now["rollout/truncated"])} truncated`),
    tile("gap", "Train ↔ rollout gap", figure(now["train/mismatch/log_prob_diff_mean"]), "mean |Δ log-prob|"),
    tile("rate", "Rollout speed", [figure(now["rollout/tokens_per_second"]), h("small", {}, " tokens/s")], now["rollout/wasted_tokens"] ? `${figure(now["rollout/wasted_tokens"])} thrown away` : "none thrown away"),
    tile("time", "Step time", seconds(now["time/step_s"]), phasesText(now)),
  ];
}

function progressBar(progress) {
  const bar = h("i");
  bar.style.width = `${Math.min(100, progress * 100)}%`;
  return bar;
}

function tile(id, name, value, foot) {
  return h("div", { class: "card tile", "data-tile": id },
    h("div", { class: "tile-name" }, name), h("div", { class: "tile-value" }, value), h("div", { class: "tile-foot" }, foot));
}

function firstEval(latest) {
  const name = Object.keys(latest).sort().find((key) => /^eval\/[^/]+\/reward$/.test(key));
  return name ? { name: name.split("/")[1], value: latest[name] } : null;
}

function phasesText(now) {
  const whole = now["time/step_s"];
  if (!whole || now["time/rollout_s"] === undefined) return "";
  return `${share(now["time/rollout_s"] / whole)} rollout, ${share((now["time/train_s"] ?? 0) / whole)} train`;
}
