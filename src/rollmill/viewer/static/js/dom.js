// Building elements. Text always goes in as text nodes: there is no way to pass markup here.

/** An element: h("div", {class: "card", onclick: f}, "text", child, null). */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (name === "class") element.className = value;
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

/** Replace what is in an element. */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** A line that stands in for what is not there. */
export function note(text, isError = false) {
  return h("p", { class: isError ? "note is-error" : "note", role: isError ? "alert" : null }, visible(text));
}

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g;

/** Text with control characters and invisible direction marks made visible. */
export function visible(text) {
  return String(text).replace(HIDDEN, (character) => {
    const code = character.charCodeAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    if (code === 0x7f) return "\u2421";
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

const LONG_WORD = /\S{1000}/;

/** Text as a block of its own. Browsers need many seconds to break a word of 100,000 characters in
 * a proportional font: a text with such a word is set in the other font and broken anywhere. */
export function textBlock(text, attributes = {}, tag = "div") {
  const shown = visible(text);
  const classes = ["plain-text", attributes.class, LONG_WORD.test(shown) && "break-all"].filter(Boolean).join(" ");
  return h(tag, { dir: "auto", ...attributes, class: classes }, shown);
}

const MINUS = "\u2212";

/** A figure for people: four significant digits, thousands in groups, small ones in powers of ten. */
export function figure(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  let text;
  if (value === 0) text = "0";
  else if (size < 1e-3 || size >= 1e9) text = size.toExponential(2).replace("e-", `e${MINUS}`).replace("e+", "e");
  else if (Number.isInteger(value)) text = size.toLocaleString("en-US");
  else if (size >= 1000) text = Math.round(size).toLocaleString("en-US");
  else text = String(Number(size.toPrecision(4)));
  return value < 0 ? MINUS + text : text;
}

/** A figure for an axis. */
export function tick(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${trim(value / 1e9)}G`;
  if (size >= 1e6) return `${trim(value / 1e6)}M`;
  if (size >= 1e4) return `${trim(value / 1e3)}k`;
  if (size !== 0 && size < 1e-3) return value.toExponential(size.toExponential().startsWith("1e") ? 0 : 1);
  return trim(value);
}

function trim(value) { return String(Number(value.toPrecision(6))); }

export function share(value) {
  if (value === null || value === undefined) return "–";
  const percent = value * 100;
  return `${percent !== 0 && Math.abs(percent) < 10 ? percent.toFixed(1) : Math.round(percent)} %`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 100) return `${value.toFixed(1)} s`;
  if (value < 5400) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (value < 172800) return `${(value / 3600).toFixed(1)} h`;
  const days = value / 86400;
  return `${days.toFixed(days < 10 ? 1 : 0)} days`;
}

/** The colour of run or part number n, from the style sheet. */
export function runColour(number) { return `var(--run-${number % 8})`; }

/** A colour of the style sheet, resolved for canvas. */
export function resolved(colour) {
  const name = colour.match(/^var\((--[\w-]+)\)$/)?.[1];
  return name ? getComputedStyle(document.documentElement).getPropertyValue(name).trim() : colour;
}
