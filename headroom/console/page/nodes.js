// Nodes: a row for each node, a bar for each device. The server searches and pages.

import {age, ask, atMost, el, gib, gpuNoun, many, measured, percent, podLink, table} from "./dom.js";
import {grafana} from "./grafana.js";

/** Number of nodes on a page, on a desktop and on a phone. */
const LIMIT = 50, PHONE = 15;
/** Delay of a search after the last key. */
const WAIT_MS = 250;
/** Fields that change all the time. A row is not updated if only these differ. */
const AGES = new Set(["report_age_s", "observed_at", "sm_activity_age_s"]);
/** What each certainty of a node means for the next pod. */
const NEXT = {
  exact: "it is certain which device the next pod gets",
  "slot-safe": "no pod requests more than the share of a replica, so any device that the plugin chooses has enough free memory",
  predicted: "the plugin chooses one of several devices; the next pod must fit on each of them",
  steered: "Headroom chooses: the agent answers the kubelet instead of the plugin",
};

export function nodes(view, _, state) {
  const opened = new Set(), shown = new Map();  // names of open nodes; node -> its row, and what it shows
  let after = [], search = state.get("find"), troubled = state.get("troubled") !== "";  // after: "continue" values of this page and of the pages before it
  const rows = el("div", {id: "nodes", role: "list"}), found = el("p", {id: "found", role: "status"});
  const box = el("input", {type: "search", id: "search", placeholder: "node, model, pod, reason", autocomplete: "off", value: search});
  const only = el("input", {type: "checkbox", id: "troubled", checked: troubled});
  const previous = el("button", {type: "button", onclick: () => turn(() => after.pop())}, "Previous");
  const next = el("button", {type: "button", onclick: () => turn(() => after.push(next.dataset.after))}, "Next");
  let searchTimer = null, loads = 0;
  box.addEventListener("input", () => { clearTimeout(searchTimer); searchTimer = setTimeout(() => { search = box.value.trim(); state.set("find", search); after = []; load(); }, WAIT_MS); });
  only.addEventListener("change", () => { troubled = only.checked; state.set("troubled", troubled ? "1" : ""); after = []; load(); });
  const turn = async move => { move(); await load(); rows.scrollIntoView({block: "start"}); };

  view.append(
    el("h2", {}, "Nodes"),
    el("form", {class: "tools", role: "search"},
      el("label", {for: "search"}, "Search"), box,
      el("label", {class: "check"}, only, "only where something is wrong"), found),
    legend(), rows, el("div", {class: "pages"}, previous, next));
  view.querySelector("form").addEventListener("submit", event => event.preventDefault());

  async function load() {
    const ownLoad = ++loads;
    const body = await ask("v1/nodes", {order: "fullest", limit: atMost(LIMIT, PHONE), search, troubled, continue: after.at(-1) ?? ""});
    if (ownLoad !== loads) return;  // another load has started
    const first = body.matching - body.remaining - body.nodes.length + 1;
    found.textContent = body.matching ? `${first.toLocaleString("en")} to ${(first + body.nodes.length - 1).toLocaleString("en")} of ${many(body.matching, "node")}`
      : search || troubled ? "no node matches" : "no nodes are known yet";
    previous.disabled = !after.length;
    next.disabled = !body.remaining;
    next.dataset.after = body.continue ?? "";
    const focused = document.activeElement?.closest?.("details")?.dataset.node, earlier = new Map(shown);
    shown.clear();
    for (const node of body.nodes) {
      const before = earlier.get(node.name), text = JSON.stringify(node, (key, value) => AGES.has(key) ? undefined : value);
      shown.set(node.name, before?.text === text ? before : {text, element: row(node, opened)});
      for (const each of shown.get(node.name).element.querySelectorAll(".age")) each.textContent = reportAge(node);
    }
    place(rows, [...shown.values()].map(({element}) => element));
    if (focused && !rows.contains(document.activeElement)) rows.querySelector(`details[data-node="${CSS.escape(focused)}"] > summary`)?.focus({preventScroll: true});
  }
  return {refresh: load};
}

/** Replace the children of an element. Children that stay are not moved, so they keep selected text and focus. */
function place(element, children) {
  let at = element.firstElementChild;
  const wanted = new Set(children);
  for (const child of children) {
    while (at && !wanted.has(at)) { const gone = at; at = at.nextElementSibling; gone.remove(); }
    if (child === at) at = at.nextElementSibling; else element.insertBefore(child, at);
  }
  while (at) { const gone = at; at = at.nextElementSibling; gone.remove(); }
}

const reportAge = node => node.report_age_s === null ? "no report" : `report ${age(node.report_age_s)} old`;

function legend() {
  const key = (className, text) => el("span", {}, el("i", {class: className, "aria-hidden": "true"}), text);
  return el("p", {class: "key"}, "Memory of a device: ",
    key("reservations", "reserved by pods"), key("unattributed", "unattributed: used without a reservation"), key("system", "driver and node reserve"),
    key("free", "free"), key("used", "measured in use (the line below)"), key("unhealthy", "unhealthy: takes no pods"));
}

/** Return the row of a node, which opens on a click. Its details are created when it opens. */
function row(node, opened) {
  const details = el("details", {"data-node": node.name, class: node.message ? "closed" : null, open: opened.has(node.name)});
  details.addEventListener("toggle", () => {
    if (details.open) { opened.add(node.name); fill(); } else opened.delete(node.name);
  });
  const summary = el("summary", {},
    el("span", {class: "name"}, el("b", {}, node.name),
      node.message ? el("span", {class: "bad"}, node.message) : node.cordoned ? el("span", {class: "bad"}, "cordoned") : el("span", {class: "quiet age"}, reportAge(node))),
    el("span", {class: "devices"}, ...node.devices.map(bar)));
  // A refresh can replace the row before "toggle" fires; the new row must be open or closed as the reader chose.
  summary.addEventListener("click", () => {
    if (details.open) opened.delete(node.name); else opened.add(node.name);
  });
  details.append(summary);
  const fill = () => { if (details.childElementCount === 1) details.append(inside(node)); };
  if (details.open) fill();
  return el("div", {role: "listitem"}, details);
}

/** A bar with the shares of the device's memory: reserved by pods, unattributed, free, and driver and node reserve. */
function bar(device) {
  const whole = Math.max(1, device.memory_bytes), over = device.headroom_bytes < 0;
  const reservations = device.reserved_total_bytes, unattributed = device.unattributed_bytes + device.unreserved_pods_bytes;
  const system = device.driver_reserve_bytes + device.node_reserve_bytes;
  const parts = [["reservations", reservations], ["unattributed", unattributed], ["free", Math.max(0, device.headroom_bytes)], ["system", system]];
  const sum = Math.max(whole, parts.reduce((all, [, bytes]) => all + bytes, 0));
  const line = el("span", {class: "bar"}, ...parts.filter(([, bytes]) => bytes > 0).map(([name, bytes]) => {
    const part = el("i", {class: name});
    part.style.width = `${100 * bytes / sum}%`;
    return part;
  }));
  const used = el("span", {class: "used"}, el("i"));
  used.firstChild.style.width = `${Math.max(0, Math.min(100, 100 * device.used_bytes / whole))}%`;
  const state = device.unhealthy ? "unhealthy" : over ? "overcommitted" : device.cordoned ? "cordoned" : "";
  const free = device.unhealthy ? "unhealthy" : over ? `${gib(-device.headroom_bytes)} over` : device.cordoned ? "cordoned" : `${gib(device.headroom_bytes)} free`;
  const words = [`${gpuNoun(device.gpu)} ${device.model}`, free, `${gib(reservations)} reserved by pods`, `${gib(unattributed)} unattributed`,
    `${measured(device.used_bytes)} measured in use`, `of ${gib(device.memory_bytes)}`,
    device.cordoned ? "cordoned: takes no new pods" : "",
    device.unhealthy ? `unhealthy: ${device.unhealthy_detail ?? device.unhealthy}` : ""].filter(Boolean).join(", ");
  return el("span", {class: `device ${state}`, role: "img", "aria-label": words, title: words}, line, used, el("span", {class: "caption"}, free));
}

/** The details of an open node: notes, and a table of its devices. */
function inside(node) {
  const about = [
    node.detail, node.unmeasured,
    node.message && node.cordoned ? "cordoned" : null, node.taints.length ? `taints: ${node.taints.join(", ")}` : null,
    node.certainty && !node.message ? `next pod's device is ${node.certainty}: ${NEXT[node.certainty] ?? ""}` : null,
  ].filter(Boolean);
  const terms = d => [["driver reserve", d.driver_reserve_bytes], ["node reserve", d.node_reserve_bytes], ["reserved by pods", d.pods_reserved_bytes], ["unconfirmed", d.pods_unconfirmed_bytes],
    ["unreserved pods", d.unreserved_pods_bytes], ["unattributed", d.unattributed_bytes]];
  const sum = d => `${gib(d.memory_bytes)}${terms(d).filter(([, bytes]) => bytes).map(([words, bytes]) => ` - ${gib(bytes, true)} ${words}`).join("")} = ${gib(d.headroom_bytes)}`;
  return el("div", {class: "inside"},
    ...about.map(text => el("p", {class: "quiet"}, text)),
    node.message || node.cordoned ? el("p", {class: "quiet age"}, reportAge(node)) : null, grafana({node: node.name}),
    table(`Devices of ${node.name}`, ["GPU", "Headroom", "In use", "SM", "Replicas free", "Next pod?", "Held by"],
      node.devices.map(d => [
        [el("b", {}, d.gpu), ` ${d.model}`, el("div", {class: "quiet"}, d.uuid), el("div", {class: "quiet"}, `${d.resource}, ${d.sharing === "none" ? "not shared" : d.sharing}`)],
        [el("b", {class: d.headroom_bytes < 0 ? "bad" : null}, gib(d.headroom_bytes)), el("div", {class: "quiet"}, sum(d))],
        measured(d.used_bytes), percent(d.sm_activity_ratio),
        `${d.replicas_free} of ${d.replicas_free + d.replicas_allocated + d.replicas_unhealthy}`,
        d.unhealthy ? [el("span", {class: "bad"}, `unhealthy: ${d.unhealthy_detail ?? d.unhealthy}`)]
          : d.cordoned ? [el("b", {}, "cordoned: takes no new pods")] : `${d.candidate ? "yes" : "no"}: ${d.candidate_because}`,
        d.holders.length ? [el("ul", {}, ...d.holders.map(h => holder(h, node.caps.find(cap => cap.uid === h.uid && cap.device === d.uuid), node.overuse.find(over => over.uid === h.uid && over.device === d.uuid), node.pod_limits.find(each => each.uid === h.uid && each.device === d.uuid))))] : "no pod",
      ])));
}

/** Return the entry of a pod on a device. cap: its proven memory limit. eviction: whether it is evicted because of its overuse. limit: its limit, if any. */
function holder(h, cap, eviction, limit) {
  const uses = h.measured_bytes === null ? "" : `, uses ${gib(h.measured_bytes)}`;
  const over = h.measured_bytes !== null && h.measured_bytes > h.requested_bytes;
  return el("li", {class: over ? "bad" : null}, podLink(h.namespace, h.name),
    ` ${gib(h.requested_bytes)}${limit ? `, limit ${gib(limit.limit_bytes)} (${limit.memory_class})` : ""}${uses}${over ? `; ${gib(h.measured_bytes - h.requested_bytes)} more than reserved` : ""}${eviction ? `; ${eviction.message}` : ""}${h.observed ? "" : " (may be here)"}${cap ? `; ${cap.message}` : ""}`);
}
