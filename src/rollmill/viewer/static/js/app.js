// The frame around the pages: which runs there are, which page is shown, and looking again.

import { get } from "./api.js";
import { fill, figure, h, note, runColour, seconds } from "./dom.js";
import { listen, showKeys } from "./keys.js";
import { Ledger } from "./ledger.js";
import { Overview } from "./overview.js";
import { go, PAGES, readRoute, recall, remember, wholeOf } from "./route.js";
import { Samples } from "./samples.js";
import { Timeline } from "./timeline.js";

const CLASSES = { overview: Overview, samples: Samples, timeline: Timeline, ledger: Ledger };
const EVERY_MS = 2000;
const LIVE_SECONDS = 120;

const main = document.getElementById("main");
let runs = [];
let hidden = new Set(recall("hidden", []));
let now = 0;
let page = null;
let pageName = null;
let seen = "";

function context() {
  const { values } = readRoute();
  const wanted = wholeOf(values.run) ?? 0;
  const selectedRun = runs[wanted] || runs[0];
  const shown = runs.filter((run) => !hidden.has(run.folder) || run === selectedRun);
  return { runs, shownRuns: shown, selectedRun, values, select };
}

function select(id) {
  const { page: name, values } = readRoute();
  const kept = name === "ledger" || name === "overview" ? {} : { step: values.step };
  go(name, { ...kept, run: id });
}

function render() {
  const route = readRoute();
  if (route.page !== pageName) {
    page?.close();
    main.replaceChildren();
    page = new CLASSES[route.page](main);
    pageName = route.page;
    document.title = `${route.page} · rollmill`;
  }
  for (const link of document.querySelectorAll("[data-page]")) {
    const isCurrent = link.dataset.page === route.page;
    if (isCurrent) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    link.href = `#/${link.dataset.page}${route.values.run ? `?run=${route.values.run}` : ""}`;
  }
  showRuns();
  page.show(context()).catch((error) => fill(main, note(error.message, true)));
}

function showRuns() {
  const { selectedRun } = context();
  const isOverview = pageName === "overview";
  fill(document.getElementById("runs"), runs.map((run) => {
    const isShown = isOverview ? !hidden.has(run.folder) || run === selectedRun : run === selectedRun;
    const classes = ["run", run === selectedRun && "is-selected", isShown && "is-shown"].filter(Boolean).join(" ");
    const eye = h("button", {
      class: "run-eye", type: "button", "aria-pressed": String(isShown), "aria-label": `Show ${run.name} in the charts`,
      onclick: () => { toggle(run); },
    }, h("span", { class: "run-dot" }));
    const step = run.last_step === null || run.last_step === undefined ? "no step yet" : `step ${figure(run.last_step)}${run.num_steps ? ` / ${figure(run.num_steps)}` : ""}`;
    return h("div", { class: classes, "--run-colour": runColour(run.id), title: run.folder }, eye,
      h("button", { class: "run-name", type: "button", "aria-pressed": String(run === selectedRun), onclick: () => select(run.id) },
        h("b", {}, run.name), h("span", {}, run.error ? "cannot be read" : step)));
  }));
}

function toggle(run) {
  const { selectedRun } = context();
  if (run === selectedRun) return;
  if (!hidden.delete(run.folder)) hidden.add(run.folder);
  remember("hidden", [...hidden]);
  render();
}

function showPulse(isLost) {
  const pulse = document.getElementById("pulse");
  const updated = Math.max(0, ...runs.map((run) => run.updated || 0));
  const age = now - updated;
  const isDone = runs.length > 0 && runs.every((run) => run.num_steps && run.last_step >= run.num_steps);
  const isLive = !isLost && !isDone && updated > 0 && age < LIVE_SECONDS;
  pulse.classList.toggle("is-live", isLive);
  pulse.classList.toggle("is-lost", isLost);
  const text = isLost ? "the viewer has stopped" : updated === 0 ? "waiting" : isDone ? `finished ${seconds(age)} ago` : isLive ? `live, ${seconds(Math.max(1, age))} ago` : `last figures ${seconds(age)} ago`;
  fill(pulse, h("span", { class: "pulse-text" }, text));
}

async function look() {
  try {
    const answer = await get("runs");
    runs = answer.runs;
    now = answer.now;
    showPulse(false);
    const state = JSON.stringify(runs.map((run) => [run.generation, run.num_records, run.error]));
    if (state !== seen) {
      seen = state;
      render();
    } else if (page?.tick) {
      page.tick(context());
    }
  } catch {
    showPulse(true);
  }
}

async function keepLooking() {
  if (!document.hidden) await look();
  setTimeout(keepLooking, EVERY_MS);
}

addEventListener("hashchange", () => { if (runs.length) render(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
document.getElementById("theme").addEventListener("click", () => rollmillTheme.next());
document.getElementById("help").addEventListener("click", () => showKeys(pageName));
listen({
  ...Object.fromEntries(PAGES.map((name, at) => [String(at + 1), () => go(name, { run: readRoute().values.run })])),
  t: () => rollmillTheme.next(),
  r: () => select(((context().selectedRun?.id ?? 0) + 1) % Math.max(1, runs.length)),
  "?": () => showKeys(pageName),
  "/": () => main.querySelector("input[type=search]")?.focus(),
}, () => page?.keys);
keepLooking();
