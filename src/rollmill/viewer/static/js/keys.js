// The keyboard: one table of keys, shown by `?`.

import { fill, h } from "./dom.js";

const GENERAL = [
  ["1 – 4", "overview, samples, timeline, ledger"],
  ["t", "light or dark"],
  ["r", "next run"],
  ["?", "this list"],
];
const BY_PAGE = {
  samples: [
    ["j / k", "next or previous sample"],
    ["[ / ]", "previous or next step"],
    ["c", "colour tokens by the next figure"],
    ["g", "the group side by side, and back"],
    ["/", "find text"],
  ],
  timeline: [["[ / ]", "previous or next step"], ["+ / −", "zoom in or out"], ["← / →", "move"], ["0", "the whole step"]],
  overview: [["drag", "zoom a chart; double click resets"], ["/", "find a figure"]],
  ledger: [["/", "look up a group"]],
};

/** Listen for keys: `actions` maps a key to what it does; the page may offer more. */
export function listen(actions, pageActions) {
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const isTyping = event.target.matches?.("input, select, textarea");
    if (event.key === "Escape" && isTyping) return event.target.blur();
    if (isTyping || document.querySelector("dialog[open]")) return;
    const action = pageActions()?.[event.key] || actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
}

export function showKeys(page) {
  const dialog = document.getElementById("keys");
  const rows = [...(BY_PAGE[page] || []), ...GENERAL];
  fill(dialog, h("h2", {}, "Keys"),
    h("dl", {}, rows.map(([key, meaning]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, meaning)])));
  dialog.onclick = () => dialog.close();
  dialog.showModal();
}
