// The list of samples of a step (or found in all steps), with its filters.

import { figure, fill, h, note, visible } from "./dom.js";

const MAX_SHOWN = 1000;
const NUM_BINS = 12;
const SORTS = {
  file: ["in order", null],
  high: ["highest reward", (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity)],
  low: ["lowest reward", (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity)],
  long: ["longest", (a, b) => b.length - a.length],
  short: ["shortest", (a, b) => a.length - b.length],
};

export class SampleList {
  #handlers;
  #rows = [];
  #current = null;
  #bin = null;
  #scale = null;
  #limit = MAX_SHOWN;
  #canGoOn = false;

  /** Handlers: open(row), step(number), kind(name), everywhere(query or null), more(). */
  constructor(handlers) {
    this.#handlers = handlers;
    this.kind = h("select", { "aria-label": "Which samples", onchange: () => handlers.kind(this.kind.value) });
    this.step = h("input", { type: "number", min: 0, "aria-label": "Step", onchange: () => handlers.step(Number(this.step.value)) });
    this.slider = h("input", { type: "range", min: 0, "aria-label": "Step", oninput: () => handlers.step(this.steps[this.slider.value]) });
    this.previous = h("button", { class: "button", type: "button", title: "previous step ([)", "aria-label": "Previous step", onclick: () => handlers.move(-1) }, "‹");
    this.next = h("button", { class: "button", type: "button", title: "next step (])", "aria-label": "Next step", onclick: () => handlers.move(1) }, "›");
    this.text = h("input", { type: "search", placeholder: "text in prompt or answer", "aria-label": "Find text", oninput: () => this.#filtered() });
    this.status = h("select", { "aria-label": "Status", onchange: () => this.#filtered() });
    this.sort = h("select", { "aria-label": "Order", onchange: () => this.#filtered() },
      Object.entries(SORTS).map(([value, [label]]) => h("option", { value }, label)));
    this.everywhere = h("input", { type: "checkbox", onchange: () => this.#filtered() });
    this.spread = h("div");
    this.count = h("div", { class: "sample-count" });
    this.list = h("ol", { class: "rows", "aria-label": "Samples" });
    this.steps = [];
    this.element = h("aside", { class: "card sample-list", "aria-label": "Samples of a step" },
      h("div", { class: "sample-filters" },
        h("div", { class: "toolbar" }, this.kind,
          h("span", { class: "stepper" }, this.previous, this.step, this.next)),
        this.slider, this.text,
        h("div", { class: "toolbar" }, this.status, this.sort, h("label", {}, this.everywhere, "all steps")),
        this.spread, this.count),
      this.list);
    this.#setStatuses([]);
  }

  setSteps(kinds, kind, step) {
    const names = kinds.map((entry) => entry.name);
    if (names.join() !== this.kind.dataset.names) {
      fill(this.kind, names.map((name) => h("option", { value: name }, kindWords(name))));
      this.kind.dataset.names = names.join();
    }
    this.kind.value = kind;
    this.steps = kinds.find((entry) => entry.name === kind)?.steps || [];
    this.step.value = step ?? "";
    this.slider.max = Math.max(0, this.steps.length - 1);
    this.slider.value = Math.max(0, this.steps.indexOf(step));
    this.slider.disabled = this.steps.length < 2;
    this.previous.disabled = this.steps.length === 0 || step <= this.steps[0];
    this.next.disabled = this.steps.length === 0 || step >= this.steps.at(-1);
  }

  /** Show these rows; `canGoOn`: a search has not seen all steps yet. */
  setRows(rows, { canGoOn = false, keepFilters = true } = {}) {
    this.#rows = rows;
    this.#canGoOn = canGoOn;
    this.#limit = MAX_SHOWN;
    if (!keepFilters) this.#bin = null;
    this.#setStatuses([...new Set(rows.map((row) => row.status))].sort());
    const rewards = rows.map((row) => row.reward).filter((value) => value !== null);
    this.#scale = rewards.length ? [Math.min(...rewards), Math.max(...rewards)] : null;
    this.#draw();
  }

  fail(message) { fill(this.list, note(message, true)); fill(this.count); fill(this.spread); this.#rows = []; }

  get scale() { return this.#scale; }

  mark(step, row) {
    this.#current = { step, row };
    for (const button of this.list.querySelectorAll(".row")) {
      const isCurrent = Number(button.dataset.row) === row && (!button.dataset.step || Number(button.dataset.step) === step);
      button.setAttribute("aria-current", String(isCurrent));
      if (isCurrent) this.#reveal(button);
    }
  }

  /** Scroll the list, and only the list. */
  #reveal(button) {
    const [list, own] = [this.list.getBoundingClientRect(), button.getBoundingClientRect()];
    if (own.top < list.top) this.list.scrollTop -= list.top - own.top + 8;
    else if (own.bottom > list.bottom) this.list.scrollTop += own.bottom - list.bottom + 8;
  }

  /** The row `by` places from the current one, in the order shown. */
  neighbour(by) {
    const rows = this.visibleRows();
    const at = rows.findIndex((row) => row.row === this.#current?.row && (row.step ?? this.#current?.step) === this.#current?.step);
    return at < 0 ? rows[0] : rows[at + by];
  }

  visibleRows() {
    const text = this.text.value.trim().toLowerCase();
    const [low, high] = this.#bin === null ? [null, null] : this.#edges(this.#bin);
    const kept = this.#rows.filter((row) =>
      (!this.status.value || row.status === this.status.value) &&
      (this.everywhere.checked || !text || row.prompt.toLowerCase().includes(text) || row.response.toLowerCase().includes(text)) &&
      (this.#bin === null || (row.reward !== null && row.reward >= low && (row.reward < high || this.#bin === NUM_BINS - 1))));
    const order = SORTS[this.sort.value][1];
    return order ? [...kept].sort(order) : kept;
  }

  #filtered() {
    this.#limit = MAX_SHOWN;
    if (this.everywhere.checked) return this.#handlers.everywhere({ text: this.text.value.trim(), status: this.status.value });
    this.#handlers.everywhere(null);
    this.#draw();
  }

  #setStatuses(found) {
    const chosen = this.status.value;
    const all = [...new Set([...found, ...(chosen ? [chosen] : [])])];
    fill(this.status, h("option", { value: "" }, "any status"), all.map((status) => h("option", { value: status }, status)));
    this.status.value = chosen;
  }

  #draw() {
    this.#drawSpread();
    const rows = this.visibleRows();
    const shown = rows.slice(0, this.#limit);
    const rest = rows.length - shown.length;
    fill(this.count, h("span", {}, `${figure(rows.length)} of ${figure(this.#rows.length)} samples`),
      rows.length ? h("span", {}, `mean reward ${figure(mean(rows.map((r) => r.reward)))}`) : null);
    fill(this.list,
      shown.map((row) => h("li", {}, this.#row(row))),
      rest > 0 ? h("li", {}, h("button", { class: "button", type: "button", onclick: () => { this.#limit += MAX_SHOWN; this.#draw(); } }, `${figure(rest)} more`)) : null,
      this.#canGoOn ? h("li", {}, h("button", { class: "button", type: "button", onclick: () => this.#handlers.more() }, "look in older steps")) : null,
      rows.length === 0 && !this.#canGoOn ? note("no sample fits") : null);
    if (this.#current) this.mark(this.#current.step, this.#current.row);
  }

  #row(row) {
    return h("button", { class: "row", type: "button", "data-row": row.row, "data-step": row.step ?? null, onclick: () => this.#handlers.open(row) },
      h("span", { class: "row-prompt" }, visible(row.prompt) || "(empty prompt)"),
      rewardTag(row.reward, this.#scale),
      h("span", { class: "row-response" }, visible(row.response) || "(empty answer)"),
      h("span", { class: "row-facts" },
        row.step === undefined ? null : h("span", {}, `step ${row.step}`),
        h("span", {}, `group ${row.group} · ${row.attempt + 1}`), h("span", {}, `${figure(row.length)} tokens`),
        row.status === "completed" ? null : h("span", {}, row.status),
        row.outcome && row.outcome !== "value" ? h("span", {}, row.outcome) : null,
        row.in_loss || row.decision ? null : h("span", {}, "not in the loss"),
        row.decision ? h("span", { class: "row-decision" }, `${row.decision}${row.reason ? `: ${visible(row.reason)}` : ""}`) : null));
  }

  #edges(bin) {
    const [low, high] = this.#scale;
    const width = (high - low) / NUM_BINS;
    return [low + bin * width, low + (bin + 1) * width];
  }

  #drawSpread() {
    if (!this.#scale || this.#scale[0] === this.#scale[1]) return fill(this.spread);
    const [low, high] = this.#scale;
    const bins = Array(NUM_BINS).fill(0);
    for (const { reward } of this.#rows) {
      if (reward !== null) bins[Math.min(NUM_BINS - 1, Math.floor(((reward - low) / (high - low)) * NUM_BINS))] += 1;
    }
    const highest = Math.max(...bins);
    fill(this.spread,
      h("div", { class: "spread", role: "group", "aria-label": "Filter by reward" }, bins.map((count, bin) => {
        const bar = h("i");
        bar.style.height = count ? `${Math.max(6, (count / highest) * 100)}%` : "0";
        const [from, to] = this.#edges(bin);
        return h("button", {
          type: "button", "aria-pressed": String(this.#bin === bin), title: `${figure(from)} to ${figure(to)}: ${count}`,
          "aria-label": `reward ${figure(from)} to ${figure(to)}: ${count} samples`,
          onclick: () => { this.#bin = this.#bin === bin ? null : bin; this.#draw(); },
        }, bar);
      })),
      h("div", { class: "spread-scale" }, h("span", {}, figure(low)), h("span", {}, "reward"), h("span", {}, figure(high))));
  }
}

/** What a kind of samples is called. */
export function kindWords(kind) {
  return { train: "trained on", dropped: "dropped" }[kind] ?? `eval: ${kind}`;
}

/** A reward as a tag; green at the top of the scale, red at the bottom. */
export function rewardTag(reward, scale) {
  if (reward === null || reward === undefined) return h("span", { class: "reward" }, "no reward");
  let tone = "";
  if (scale && scale[1] > scale[0]) {
    const place = (reward - scale[0]) / (scale[1] - scale[0]);
    tone = place >= 0.75 ? "high" : place <= 0.25 ? "low" : "mid";
  }
  return h("span", { class: `reward ${tone}` }, figure(reward));
}

function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}
