// One sample, and its group side by side.

import { figure, fill, h, note, seconds, textBlock, visible } from "./dom.js";
import { recall, remember } from "./route.js";
import { rewardTag } from "./sample_list.js";
import { legend, MODES, promptTokens, recolour, responseTokens, tokenBlock } from "./tokens.js";

const SOURCE_NAMES = { engine: "model", environment: "environment", data: "recorded" };
const COUNTERS = { num_calls: "engine calls", prompt_tokens: "prompt tokens, all calls" };
const TONES = { completed: "good", truncated: "warn", failed: "bad", aborted: "bad" };

export class SampleDetail {
  #handlers;
  #mode = recall("colour", "logprob");
  #blocks = [];
  #sample = null;
  #bar = h("div", { class: "colour-bar" });

  /** Handlers: open(row), group(), back(), more(first). */
  constructor(handlers) {
    this.#handlers = handlers;
    this.element = h("section", { class: "sample", "aria-label": "Sample" });
  }

  clear(text = "Choose a sample.", isError = false) {
    this.#sample = null;
    this.#blocks = [];
    fill(this.element, h("div", { class: "card" }, note(text, isError)));
  }

  /** Colour by the next figure that this sample has. */
  nextColour() {
    const able = MODES.filter((mode) => this.#has(mode));
    this.#choose(able[(able.findIndex((mode) => mode.id === this.#mode) + 1) % able.length].id);
  }

  show(sample, siblings, scale, place) {
    this.#sample = sample;
    this.#blocks = [];
    const segments = h("div");
    this.#fillSegments(segments, sample);
    fill(this.element,
      this.#head(sample, siblings, scale, place),
      sample.tokenizer_problem ? h("div", { class: "banner" }, `Token ids only: ${visible(sample.tokenizer_problem)}`) : null,
      h("div", { class: "two" },
        h("article", { class: "card", "aria-label": "Prompt" }, h("div", { class: "card-head" }, h("h3", {}, "Prompt")),
          h("div", { class: "card-body" }, sample.prompt.map(message), this.#promptAsTokens(sample))),
        h("article", { class: "card", "aria-label": "Reward" }, h("div", { class: "card-head" }, h("h3", {}, "Judgement")),
          h("div", { class: "card-body" }, judgement(sample)))),
      h("article", { class: "card", "aria-label": "Response" }, this.#bar, segments, this.#moreTokens(sample, segments),
        h("div", { class: "card-body" }, h("details", {}, h("summary", {}, "as plain text"),
          textBlock(sample.response, { class: "mono", "data-part": "response" })))),
      h("article", { class: "card", "aria-label": "Facts" }, h("div", { class: "card-body" }, facts(sample))));
    this.#drawBar();
  }

  showGroup(samples, scale, current, numLeftOut, place) {
    this.#sample = samples[0] || null;
    this.#blocks = [];
    const cards = samples.map((sample) => {
      const tokens = responseTokens(sample.tokens, sample.segments, sample.in_loss);
      const block = tokenBlock(tokens, this.#effective());
      this.#blocks.push({ block, tokens });
      const rest = sample.tokens.total - sample.tokens.ids.length;
      return h("article", { class: `card group-card${sample.row === current ? " is-current" : ""}`, "data-row": sample.row },
        h("div", { class: "card-head" },
          h("button", { class: "button", type: "button", onclick: () => this.#handlers.open(sample) }, `answer ${sample.attempt + 1}`),
          rewardTag(sample.reward, scale), statusTag(sample), sample.advantage === null ? null : h("span", { class: "small muted" }, `advantage ${figure(sample.advantage)}`),
          h("span", { class: "small muted" }, `${figure(sample.tokens.total)} tokens`)),
        h("div", { class: "card-body" }, block, rest > 0 ? h("p", { class: "muted small" }, `${figure(rest)} more tokens`) : null));
    });
    fill(this.element,
      h("div", { class: "card" },
        h("div", { class: "sample-head" }, h("h2", {}, `Group ${samples[0]?.group}`), h("span", { class: "muted" }, place),
          numLeftOut ? h("span", { class: "muted" }, `${numLeftOut} more not shown`) : null,
          h("div", { class: "toolbar" }, h("button", { class: "button", type: "button", title: "g", onclick: () => this.#handlers.group() }, "one sample"))),
        h("div", { class: "card-body" }, samples[0]?.prompt.map(message)),
        this.#bar),
      h("div", { class: "group-view" }, cards));
    this.#drawBar();
  }

  addTokens(page) {
    const sample = this.#sample;
    for (const name of ["ids", "texts", "special", "log_probs", "trainer_log_probs", "teacher_log_probs"]) {
      if (sample.tokens[name] && page[name]) sample.tokens[name].push(...page[name]);
    }
  }

  #head(sample, siblings, scale, place) {
    return h("div", { class: "card" },
      h("div", { class: "sample-head" },
        h("button", { class: "button back", type: "button", onclick: () => this.#handlers.back() }, "‹ list"),
        h("h2", {}, `Sample ${sample.index}`), rewardTag(sample.reward, scale), statusTag(sample),
        sample.decision ? h("span", { class: "tag warn", "data-decision": sample.decision }, sample.decision)
          : sample.in_loss ? null : h("span", { class: "tag warn" }, "not in the loss"),
        h("span", { class: "muted" }, place),
        h("div", { class: "toolbar" },
          siblings.length > 1 ? h("button", { class: "button", type: "button", title: "g", "data-action": "group", onclick: () => this.#handlers.group() }, `side by side (${siblings.length})`) : null)),
      siblings.length > 1 ? h("div", { class: "siblings", role: "group", "aria-label": "Answers to the same prompt" },
        h("span", { class: "muted small" }, `group ${sample.group}`),
        siblings.map((row) => h("button", { type: "button", "aria-current": String(row.row === sample.row), title: `answer ${row.attempt + 1}: ${figure(row.length)} tokens, ${row.status}`, "aria-label": `answer ${row.attempt + 1}`, onclick: () => this.#handlers.open(row) }, rewardTag(row.reward, scale)))) : null);
  }

  #promptAsTokens(sample) {
    const { prompt } = sample.tokens;
    const tokens = promptTokens(prompt);
    const cut = prompt.total - prompt.ids.length;
    const details = h("details", {}, h("summary", {}, `as the model saw it (${figure(prompt.total)} tokens)`));
    details.addEventListener("toggle", () => {
      if (details.open && details.children.length === 1) {
        details.append(cut > 0 ? h("p", { class: "muted small" }, `the last ${figure(prompt.ids.length)} tokens`) : "", tokenBlock(tokens, "none", { isDim: true }));
      }
    });
    return details;
  }

  #fillSegments(host, sample) {
    const tokens = responseTokens(sample.tokens, sample.segments, sample.in_loss);
    this.#blocks = [];
    const loaded = sample.tokens.first + sample.tokens.ids.length;
    fill(host, sample.segments.filter((segment) => segment.start < loaded || segment.length === 0).map((segment, number) => {
      const own = tokens.filter((token) => token.segment === number);
      const block = tokenBlock(own, this.#effective());
      this.#blocks.push({ block, tokens: own });
      return h("div", { class: `segment is-${segment.source === "environment" ? "environment" : "engine"}` },
        h("div", { class: "segment-head" },
          h("span", { class: `tag${segment.source === "environment" ? "" : " accent"}` }, SOURCE_NAMES[segment.source]),
          segment.version === null ? null : h("span", {}, `weights ${segment.version}`),
          h("span", {}, `${figure(segment.length)} tokens`),
          h("span", {}, segment.trainable && sample.in_loss ? "in the loss" : "not in the loss"),
          meanLogProb(own)),
        block);
    }), sample.segments.length === 0 ? note(sample.failure ? "nothing was written" : "an empty answer") : null);
  }

  #moreTokens(sample, host) {
    const rest = () => sample.tokens.total - sample.tokens.ids.length;
    if (rest() <= 0) return null;
    const button = h("button", { class: "button", type: "button", onclick: async () => {
      button.disabled = true;
      this.addTokens(await this.#handlers.more(sample.tokens.ids.length));
      this.#fillSegments(host, sample);
      button.disabled = false;
      if (rest() <= 0) button.remove();
      else fill(button, `${figure(rest())} more tokens`);
    } }, `${figure(rest())} more tokens`);
    return h("div", { class: "card-body" }, button);
  }

  #has(mode) { return !mode.needs || Boolean(this.#sample?.tokens[mode.needs]); }

  /** The chosen colouring, or log-probs where this sample lacks the figure. */
  #effective() {
    const mode = MODES.find((entry) => entry.id === this.#mode);
    return mode && this.#has(mode) ? mode.id : "logprob";
  }

  #choose(id) {
    this.#mode = id;
    remember("colour", id);
    for (const { block, tokens } of this.#blocks) recolour(block, tokens, this.#effective());
    this.#drawBar();
  }

  #drawBar() {
    const current = this.#effective();
    const all = this.#blocks.flatMap(({ tokens }) => tokens);
    fill(this.#bar,
      h("span", { class: "choice", role: "group", "aria-label": "Colour tokens by" }, MODES.map((mode) =>
        h("button", { type: "button", "data-mode": mode.id, disabled: !this.#has(mode), title: this.#has(mode) ? "c: next" : mode.missing, "aria-pressed": String(mode.id === current), onclick: () => this.#choose(mode.id) }, mode.label))),
      legend(current, all));
  }
}

function statusTag(sample) {
  return h("span", { class: `tag ${TONES[sample.status] || ""}` }, sample.status || "no status");
}

function message({ role, text }) {
  return h("div", { class: "message" }, role ? h("div", { class: "message-role" }, visible(role)) : null,
    textBlock(text));
}

function meanLogProb(tokens) {
  const known = tokens.map((token) => token.logprob).filter((value) => value !== null);
  if (!known.length) return null;
  const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
  return h("span", {}, `mean log-prob ${figure(mean)}`);
}

function judgement(sample) {
  const rows = [["reward", figure(sample.reward)]];
  for (const [name, value] of Object.entries(sample.reward_parts)) rows.push([`· ${name}`, figure(value)]);
  rows.push(["outcome", sample.outcome || "not judged"]);
  if (sample.advantage !== null) rows.push(["advantage", figure(sample.advantage)]);
  rows.push(["filter", decision(sample)]);
  if (sample.detail) rows.push(["grader", sample.detail]);
  if (sample.failure) rows.push(["failure", sample.failure]);
  return [
    h("table", { class: "judgement" }, rows.map(([name, value]) => h("tr", {}, h("td", { class: "muted" }, visible(name)), textBlock(value, { "data-fact": name }, "td")))),
    sample.label ? [h("h3", { class: "muted small" }, "Reference answer"), textBlock(sample.label, { "data-part": "label" }, "pre")] : null,
  ];
}

/** What became of the sample's group, in words. */
function decision(sample) {
  if (sample.decision) return sample.reason ? `${sample.decision}: ${visible(sample.reason)}` : sample.decision;
  const entry = sample.ledger;
  const reason = entry?.reason ? `: ${entry.reason}` : "";
  const group = { consumed: `kept, trained at step ${entry?.step}`, rejected: `rejected${reason}`, failed: `failed${reason}`, ready: "finished, not trained on yet" }[entry?.state];
  return [group || (entry ? entry.state : "no record"), sample.in_loss ? "" : "taken out of the loss by the sample filter"].filter(Boolean).join("; ");
}

function facts(sample) {
  const entries = [["group", sample.group], ["answer", `${(sample.attempt ?? 0) + 1}`], ["response tokens", figure(sample.tokens.total)], ["prompt tokens", figure(sample.tokens.prompt.total)]];
  for (const [name, value] of Object.entries(sample.timing)) entries.push([words(name.replace(/_s$/, "")), name.endsWith("_s") ? seconds(value) : figure(value)]);
  for (const [name, value] of Object.entries(sample.counters)) if (value) entries.push([COUNTERS[name] ?? words(name), figure(value)]);
  return [
    h("dl", { class: "facts" }, entries.map(([name, value]) => h("div", {}, h("dt", {}, visible(name)), h("dd", {}, value)))),
    sample.metadata ? h("details", {}, h("summary", {}, "metadata"), textBlock(sample.metadata, {}, "pre")) : null,
  ];
}

function words(name) { return name.replaceAll("_", " "); }
