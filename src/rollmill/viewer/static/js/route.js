// The address says what is shown: #/samples?run=0&step=3&row=5. Every view can be linked to.

export const PAGES = ["overview", "samples", "timeline", "ledger"];

export function readRoute() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const page = PAGES.includes(path) ? path : "overview";
  return { page, values: Object.fromEntries(new URLSearchParams(query || "")) };
}

export function formatRoute(page, values) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  const text = query.toString();
  return `#/${page}${text ? `?${text}` : ""}`;
}

/** Go somewhere; `replace` leaves no step in the history. */
export function go(page, values, { replace = false } = {}) {
  const address = formatRoute(page, values);
  if (address === location.hash) return;
  if (replace) {
    history.replaceState(null, "", address);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    location.hash = address;
  }
}

export function wholeOf(text) {
  return /^\d+$/.test(text ?? "") ? Number(text) : null;
}

export function remember(name, value) {
  try { localStorage.setItem(`rollmill.${name}`, JSON.stringify(value)); } catch { /* private mode */ }
}

export function recall(name, otherwise) {
  try {
    const text = localStorage.getItem(`rollmill.${name}`);
    return text === null ? otherwise : JSON.parse(text);
  } catch {
    return otherwise;
  }
}
