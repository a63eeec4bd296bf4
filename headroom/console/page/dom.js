// Helpers: elements, quantities with units, and requests to the debug API.

/** Elements with a listener, which swap replaces as a whole. */
const listening = new WeakSet();

/** Return an element. An attribute "onclick" adds a listener; null, undefined or false adds nothing. Text is never parsed as HTML. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) {
      element.addEventListener(name.slice(2), value);
      listening.add(element);
    }
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}

/** Return bytes for people as kubectl headroom prints them: rounded down, or up if isUp, as for memory that a pod needs. */
export function gib(bytes, isUp = false) {
  const tenths = (isUp ? Math.ceil : Math.floor)(bytes * 10 / 2 ** 30) || 0;  // no -0.0 GiB
  return `${(tenths / 10).toLocaleString("en", {minimumFractionDigits: 1, maximumFractionDigits: 1})} GiB`;
}

/** Return a measurement; it is negative if it is unknown. */
export function measured(bytes) {
  return bytes < 0 ? "unknown" : gib(bytes);
}

/** Return a count with its noun: "1 node", "2 nodes". */
export const many = (count, one, more = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : more}`;

/** Return an age as kubectl prints it: 12s, 3m, 5h, 2d. */
export function age(seconds) {
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["m", 60]])
    if (seconds >= 2 * length) return `${Math.floor(seconds / length)}${unit}`;
  return `${Math.max(0, Math.floor(seconds))}s`;
}

/** Return the age of a timestamp. */
export const since = stamp => age((Date.now() - Date.parse(stamp)) / 1000);

/** Return a Unix time, in seconds, as hours and minutes in the reader's zone. */
export const clock = seconds => new Date(1000 * seconds).toLocaleTimeString("en-GB", {hour: "2-digit", minute: "2-digit"});

/** Return the time of a date in the reader's zone, with the zone. */
export const moment = date => date.toLocaleTimeString("en-GB", {hour: "2-digit", minute: "2-digit", second: "2-digit", timeZoneName: "short"});

/** Return a text of the API with its times in the reader's zone. */
export const local = text => text.replace(/\d{4}-\d\d-\d\dT[\d:.]+(Z|\+00:00)/g, stamp =>
  new Date(stamp).toLocaleString("en-GB", {day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit", timeZoneName: "short"}));

/** Return a labelled list of options, whose chosen value is in the state of the view: {select, parts}. */
export function choice(label, name, options, state) {
  const chosen = state.get(name);
  const select = el("select", {id: name}, ...Object.entries(options).map(([value, text]) => el("option", {value, selected: value === chosen}, text)));
  return {select, parts: [el("label", {for: name}, label), select]};
}

/** Element -> the HTML that swap gave it last. */
const shown = new WeakMap();

/**
 * Replace the children of an element. Children that do not differ stay, so selected text stays selected, details that the reader opened stay
 * open, and a link or button keeps the focus.
 */
export function swap(element, ...children) {
  const parts = children.filter(child => child !== null && child !== undefined), shell = el("div", {}, ...parts);
  if (shell.innerHTML === shown.get(element)) return;
  const nameOf = details => details.querySelector("summary")?.firstChild?.textContent;
  const opened = new Map([...element.querySelectorAll("details")].map(details => [nameOf(details), details.open]));
  const focused = element.contains(document.activeElement) ? document.activeElement.getAttribute("href") ?? nameOf(document.activeElement.parentElement) : null;
  shown.set(element, shell.innerHTML);
  change(element, shell);
  for (const details of element.querySelectorAll("details")) {
    details.open = opened.get(nameOf(details)) ?? details.open;
    if (focused && nameOf(details) === focused) details.querySelector("summary").focus({preventScroll: true});
  }
  if (focused) element.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus({preventScroll: true});
}

/** Make the children of an element equal to the children of another element, which may lose some of them. */
function change(element, wanted) {
  const before = [...element.childNodes], after = [...wanted.childNodes];
  after.forEach((child, i) => {
    const known = before[i];
    if (!known) element.append(child);
    else if (known.nodeName !== child.nodeName || listening.has(known) || listening.has(child)) known.replaceWith(child);
    else if (child.nodeType !== Node.ELEMENT_NODE) { if (known.data !== child.data) known.data = child.data; }
    else if (!known.isEqualNode(child)) { changeAttributes(known, child); change(known, child); }
  });
  for (const child of before.slice(after.length)) child.remove();
}

function changeAttributes(element, wanted) {
  for (const {name} of [...element.attributes]) if (!wanted.hasAttribute(name) && name !== "open") element.removeAttribute(name);
  for (const {name, value} of wanted.attributes) {
    if (name === "style") element.style.cssText = wanted.style.cssText; // the policy forbids the attribute, not the property
    else if (element.getAttribute(name) !== value && name !== "open") element.setAttribute(name, value);
  }
}

/** The time between two loads of a view is this many times as long as a load takes, so that the console of a large cluster stays responsive. */
const TIMES = 20;

/** Return a function that loads and measures its duration, and the minimum time between two loads: {load, leastMs}. */
export function timed(load) {
  let tookMs = 0;
  return {
    load: async () => { const beganAt = performance.now(); await load(); tookMs = performance.now() - beganAt; },
    get leastMs() { return Math.max(4500, TIMES * tookMs); },
  };
}

/** Return the maximum number of rows. It is small on a phone, so that the page is at most six screens high. */
export const atMost = (rows, few) => matchMedia("(max-width: 48rem)").matches ? few : rows;

/** Return a table with a caption; a cell is text, or an array of nodes and text. */
export function table(caption, headers, rows, className = "") {
  return el("div", {class: "scrolls", tabindex: "0", role: "region", "aria-label": caption},
    el("table", {class: className},
      el("caption", {}, caption),
      el("thead", {}, el("tr", {}, ...headers.map(text => el("th", {scope: "col"}, text)))),
      el("tbody", {}, ...rows.map(cells => el("tr", {}, ...cells.map((cell, i) =>
        el("td", {"data-label": headers[i]}, ...(Array.isArray(cell) ? cell : [cell ?? "-"]))))))));
}

/** Return the name of a GPU as it is written in a sentence: "GPU 0", or "GPU-5e8a1b2c". */
export const gpuNoun = name => /^(GPU|MIG)-/.test(name) ? name : `GPU ${name}`;

export const gpuLink = (node, name) => el("a", {href: `#/fleet/${encodeURIComponent(node)}/${encodeURIComponent(name)}`}, `${node} ${gpuNoun(name)}`);

export const podLink = (namespace, name) => el("a", {href: `#/pod/${encodeURIComponent(namespace)}/${encodeURIComponent(name)}`},
  `${namespace}/${name}`);

/** Maximum time to wait for an answer. Without it, a lost connection could take minutes to fail. */
const TIMEOUT_MS = 30_000;

const UNPRINTABLE = /(?!\n)[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;

/** Return the value of a JSON text, with "?" for characters that cannot be printed: control characters, and marks that are invisible or change the direction of text. The debug API sends each of them as an escape. */
function printable(text) {
  return JSON.parse(text, /\\[ubfrt]/.test(text) ? (key, value) => typeof value === "string" ? value.replace(UNPRINTABLE, "?") : value : undefined);
}

/** Return the answer to a GET, or to a POST if there is a body. Throws an Error whose message is a sentence; isLost is set if there was no answer. The browser handles ETags. */
export async function ask(path, query = {}, body = undefined) {
  const parameters = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined && value !== false);
  const address = parameters.length ? `${path}${path.includes("?") ? "&" : "?"}${new URLSearchParams(parameters)}` : path;
  let reply;
  try {
    reply = await fetch(address, {cache: "no-cache", signal: AbortSignal.timeout(TIMEOUT_MS), ...(body === undefined ? {}
      : {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(body)})});
  } catch {
    throw Object.assign(new Error("the console does not answer"), {isLost: true});
  }
  const mode = reply.headers.get("Headroom-Mode");
  if (mode !== null) document.getElementById("observes").hidden = mode !== "observe";
  let answer = null;
  try { answer = printable(await reply.text()); } catch { /* reported below */ }
  if (!reply.ok || answer === null) throw new Error(answer?.detail ?? (reply.ok ? `the answer of /${path} was cut off` : `/${path} answered ${reply.status}`));
  return answer;
}

export const percent = ratio => ratio === null ? "-" : `${Math.round(100 * ratio)} %`;
