// All pods. The console searches, filters, sorts and pages them according to the URL.

import {saveButton} from "./csv.js";
import {ask, atMost, choice, el, gib, gpuNoun, many, podLink, since, swap, table, timed} from "./dom.js";

const STATES = {"": "any state", waiting: "waiting", bound: "bound", unconfirmed: "unconfirmed", starting: "starting", running: "running", overusing: "overusing", idle: "idle",
  evicting: "to be evicted", unreserved: "unreserved", dra: "by DRA", ending: "ending", gone: "gone"};
const ORDERS = {"": "name", unused: "unused memory", overuse: "overuse", reserved: "reserved memory", used: "memory in use", oldest: "age"};
/** Fields of the form that are text: parameter of the API and of the URL, label, example. */
const TEXTS = [["search", "Search", "name, owner, node"], ["namespace", "Namespace", ""], ["owner", "Owner", "Deployment/llama"], ["node", "Node", ""]];
/** Number of rows on a page, on a desktop and on a phone. */
const ROWS = 50, PHONE = 12;
/** Number of pods in a request for all of them. */
const MOST = 500;
const BAD = new Set(["overusing", "evicting", "unreserved"]);

export function pods(view, _, state) {
  const models = choice("Model", "model", {"": "all models"}, state), states = choice("State", "state", STATES, state), order = choice("Sort by", "order", ORDERS, state);
  const texts = TEXTS.map(([id, label, placeholder]) => [id, el("input", {id, type: "search", placeholder, value: state.get(id), autocomplete: "off", list: id === "namespace" ? "namespaces" : null}), label]);
  const namespaces = el("datalist", {id: "namespaces"}), status = el("p", {role: "status"}), rows = el("div");
  const clear = el("button", {type: "button"}, "Clear"), next = el("button", {type: "button"}, "Next"), first = el("button", {type: "button"}, "From the start");
  const form = el("form", {class: "tools filters", role: "search"}, ...texts.flatMap(([id, input, label]) => [el("span", {}, el("label", {for: id}, label), " ", input)]),
    ...[models, states, order].map(each => el("span", {}, each.parts[0], " ", each.parts[1])), clear, namespaces);
  view.append(el("h2", {}, "Pods"), form, status, rows, el("div", {class: "pages"}, first, next));

  const fields = [...texts.map(([id, input]) => [id, input]), ["model", models.select], ["state", states.select], ["order", order.select]];
  let after = "", loads = 0, waits = null;
  const changed = () => { for (const [id, input] of fields) state.set(id, input.value.trim()); after = ""; return load(); };
  form.addEventListener("submit", event => { event.preventDefault(); changed(); });
  form.addEventListener("input", () => { clearTimeout(waits); waits = setTimeout(changed, 150); });
  clear.addEventListener("click", () => { for (const [, input] of fields) input.value = ""; changed(); });
  next.addEventListener("click", () => { after = next.dataset.after; load(); });
  first.addEventListener("click", () => { after = ""; load(); });

  async function load() {
    const ownLoad = ++loads;
    const query = Object.fromEntries(fields.map(([id, input]) => [id, input.value.trim() || state.get(id)]));
    const body = await ask("v1/pods", {...query, continue: after, limit: atMost(ROWS, PHONE)});
    if (ownLoad !== loads) return;  // another load has started
    const {sums} = body, filters = Object.entries(query).some(([id, value]) => value && id !== "order");
    status.textContent = !body.matching ? filters ? "No pod matches." : "No pod requests GPU memory."
      : `${many(body.matching, "pod")}${filters ? " found" : ""}${sums.waiting_pods ? `, ${sums.waiting_pods.toLocaleString("en")} waiting${sums.waiting_bytes ? ` for ${gib(sums.waiting_bytes)}` : ""}` : ""}: ${gib(sums.reserved_bytes)} reserved, ${gib(sums.used_bytes)} in use, ${gib(sums.unused_bytes)} unused${sums.overuse_bytes ? `, ${gib(sums.overuse_bytes)} overused` : ""}.`;
    [first.disabled, next.disabled, next.dataset.after] = [!after, !body.remaining, body.continue ?? ""];
    swap(rows, ...(body.pods.length ? [table("All pods", ["Pod", "State", "Reserved", "In use", "Peak", "Unused", "Age", "Node and GPU"], body.pods.map(pod => [
      [podLink(pod.namespace, pod.name), el("div", {class: "quiet"}, link({namespace: pod.namespace, owner: `${pod.owner_kind}/${pod.owner_name}`}, `${pod.owner_kind} ${pod.owner_name}`))],
      pod.states.flatMap((each, i) => [i ? ", " : "", el("span", {class: BAD.has(each) ? "bad" : ""}, STATES[each])]).concat(pod.states.includes("idle") ? el("div", {class: "quiet"}, `for ${since(pod.idle_since)}`) : []),
      pod.node ? [gib(pod.reserved_bytes), pod.memory_class && pod.memory_class !== "unlimited" ? el("div", {class: "quiet"}, pod.memory_class) : null] : [el("span", {class: "quiet"}, pod.request || "unreadable request")],
      pod.used_bytes === null ? "-" : [gib(pod.used_bytes), meter(pod.used_bytes, pod.reserved_bytes)], pod.peak_bytes === null ? "-" : gib(pod.peak_bytes),
      pod.overuse_bytes ? [el("span", {class: "bad"}, `${gib(pod.overuse_bytes)} too much`)] : pod.used_bytes === null ? "-" : gib(pod.unused_bytes),
      pod.created_at ? since(pod.created_at) : "-",
      pod.node ? [link({node: pod.node}, pod.node), el("div", {class: "quiet"}, `${pod.model ?? ""}${pod.devices.length ? ` ${pod.devices.map(gpuNoun).join(", ")}` : ""}`)] : "-",
    ]), "cards"), saveButton("pods", () => every(query))] : []));
  }

  /** Return all pods of a query, not only those of the shown page. */
  async function every(query) {
    const found = [];
    for (let after = ""; ;) {
      const body = await ask("v1/pods", {...query, continue: after, limit: MOST});
      found.push(...body.pods);
      if (!body.remaining) return found;
      after = body.continue;
    }
  }

  /** Fill the lists of models and namespaces once; without them, the filters still work. */
  async function choices() {
    const [fleet, teams] = await Promise.all([ask("v1/fleet"), ask("v1/teams", {limit: 1})]);
    models.select.append(...fleet.models.map(({model}) => el("option", {value: model, selected: model === state.get("model")}, model)));
    namespaces.append(...teams.teams.map(({namespace}) => el("option", {value: namespace})));
  }
  choices().catch(() => {});
  const all = timed(load);
  return {refresh: all.load, get leastMs() { return all.leastMs; }, close: () => { clearTimeout(waits); loads += 1; }};
}

/** Return a bar of the memory in use within the reservation; the part beyond it is red. The figures stand beside it. */
function meter(usedBytes, reservedBytes) {
  const fill = el("i", {class: "reservations"}), over = el("i", {class: "beyond"}), whole = Math.max(usedBytes, reservedBytes, 1);
  fill.style.width = `${100 * Math.min(usedBytes, reservedBytes) / whole}%`;
  over.style.width = `${100 * Math.max(0, usedBytes - reservedBytes) / whole}%`;
  return el("div", {class: "bar meter", "aria-hidden": "true"}, fill, over);
}

/** Return a link to the pods with these filters. */
export const link = (filters, text) => el("a", {href: `#/pods?${new URLSearchParams(filters)}`}, text);
