// What the model writes: a step's samples, one of them, its siblings.

import { get, Latest } from "./api.js";
import { fill, h } from "./dom.js";
import { go, wholeOf } from "./route.js";
import { SampleDetail } from "./sample_detail.js";
import { kindWords, SampleList } from "./sample_list.js";
import { hideTip } from "./tokens.js";

export class Samples {
  #context = null;
  #list = new SampleList({
    open: (row) => this.#go({ step: row.step ?? this.#place.step, row: row.row, view: null }),
    step: (step) => this.#goToStep(step),
    move: (by) => this.#moveStep(by),
    kind: (kind) => this.#go({ kind, step: null, row: null, view: null }),
    everywhere: (query) => this.#searchEverywhere(query),
    more: () => this.#searchOn(),
  });
  #detail = new SampleDetail({
    open: (row) => this.#go({ row: row.row, view: null }),
    group: () => this.#go({ view: this.#context.values.view === "group" ? null : "group" }),
    back: () => this.#go({ row: null, view: null }),
    more: (first) => this.#moreTokens(first),
  });
  #frame = h("div", { class: "samples" });
  #place = {};
  #shown = {};
  #rows = [];
  #listing = new Latest();
  #opening = new Latest();
  #search = null;

  constructor(root) {
    fill(root, fill(this.#frame, this.#list.element, this.#detail.element));
    this.#detail.clear("…");
  }

  keys = {
    j: () => this.#openNeighbour(1),
    k: () => this.#openNeighbour(-1),
    "]": () => this.#moveStep(1),
    "[": () => this.#moveStep(-1),
    c: () => this.#detail.nextColour(),
    g: () => this.#go({ view: this.#context.values.view === "group" ? null : "group" }),
  };

  async show(context) {
    this.#context = context;
    const run = context.selectedRun;
    if (!run) return;
    const { kinds } = await get(`runs/${run.id}/steps`);
    const kind = this.#kindOf(kinds, context.values.kind);
    const steps = kinds.find((entry) => entry.name === kind).steps;
    const step = wholeOf(context.values.step) ?? steps.at(-1) ?? null;
    this.#place = { run: run.id, kind, step, steps };
    this.#list.setSteps(kinds, kind, step);
    if (step === null) {
      this.#list.setRows([]);
      this.#detail.clear("No samples yet: they appear when the first step has its answers (telemetry.dump_samples).");
      return;
    }
    await this.#showRows();
    await this.#showSample();
  }

  close() {
    this.#listing.stop();
    this.#opening.stop();
    hideTip();
  }

  #kindOf(kinds, wanted) {
    const named = kinds.find((entry) => entry.name === wanted);
    return (named || kinds.find((entry) => entry.steps.length) || kinds[0]).name;
  }

  async #showRows() {
    const { run, kind, step } = this.#place;
    const key = [run, kind, step].join();
    if (this.#shown.rows === key) return;
    const isOtherRun = this.#shown.run !== run || this.#shown.kind !== kind;
    await this.#listing.run(async (signal) => {
      try {
        const { rows } = await get(`runs/${run}/rows`, { kind, step }, signal);
        this.#rows = rows;
        this.#shown = { ...this.#shown, rows: key, run, kind, sample: null };
        if (!this.#search) this.#list.setRows(rows, { keepFilters: !isOtherRun });
      } catch (error) {
        if (signal.aborted) return;
        this.#rows = [];
        this.#shown = {};
        this.#list.fail(error.message);
        this.#detail.clear(error.message, true);
      }
    });
  }

  async #showSample() {
    const { values } = this.#context;
    const { run, kind, step } = this.#place;
    const isWide = matchMedia("(min-width: 981px)").matches;
    const ofGroup = this.#rows.find((other) => other.group === wholeOf(values.group))?.row;
    const row = wholeOf(values.row) ?? ofGroup ?? (isWide ? this.#list.visibleRows()[0]?.row : null) ?? null;
    this.#frame.classList.toggle("has-sample", row !== null);
    if (ofGroup === undefined && wholeOf(values.group) !== null && wholeOf(values.row) === null && this.#rows.length) {
      this.#frame.classList.remove("has-sample");
      return this.#detail.clear(`The answers of group ${values.group} were not kept.`);
    }
    if (row === null) return this.#rows.length ? this.#detail.clear() : undefined;
    this.#list.mark(step, row);
    const key = [run, kind, step, row, values.view].join();
    if (this.#shown.sample === key) return;
    await this.#opening.run(async (signal) => {
      try {
        await (values.view === "group" ? this.#showGroup(row, signal) : this.#showOne(row, signal));
        this.#shown.sample = key;
      } catch (error) {
        if (signal.aborted) return;
        this.#detail.clear(error.message, true);
      }
    });
  }

  async #showOne(row, signal) {
    const { run, kind, step } = this.#place;
    const sample = await get(`runs/${run}/sample`, { kind, step, row }, signal);
    const siblings = this.#rows.filter((other) => other.group === sample.group);
    hideTip();
    this.#detail.show(sample, siblings, this.#list.scale, this.#placeText());
  }

  async #showGroup(row, signal) {
    const { run, kind, step } = this.#place;
    const group = this.#rows.find((other) => other.row === row)?.group;
    const answer = await get(`runs/${run}/group`, { kind, step, group }, signal);
    hideTip();
    this.#detail.showGroup(answer.samples, this.#list.scale, row, answer.num_left_out, this.#placeText());
  }

  #placeText() {
    const { kind, step } = this.#place;
    if (kind === "train") return `step ${step}`;
    return kind === "dropped" ? `step ${step}, not trained on` : `${kindWords(kind)}, after step ${step}`;
  }

  async #moreTokens(first) {
    const { run, kind, step } = this.#place;
    const row = wholeOf(this.#context.values.row) ?? this.#list.visibleRows()[0]?.row;
    return (await get(`runs/${run}/sample`, { kind, step, row, first })).tokens;
  }

  async #searchEverywhere(query) {
    if (!query) {
      if (this.#search) {
        this.#search = null;
        this.#list.setRows(this.#rows);
      }
      return;
    }
    this.#search = { query, before: null, hits: [] };
    await this.#searchOn();
  }

  async #searchOn() {
    const search = this.#search;
    const { run, kind } = this.#place;
    await this.#listing.run(async (signal) => {
      try {
        const found = await get(`runs/${run}/search`, { kind, ...search.query, before: search.before }, signal);
        search.hits.push(...found.hits);
        search.before = found.next;
        this.#list.setRows(search.hits, { canGoOn: found.next !== null });
      } catch (error) {
        if (!signal.aborted) this.#list.fail(error.message);
      }
    });
  }

  #openNeighbour(by) {
    const row = this.#list.neighbour(by);
    if (row) this.#go({ step: row.step ?? this.#place.step, row: row.row }, true);
  }

  #moveStep(by) {
    const { steps, step } = this.#place;
    const at = steps.findIndex((other) => other >= step);
    const next = steps[(at < 0 ? steps.length : at) + by];
    if (next !== undefined) this.#goToStep(next);
  }

  #goToStep(step) { if (Number.isInteger(step)) this.#go({ step, row: null, view: null }, true); }

  #go(changes, replace = false) {
    const { kind, step } = this.#place;
    go("samples", { run: this.#place.run, kind, step, ...this.#context.values, group: null, ...changes }, { replace });
  }
}
