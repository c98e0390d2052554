// Which figures the overview draws, in which order, and what they are called.
//
// A panel names its figures (`names`: figure → label) or finds them (`match`: a pattern whose
// groups make the label). `stack` draws the parts of a whole.

import { seconds, share } from "./dom.js";

export const SECTIONS = [
  {
    title: "Learning",
    hint: "does it get better, and does it do so honestly",
    panels: [
      { id: "reward", title: "Reward", note: "mean over answers", names: { "reward/mean": "reward" } },
      { id: "nll", title: "Loss of recorded answers", note: "−log-prob per learned token", names: { "train/sft/nll": "nll" }, optional: true },
      { id: "eval", title: "Evaluation", note: "mean reward, held out", match: /^eval\/([^/]+)\/reward$/ },
      { id: "pass", title: "pass@k", note: "held out", match: /^eval\/([^/]+)\/(pass@\d+)$/ },
      { id: "length", title: "Response length", note: "tokens, mean", names: { "rollout/response_length_mean": "length" } },
      { id: "truncated", title: "Truncated", note: "share of answers", names: { "rollout/truncated": "truncated" }, format: share, fromZero: true },
      { id: "parts", title: "Reward parts", note: "mean of each", match: /^reward\/part\/(.+)$/, optional: true },
      { id: "zero", title: "Groups without spread", note: "teach nothing", names: { "rollout/zero_std_groups": "share" }, format: share, fromZero: true },
      { id: "outcomes", title: "Not judged", note: "share of answers", names: { "reward/outcome/invalid": "invalid", "reward/outcome/timeout": "timeout", "reward/outcome/error": "error" }, format: share, fromZero: true },
    ],
  },
  {
    title: "Policy update",
    hint: "how far each step goes",
    panels: [
      { id: "kl", title: "KL", note: "estimate per token", names: { "train/policy/old_kl": "to the step's start", "train/policy/reference_kl": "to the reference", "train/policy/teacher_kl": "to the teacher" } },
      { id: "entropy", title: "Entropy", note: "nats per token", names: { "train/policy/entropy": "entropy" } },
      { id: "grad", title: "Gradient norm", note: "before clipping", names: { "train/optimizer/grad_norm": "norm" }, fromZero: true },
      { id: "clip", title: "Clip fraction", note: "share of tokens", names: { "train/policy/clip_fraction": "clipped" }, format: share, fromZero: true },
      { id: "loss", title: "Loss", note: "", names: { "train/loss/total": "loss" } },
      { id: "lr", title: "Learning rate", note: "", names: { "train/optimizer/lr": "rate" }, fromZero: true },
    ],
  },
  {
    title: "Off-policy",
    hint: "how far what is trained on is from what trains",
    panels: [
      { id: "gap", title: "Train ↔ rollout gap", note: "|Δ log-prob| per token", names: { "train/mismatch/log_prob_diff_mean": "mean" }, fromZero: true },
      { id: "gapmax", title: "Train ↔ rollout gap, worst", note: "|Δ log-prob|, largest", names: { "train/mismatch/log_prob_diff_max": "max" }, fromZero: true },
      { id: "staleness", title: "Staleness", note: "weight versions behind", names: { "rollout/staleness_mean": "mean", "rollout/staleness_max": "max" }, fromZero: true },
      { id: "ess", title: "Effective sample size", note: "of importance weights", names: { "train/mismatch/ess": "share" }, format: share },
      { id: "changed", title: "Weights changed by a sync", note: "share, at engine precision", names: { "weights/changed_share": "changed" }, format: share },
    ],
  },
  {
    title: "Speed",
    hint: "where the time and the tokens go",
    panels: [
      { id: "phases", title: "Time per step", note: "seconds", stack: { "time/rollout_s": "rollout", "time/train_s": "train", "time/sync_s": "sync" }, format: seconds, isWide: true },
      { id: "rate", title: "Tokens per second", note: "", names: { "rollout/tokens_per_second": "rollout", "train/tokens/per_second": "train" }, fromZero: true },
      { id: "waste", title: "Tokens thrown away", note: "per step", names: { "rollout/wasted_tokens": "tokens" }, fromZero: true },
      { id: "engines", title: "Engines lost", note: "per step", names: { "engine/deaths": "deaths", "engine/redispatched_requests": "requests sent again" }, fromZero: true, optional: true },
      { id: "mfu", title: "Model FLOPs utilization", note: "", names: { "train/mfu": "train" }, format: share, optional: true },
    ],
  },
];

/** The figures of a panel among those that exist: [{name, label}]. */
export function figuresOf(panel, available) {
  if (panel.match) {
    return available
      .map((name) => ({ name, found: name.match(panel.match) }))
      .filter(({ found }) => found)
      .map(({ name, found }) => ({ name, label: found.slice(1).join(" ") }));
  }
  const named = panel.names || panel.stack;
  return Object.entries(named)
    .filter(([name]) => available.includes(name))
    .map(([name, label]) => ({ name, label }));
}

/** A panel for one figure that no other panel shows. */
export function singlePanel(name) {
  return { id: `figure:${name}`, title: name, note: "", names: { [name]: name.split("/").at(-1) }, isExtra: true };
}

