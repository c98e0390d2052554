// Tokens coloured by a figure. Each token is one span whose text is a text node.

import { figure, fill, h, visible } from "./dom.js";

const LOG_PROB_LEVELS = [-0.1, -0.5, -1, -2, -4, -7];
const GAP_LEVELS = [1e-4, 1e-3, 1e-2, 5e-2, 0.2, 1];
const TEACHER_LEVELS = [0.05, 0.2, 0.5, 1, 2, 4];
export const MODES = [
  { id: "logprob", label: "log-prob" },
  { id: "mask", label: "mask" },
  { id: "version", label: "version" },
  { id: "gap", label: "trainer − engine", needs: "trainer_log_probs", missing: "the trainer did not score this answer: an advantage of 0 needs no forward pass" },
  { id: "teacher", label: "teacher − engine", needs: "teacher_log_probs", missing: "the run has no teacher" },
  { id: "none", label: "plain" },
];

/** The response tokens of a sample as objects, each with the facts of its segment. */
export function responseTokens(page, segments, inLoss) {
  let number = 0;
  return page.ids.map((id, at) => {
    const position = page.first + at;
    while (number < segments.length - 1 && position >= segments[number].start + segments[number].length) number += 1;
    const segment = segments[number];
    const hasLogProb = segment.has_log_probs && page.log_probs !== null;
    return {
      id, position, segment: number, text: page.texts[at], special: page.special[at],
      logprob: hasLogProb ? page.log_probs[at] : null,
      trainer: page.trainer_log_probs?.[at] ?? null,
      teacher: page.teacher_log_probs?.[at] ?? null,
      version: segment.version, source: segment.source, trained: segment.trainable && inLoss,
    };
  });
}

export function promptTokens(prompt) {
  return prompt.ids.map((id, at) => ({
    id, position: at, text: prompt.texts[at], special: prompt.special[at],
    logprob: null, trainer: null, teacher: null, version: null, source: "prompt", trained: false,
  }));
}

/** How many of ascending `levels` a size reaches. */
export function levelOf(size, levels) {
  let level = 0;
  while (level < levels.length && size >= levels[level]) level += 1;
  return level;
}

export function classOf(token, mode) {
  if (mode === "logprob") return token.logprob === null ? "no-figure" : `h${levelOf(-token.logprob, LOG_PROB_LEVELS.map((l) => -l))}`;
  if (mode === "mask") return token.trained ? "m-in" : "m-out";
  if (mode === "version") return token.version === null ? "no-figure" : `v${((token.version % 8) + 8) % 8}`;
  if (mode === "gap") return signed(token.trainer, token.logprob, GAP_LEVELS);
  if (mode === "teacher") return signed(token.teacher, token.logprob, TEACHER_LEVELS);
  return "";
}

function signed(one, other, levels) {
  if (one === null || other === null) return "no-figure";
  const difference = one - other;
  return `${difference >= 0 ? "h" : "c"}${levelOf(Math.abs(difference), levels)}`;
}

/** A block of tokens; hovering one tells all about it. */
export function tokenBlock(tokens, mode, { isDim = false } = {}) {
  const block = h("div", { class: `tokens${isDim ? " is-dim" : ""}`, dir: "auto" }, tokens.map((token, at) => {
    const span = h("span", { class: `${classOf(token, mode)}${token.special ? " special" : ""}`, "data-at": at });
    fillToken(span, token.text);
    return span;
  }));
  const tokenOf = (event) => tokens[event.target.closest?.("[data-at]")?.dataset.at];
  block.addEventListener("mousemove", (event) => showTip(tokenOf(event), event));
  block.addEventListener("mouseleave", hideTip);
  return block;
}

/** Line ends are shown as a mark, then made. */
function fillToken(span, text) {
  const parts = visible(text).split("\n");
  parts.forEach((part, at) => {
    if (at > 0) span.append(h("span", { class: "mark", "aria-hidden": "true" }, "⏎"), "\n");
    if (part) span.append(part);
  });
}

/** Give the tokens of a block the colours of another mode. */
export function recolour(block, tokens, mode) {
  block.querySelectorAll("[data-at]").forEach((span) => {
    const token = tokens[span.dataset.at];
    span.className = `${classOf(token, mode)}${token.special ? " special" : ""}`;
  });
}

export function legend(mode, tokens) {
  const scale = (classes, low, high) => h("span", { class: "legend" }, low,
    h("span", { class: "legend-scale" }, classes.map((name) => h("i", { class: name }))), high);
  const items = (pairs) => h("span", { class: "legend" }, pairs.map(([name, label]) =>
    h("span", { class: "legend-item" }, h("i", { class: name }), label)));
  const heat = ["h0", "h1", "h2", "h3", "h4", "h5", "h6"];
  const both = ["c6", "c5", "c4", "c3", "c2", "c1", "h0", "h1", "h2", "h3", "h4", "h5", "h6"];
  if (mode === "logprob") return scale(heat, "likely", "unlikely");
  if (mode === "mask") return items([["m-in", "in the loss"], ["m-out", "not in the loss"]]);
  if (mode === "version") {
    const versions = [...new Set(tokens.map((token) => token.version).filter((v) => v !== null))].sort((a, b) => a - b);
    return items(versions.slice(0, 8).map((version) => [`v${version % 8}`, `version ${version}`]));
  }
  if (mode === "gap" || mode === "teacher") return scale(both, "less likely", "more likely");
  return h("span");
}

const tip = h("div", { class: "tip", hidden: true, role: "tooltip" });
document.body.append(tip);

function showTip(token, event) {
  if (!token) return hideTip();
  const rows = [["token", `${token.id}`], ["place", `${token.source === "prompt" ? "prompt" : "response"} ${token.position}`]];
  if (token.logprob !== null) rows.push(["engine log-prob", figure(token.logprob)], ["probability", figure(Math.exp(token.logprob))]);
  if (token.trainer !== null) rows.push(["trainer log-prob", figure(token.trainer)]);
  if (token.trainer !== null && token.logprob !== null) rows.push(["trainer − engine", figure(token.trainer - token.logprob)]);
  if (token.teacher !== null) rows.push(["teacher log-prob", figure(token.teacher)]);
  if (token.version !== null) rows.push(["weight version", token.version]);
  if (token.source !== "prompt") rows.push(["written by", token.source], ["in the loss", token.trained ? "yes" : "no"]);
  fill(tip, h("div", { class: "tip-title" }, JSON.stringify(visible(token.text).slice(0, 200))),
    h("table", {}, rows.map(([name, value]) => h("tr", {}, h("td", { class: "muted" }, name), h("td", {}, value)))));
  tip.hidden = false;
  const { clientWidth: width, clientHeight: height } = tip;
  tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, innerWidth - width - 12))}px`;
  tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 14 : event.clientY + 18}px`;
}

export function hideTip() { tip.hidden = true; }
