// Where every prompt is, where the tokens went, and whether what is dropped is longer than the rest.

import { get, Latest } from "./api.js";
import { figure, fill, h, note, runColour, share, visible } from "./dom.js";
import { formatRoute, go, wholeOf } from "./route.js";

const MEANINGS = {
  issued: ["taken from the data, nothing generated", 6],
  in_flight: ["being generated or judged", 0],
  waiting: ["unfinished, kept for a later step", 5],
  ready: ["finished, not yet trained on", 4],
  consumed: ["trained on", 2],
  rejected: ["turned down by a filter", 1],
  failed: ["could not be completed", 3],
};
/** Which samples a group's answers are among, by the state it ended in. */
const KINDS = { consumed: "train", rejected: "dropped", failed: "dropped" };
const WASTE = {
  retried: "of attempts that were tried again",
  aborted: "of answers that were aborted and not kept",
  stale: "too old for the weights",
  rejected: "turned down by a filter",
  failed: "of groups that could not be completed",
};

export class Ledger {
  #context = null;
  #latest = new Latest();
  #looking = new Latest();
  #summary = h("div");
  #lookup = h("div", { class: "card" });
  #list = h("div", { class: "card table-scroll" });
  #state = h("select", { "aria-label": "State", onchange: () => this.#showGroups() },
    h("option", { value: "" }, "all states"), Object.keys(MEANINGS).map((state) => h("option", { value: state }, stateWords(state))));
  #groups = [];

  constructor(root) {
    const input = h("input", { type: "search", inputmode: "numeric", placeholder: "group number", "aria-label": "Look up a group" });
    const form = h("form", { class: "toolbar" }, input, h("button", { class: "button" }, "look up"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#go(wholeOf(input.value.trim()));
    });
    fill(root, this.#summary,
      h("div", { class: "section-title" }, h("h2", {}, "Groups"), form, this.#state),
      this.#lookup, this.#list);
    this.#lookup.hidden = true;
  }

  async show(context) {
    const isOtherRun = this.#context?.selectedRun?.id !== context.selectedRun?.id;
    this.#context = context;
    const run = context.selectedRun;
    if (!run) return;
    await this.#latest.run(async (signal) => {
      try {
        this.#draw(await get(`runs/${run.id}/ledger`, {}, signal));
        if (isOtherRun || this.#groups.length <= 200) await this.#showGroups();
      } catch (error) {
        if (signal.aborted) return;
        fill(this.#summary, h("div", { class: "card" }, note(error.message, !error.isAbsent)));
        if (error.isAbsent) fill(this.#list, note("no group yet"));
      }
    });
    await this.#showHistory(wholeOf(context.values.group));
  }

  close() {
    this.#latest.stop();
    this.#looking.stop();
  }

  #draw({ states, issued, reasons, lengths, tokens, length_bias: bias, undone_events: undone }) {
    fill(this.#summary, h("div", { class: "ledger" },
      h("section", { class: "card is-wide", "aria-label": "Prompts by state" },
        h("div", { class: "card-head" }, h("h2", {}, "Where every prompt is"),
          h("span", { class: "muted", "data-fact": "issued" }, `${figure(issued)} groups issued`),
          undone ? h("span", { class: "muted small" }, `${figure(undone)} events undone by resuming`) : null),
        h("div", { class: "card-body" }, stack(states.map((s) => [s.groups, MEANINGS[s.state][1]])), stateTable(states, issued))),
      h("section", { class: "card", "aria-label": "Tokens" },
        h("div", { class: "card-head" }, h("h2", {}, "Where the tokens went")), h("div", { class: "card-body" }, tokenTable(tokens))),
      h("section", { class: "card", "aria-label": "Length bias" },
        h("div", { class: "card-head" }, h("h2", {}, "Are long answers dropped?"), h("span", { class: "muted small" }, "tokens per group")),
        h("div", { class: "card-body" }, lengthChart(lengths), biasLesson(bias))),
      reasons.length ? h("section", { class: "card is-wide", "aria-label": "Reasons" },
        h("div", { class: "card-head" }, h("h2", {}, "Why groups were not trained on")), h("div", { class: "card-body table-scroll" }, reasonTable(reasons))) : null));
  }

  async #showGroups(before = null) {
    const run = this.#context.selectedRun;
    await this.#looking.run(async (signal) => {
      const { groups } = await get(`runs/${run.id}/ledger/groups`, { state: this.#state.value, before }, signal);
      this.#groups = before === null ? groups : [...this.#groups, ...groups];
      const more = groups.length === 200
        ? h("div", { class: "card-body" }, h("button", { class: "button", type: "button", onclick: () => this.#showGroups(groups.at(-1).group) }, "older groups")) : null;
      fill(this.#list, this.#groups.length ? this.#groupTable() : note("no such group"), more);
    });
  }

  #groupTable() {
    const head = ["group", "state", "step", "tokens", "reason"];
    return h("table", {}, h("thead", {}, h("tr", {}, head.map((name, at) => h("th", { class: at === 0 || at === 3 ? "number" : "" }, name)))),
      h("tbody", {}, this.#groups.map((group) => h("tr", { class: "is-link", tabindex: 0, onclick: () => this.#go(group.group), onkeydown: (event) => { if (event.key === "Enter") this.#go(group.group); } },
        h("td", { class: "number" }, group.group), h("td", {}, stateTag(group.state)), h("td", {}, group.step ?? "–"),
        h("td", { class: "number" }, figure(group.tokens)), h("td", {}, visible(group.reason ?? ""))))));
  }

  async #showHistory(group) {
    this.#lookup.hidden = group === null;
    if (group === null) return;
    const run = this.#context.selectedRun;
    try {
      const { events } = await get(`runs/${run.id}/ledger/history`, { group });
      fill(this.#lookup,
        h("div", { class: "card-head" }, h("h3", {}, `Group ${group}`),
          h("a", { href: samplesOf(run.id, group, events) ?? null }, samplesOf(run.id, group, events) ? "its samples" : ""),
          h("button", { class: "icon-button", type: "button", "aria-label": "Close", onclick: () => this.#go(null) }, "×")),
        h("div", { class: "card-body table-scroll" }, events.length ? historyTable(events) : note("no such group was issued")));
    } catch (error) {
      fill(this.#lookup, note(error.message, true));
    }
  }

  #go(group) { go("ledger", { run: this.#context.selectedRun.id, group }); }
}

function stateWords(state) { return state.replace("_", " "); }

function stateTag(state) {
  const colour = runColour(MEANINGS[state]?.[1] ?? 0);
  return h("span", { "--part-colour": colour }, h("i", { class: "swatch" }), stateWords(state));
}

/** Parts of a whole, as wide as they are large. */
function stack(parts) {
  return h("div", { class: "stack", "aria-hidden": "true" }, parts.filter(([size]) => size > 0).map(([size, colour]) => {
    const part = h("i", { "--part-colour": runColour(colour) });
    part.style.flexGrow = String(size);
    return part;
  }));
}

function stateTable(states, issued) {
  return h("div", { class: "table-scroll" }, h("table", { class: "states" },
    h("thead", {}, h("tr", {}, h("th", {}, "state"), h("th", { class: "number" }, "groups"), h("th", { class: "number" }, "share"), h("th", { class: "number" }, "tokens"), h("th", {}, "meaning"))),
    h("tbody", {}, states.map(({ state, groups, tokens }) => h("tr", { "data-state": state },
      h("td", {}, stateTag(state)), h("td", { class: "number" }, figure(groups)), h("td", { class: "number" }, issued ? share(groups / issued) : "–"),
      h("td", { class: "number" }, figure(tokens)), h("td", { class: "muted" }, MEANINGS[state][0]))))));
}

function tokenTable(tokens) {
  if (tokens.generated === null) return note("no finished step yet");
  const rows = [["generated", tokens.generated, "by engines, in all steps", 0], ["trained on", tokens.trained, "in the loss", 2], ["no influence", tokens.skipped, "in a batch, with an advantage of 0", 6]];
  const reasons = Object.entries(tokens.wasted_by_reason);
  if (reasons.length) for (const [reason, count] of reasons) rows.push([reason, count, WASTE[reason] || "", reason === "failed" ? 3 : 1]);
  else rows.push(["thrown away", tokens.wasted, "aborted, retried, rejected or too old", 1]);
  if (tokens.kept > 0) rows.push(["not used yet", tokens.kept, "unfinished or finished, kept for a later step, or out of the loss", 4]);
  const used = rows.slice(1).filter(([, count]) => count);
  return [
    stack(used.map(([, count, , colour]) => [count, colour])),
    h("div", { class: "table-scroll" }, h("table", { class: "parts" }, h("tbody", {},
      rows.map(([name, count, meaning, colour]) => h("tr", { "data-tokens": name },
        h("td", { "--part-colour": runColour(colour) }, name === "generated" ? null : h("i", { class: "swatch" }), name),
        h("td", { class: "number" }, figure(count)), h("td", { class: "number muted" }, tokens.generated && count !== null ? share(count / tokens.generated) : ""), h("td", { class: "muted" }, meaning))),
      h("tr", { "data-tokens": "padding" }, h("td", {}, "padding"), h("td", { class: "number" }, figure(tokens.padding)), h("td", { class: "number muted" }, tokens.positions && tokens.padding !== null ? share(tokens.padding / tokens.positions) : ""), h("td", { class: "muted" }, "positions that the trainer computed for nothing"))))),
  ];
}

function lengthChart({ bins, bin_width: width, mean, count }) {
  const states = Object.keys(bins);
  if (!states.length) return note("no finished group yet");
  const totals = Object.fromEntries(states.map((state) => [state, bins[state].reduce((a, b) => a + b, 0)]));
  const shares = Object.fromEntries(states.map((state) => [state, bins[state].map((n) => n / totals[state])]));
  const highest = Math.max(...states.flatMap((state) => shares[state]));
  const chart = h("div", { class: "bars", role: "img", "aria-label": "Histogram of tokens per group" }, bins[states[0]].map((_, bin) =>
    h("div", { class: "bar-bin", title: `${figure(bin * width)} to ${figure((bin + 1) * width)} tokens: ${states.map((s) => `${figure(bins[s][bin])} ${s}`).join(", ")}` }, states.map((state) => {
      const bar = h("i", { "--part-colour": runColour(MEANINGS[state][1]) });
      bar.style.height = `${(shares[state][bin] / highest) * 100}%`;
      return bar;
    }))));
  const lessons = states.map((state) => `${stateWords(state)}: ${figure(mean[state])} tokens on average (${figure(count[state])} groups)`);
  const dropped = mean.rejected && mean.consumed ? mean.rejected / mean.consumed : null;
  return [chart, h("div", { class: "bar-scale" }, h("span", {}, "0"), h("span", {}, `${figure(width * bins[states[0]].length)} tokens`)),
    h("div", { class: "chart-keys" }, states.map((state) => stateTag(state))),
    h("p", { class: "lesson" }, lessons.join("; "), dropped ? `. Rejected groups are ${dropped.toFixed(2)} times as long as those trained on.` : "."),
  ];
}

/** Whether batches that take what is there hold shorter answers than were asked for. */
function biasLesson(bias) {
  if (bias === null || bias === undefined) return null;
  const size = share(Math.abs(1 - bias));
  const words = Math.abs(1 - bias) < 0.005 ? "as long as" : `${size} ${bias < 1 ? "shorter" : "longer"} than`;
  return h("p", { class: "lesson", "data-fact": "length bias" },
    `Answers that were trained on are ${words} those that were asked for, so far (rollout/length_bias ${figure(bias)}).`);
}

function reasonTable(reasons) {
  return h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "state"), h("th", {}, "reason"), h("th", { class: "number" }, "groups"), h("th", { class: "number" }, "tokens"))),
    h("tbody", {}, reasons.map((entry) => h("tr", {}, h("td", {}, stateTag(entry.state)), h("td", {}, visible(entry.reason) || "no reason given"), h("td", { class: "number" }, figure(entry.groups)), h("td", { class: "number" }, figure(entry.tokens))))));
}

function historyTable(events) {
  const start = events[0].time;
  return h("table", {}, h("thead", {}, h("tr", {}, ["when", "after", "state", "step", "tokens", "reason"].map((name) => h("th", {}, name)))),
    h("tbody", {}, events.map((event) => h("tr", { class: event.undone ? "is-undone" : "", title: event.undone ? "undone by a resume" : null },
      h("td", {}, new Date(event.time * 1000).toLocaleString()), h("td", {}, `+${(event.time - start).toFixed(1)} s`), h("td", {}, stateTag(event.state)),
      h("td", {}, event.step ?? "–"), h("td", {}, figure(event.tokens)), h("td", {}, visible(event.reason ?? ""))))));
}

function samplesOf(run, group, events) {
  const last = events.filter((event) => KINDS[event.state] && !event.undone).at(-1);
  return last ? formatRoute("samples", { run, kind: KINDS[last.state], step: last.step, group }) : null;
}
