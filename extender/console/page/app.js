// Shows the view named by the URL fragment, and keeps it up to date. Every view has its own link.

import {ask, el, gib, many} from "./dom.js";
import {fleet} from "./fleet.js";
import {idle} from "./idle.js";
import {changes, drift, pending} from "./lists.js";
import {pod} from "./pod.js";
import {recommendations} from "./recommendations.js";
import {whatif} from "./whatif.js";

const VIEWS = {fleet, pending, pod, "what-if": whatif, recommendations, idle, changes, drift};
/** Time between two refreshes without an event. */
const EVERY_MS = 5000;
/** Delay of a refresh after an event, because events come in bursts. */
const BURST_MS = 300;
/** All kinds of events: an EventSource needs a listener for each kind. */
const KINDS = ["reservation_made", "reservation_changed", "reservation_removed", "pod_observed", "prediction_missed", "decision",
  "report_lost", "report_returned", "device_unhealthy", "device_healthy", "device_cordoned", "device_uncordoned", "node_appeared", "node_gone"];
const view = document.getElementById("view"), live = document.getElementById("live");

let shown = null;          // {refresh} of the view
let viewNumber = 0;        // counts views: a late answer for an earlier view is dropped
let refreshTimer = null;

function route() {
  const [name = "", ...rest] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  const known = name in VIEWS ? name : "fleet";
  for (const link of document.querySelectorAll("nav a"))
    if (link.hash === `#/${known}`) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  viewNumber += 1;
  view.replaceChildren();
  shown = VIEWS[known](view, rest);
  document.title = `Headroom: ${view.querySelector("h2")?.firstChild?.textContent ?? known}`;
  refresh();
}

/** Refresh the view, the totals and the ages of the inputs; then schedule the next refresh. */
async function refresh() {
  clearTimeout(refreshTimer);
  const ownNumber = viewNumber;
  try {
    const [totals] = await Promise.all([ask("v1/fleet"), shown.refresh()]);
    const [waiting, {inputs}] = await Promise.all([ask("v1/pending", {limit: 1}), ask("v1/inputs")]);
    if (ownNumber !== viewNumber) return;
    facts(totals, waiting.matching);
    ages(inputs);
    live.textContent = `As of ${new Date().toLocaleTimeString("en-GB")}${isLive ? ", live" : ""}`;
    live.className = "";
  } catch (err) {
    if (ownNumber !== viewNumber) return;
    live.textContent = `Not up to date: ${err.message}`;
    live.className = "bad";
  }
  refreshTimer = setTimeout(refresh, EVERY_MS);
}

/** Shows the totals of the fleet and the number of pending pods. */
function facts(totals, pendingPods) {
  const sum = key => totals.models.reduce((all, model) => all + model[key], 0);
  const closed = totals.closed.reduce((all, reason) => all + reason.nodes, 0);
  const figures = [
    [totals.nodes.toLocaleString("en"), totals.nodes === 1 ? "node" : "nodes"],
    [sum("devices").toLocaleString("en"), "devices"],
    [gib(sum("allocatable_bytes")), "allocatable"],
    [gib(sum("reservation_bytes")), "reserved by pods"],
    [gib(sum("unattributed_bytes")), "unattributed"],
    [gib(sum("used_bytes")), "measured in use"],
    [gib(sum("headroom_bytes")), "headroom"],
  ];
  const bad = [
    [sum("overcommitted"), "overcommitted devices"], [sum("unhealthy"), "unhealthy devices"], [sum("cordoned"), "cordoned devices"], [closed, "nodes that take no pods"],
  ].filter(([count]) => count).map(([count, label]) => [count.toLocaleString("en"), label, "bad"]);
  document.getElementById("facts").replaceChildren(...[...figures, ...bad].map(([figure, label, className]) =>
    el("div", {class: className}, el("b", {}, figure), label)));
  const count = document.getElementById("pending-count");
  count.textContent = pendingPods.toLocaleString("en");
  count.setAttribute("aria-label", `${many(pendingPods, "pod")} pending`);
  count.hidden = !pendingPods;
}

const INPUTS = {agents: "Agents", api_server: "API server", extender: "Extender"};

/** Shows the age of each input, with a warning for inputs that are out of date. */
function ages(inputs) {
  const name = each => each.place ? `${INPUTS[each.kind]} ${each.place}` : INPUTS[each.kind];
  const age = each => each.age_s === null ? "no contact yet" : `${Math.round(each.age_s)} s ago`;
  document.getElementById("inputs").replaceChildren(...inputs.map(each =>
    el("span", {class: each.message ? "bad" : ""}, `${name(each)}: ${age(each)}${each.message ? `, ${each.message}` : ""}`)));
}

let isLive = false, burstTimer = null;
/** Refresh shortly after each event. Without the stream, the page refreshes every EVERY_MS. */
function listen() {
  const events = new EventSource("v1/events");
  events.onopen = () => { isLive = true; };
  const refreshSoon = () => { burstTimer ??= setTimeout(() => { burstTimer = null; refresh(); }, BURST_MS); };
  for (const kind of KINDS) events.addEventListener(kind, refreshSoon);
  events.onerror = () => {
    isLive = false;
    if (events.readyState === EventSource.CLOSED) setTimeout(listen, 10 * EVERY_MS);
  };
}

addEventListener("hashchange", route);
addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
route();
listen();
