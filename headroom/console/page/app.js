// Shows the view named by the URL fragment, and keeps it up to date. Every view has its own link.

import {ask, el, gib, many, moment} from "./dom.js";
import {fleet} from "./fleet.js";
import {idle} from "./idle.js";
import {changes, drift, pending} from "./lists.js";
import {nodes} from "./nodes.js";
import {overview} from "./overview.js";
import {pod} from "./pod.js";
import {pods} from "./pods.js";
import {recommendations} from "./recommendations.js";
import {stateOf} from "./state.js";
import {teams} from "./teams.js";
import {whatif} from "./whatif.js";

const VIEWS = {overview, fleet, nodes, pods, teams, pending, pod, "what-if": whatif, recommendations, idle, changes, drift};
/** Time between two refreshes without an event. */
const EVERY_MS = 5000;
/** Delay between an event and its refresh, because events come in bursts, and minimum time between two refreshes. */
const BURST_MS = 300, LEAST_MS = 1250;
/** Minimum time between two reads of the totals. A report must be on the page within 2 s. */
const TOTALS_EVERY_MS = 1500;
/** A refresh that takes longer is shown as a problem. */
const SLOW_MS = 10_000;
/** All kinds of events: an EventSource needs a listener for each kind. */
const KINDS = ["reservation_made", "reservation_changed", "reservation_removed", "pod_observed", "prediction_missed", "decision",
  "overuse_began", "overuse_ended", "overcommit_began", "overcommit_ended", "report_lost", "report_returned", "device_unhealthy", "device_healthy", "device_cordoned", "device_uncordoned", "node_appeared", "node_gone"];
const view = document.getElementById("view"), live = document.getElementById("live");

let shown = null;          // {refresh} of the view
let viewNumber = 0;        // counts views: a late answer for an earlier view is dropped
let refreshTimer = null, isRefreshing = false, isWanted = false, refreshBeganAt = 0;
let isLive = false, wasLive = false, burstTimer = null;
let shownAt = 0;           // when the view was last read; slow views are read less often (leastMs)
let totalsAt = 0, inputsAt = 0, totalsTimer = null, upToDateAt = null, problem = "";
let lost = null;           // {since, message} while the console has lost the API server

function route() {
  const [name = "", ...rest] = location.hash.split("?")[0].replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  const known = name in VIEWS ? name : "overview";
  for (const link of document.querySelectorAll("nav a"))
    if (link.hash === `#/${known}`) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  viewNumber += 1;
  shownAt = 0;
  shown?.close?.();
  view.replaceChildren();
  view.className = known;
  shown = VIEWS[known](view, rest, stateOf(location.hash));
  document.title = `Headroom: ${view.querySelector("h2")?.firstChild?.textContent ?? known}`;
  refresh();
}

/** Refresh the view and the totals, then schedule the next refresh. If another refresh is requested meanwhile, it follows. */
async function refresh() {
  if (isRefreshing) { isWanted = true; return; }
  clearTimeout(refreshTimer);
  [isRefreshing, isWanted] = [true, false];
  const ownNumber = viewNumber, beganAt = refreshBeganAt = Date.now();
  try {
    if (beganAt - shownAt >= (shown.leastMs ?? 0)) {
      shownAt = beganAt;
      await shown.refresh();
    }
    await refreshTotals();
    upToDateAt = new Date();
    problem = "";
  } catch (err) {
    problem = err.message;
  }
  isRefreshing = false;
  if (ownNumber !== viewNumber) { refresh(); return; }
  showLive();
  if (!document.hidden) refreshTimer = setTimeout(refresh, isWanted ? Math.max(BURST_MS, LEAST_MS - (Date.now() - beganAt)) : EVERY_MS);
}

/** Read the totals, and every EVERY_MS the ages of the inputs. If the last read is less than TOTALS_EVERY_MS ago, wait until then. */
async function refreshTotals() {
  const waitMs = totalsAt + TOTALS_EVERY_MS - Date.now();
  if (waitMs > 0) {
    totalsTimer ??= setTimeout(() => refreshTotals().catch(err => { problem = err.message; showLive(); }), waitMs);
    return;
  }
  clearTimeout(totalsTimer);
  totalsTimer = null;
  totalsAt = Date.now();
  const readsInputs = totalsAt - inputsAt >= EVERY_MS;
  const [totals, inputs] = await Promise.all([ask("v1/fleet"), readsInputs ? ask("v1/inputs") : null]);
  facts(totals, totals.pending_pods);
  if (inputs) {
    inputsAt = totalsAt;
    ages(inputs.inputs);
    const api = inputs.inputs.find(each => each.kind === "api_server" && each.message);
    lost = api ? {since: api.age_s === null ? null : new Date(Date.now() - 1000 * api.age_s), message: api.message} : null;
  }
}

/** Show whether the page is up to date; if not, since when and why. */
function showLive() {
  const {since, message} = problem || !lost ? {since: upToDateAt, message: problem} : lost;
  const at = since ? moment(since) : "";
  live.textContent = message ? `Not up to date${at ? ` since ${at}` : ""}: ${message}` : `As of ${at}${isLive ? ", live" : wasLive ? ", connection lost: read again every 5 s" : ""}`;
  live.className = message || wasLive && !isLive ? "bad" : "";
}

/** Shows the totals of the fleet and the number of pending pods. */
function facts(totals, pendingPods) {
  const sum = key => totals.models.reduce((all, model) => all + model[key], 0);
  const closed = totals.closed.reduce((all, reason) => all + reason.nodes, 0);
  const figures = [
    [totals.nodes.toLocaleString("en"), totals.nodes === 1 ? "node" : "nodes"],
    [sum("devices").toLocaleString("en"), "devices"],
    [gib(sum("allocatable_bytes")), "allocatable"],
    [gib(sum("reserved_total_bytes")), "reserved by pods"],
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
  document.getElementById("inputs").replaceChildren("Last contact", ...inputs.map(each =>
    el("span", {class: each.message ? "bad" : ""}, `${name(each)}: ${age(each)}${each.message ? `, ${each.message}` : ""}`)));
}

/** Refresh shortly after each event, but at most once in LEAST_MS. Without the stream, the page refreshes every EVERY_MS. */
function listen() {
  const events = new EventSource("v1/events");
  events.onopen = () => { [isLive, wasLive] = [true, true]; refreshSoon(); };
  const refreshSoon = () => {
    if (!document.hidden) burstTimer ??= setTimeout(() => { burstTimer = null; refresh(); }, Math.max(BURST_MS, LEAST_MS - (Date.now() - (upToDateAt ?? 0))));
  };
  for (const kind of [...KINDS, "snapshot"]) events.addEventListener(kind, refreshSoon);
  events.onerror = () => {
    isLive = false;
    showLive();
    if (events.readyState === EventSource.CLOSED) setTimeout(listen, 10 * EVERY_MS);
  };
}

/** Show that the page is out of date while the console hangs or its answers do not arrive. */
setInterval(() => {
  if (!isRefreshing || problem || Date.now() - refreshBeganAt < SLOW_MS) return;
  problem = "the console does not answer";
  showLive();
}, 1000);

addEventListener("hashchange", route);
addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
route();
listen();
