// Pods that hold GPU memory and use no SM, by namespace and owner, with what that costs.

import {saveButton} from "./csv.js";
import {age, ask, atMost, choice, el, gib, many, podLink, swap, table} from "./dom.js";
import {EVERY_MS, FAILED_EVERY_MS} from "./ranges.js";

/** Maximum number of rows of a table, on a desktop and on a phone. */
const MOST = 200, PHONE = 10;
/** Ranges of the costs. */
const RANGES = {"1h": "the last hour", "1d": "the last day", "7d": "the last 7 days", "30d": "the last 30 days"};

export function idle(view, _, state) {
  const hours = el("input", {id: "hours", type: "number", min: "0", step: "any", value: "1", class: "short"});
  const held = el("input", {id: "held", type: "text", value: "1Gi", class: "short"});
  const form = el("form", {class: "tools"}, el("label", {for: "hours"}, "Idle for at least ", hours, " hours"), " ",
    el("label", {for: "held"}, "and holding at least ", held), " ", el("button", {}, "Show"));
  const status = el("p", {role: "status"}), rows = el("div");
  let limits = {hours: hours.value, held: held.value};  // as submitted: a refresh must not use a half-typed value
  form.addEventListener("submit", event => { event.preventDefault(); limits = {hours: hours.value, held: held.value}; load(); });
  view.append(el("h2", {}, "Idle"), el("p", {}, "Pods that hold memory of a GPU and use none of its SMs. Headroom does not evict them."), form, status, rows);
  const loadCosts = costs(view, state);

  let loads = 0;
  async function load() {
    const ownLoad = ++loads;
    const body = await ask("v1/idle", limits);
    if (ownLoad !== loads) return;  // another load has started
    const costs = body.gpu_hour_price !== null;
    const sums = each => [gib(each.held_bytes), (each.gpu_ratio ?? each.gpus_ratio).toFixed(2), each.gpu_days.toFixed(2), ...(costs ? [each.cost.toFixed(2)] : [])];
    const most = atMost(MOST, PHONE), headers = ["Held", "GPUs", "GPU days", ...(costs ? ["Cost"] : [])];
    const pods = body.teams.reduce((all, team) => all + team.pods, 0), days = body.teams.reduce((all, team) => all + team.gpu_days, 0);
    status.textContent = (pods ? `${many(pods, "pod")} held ${days.toFixed(2)} GPU days without using them.` : "No pod holds this much memory and is idle for this long.")
      + (body.devices_without_sm_activity ? ` Not checked: ${many(body.devices_without_sm_activity, "device")} without a measurement of SM activity.` : "")
      + (body.pods.length > most ? ` Only the first ${most} rows of each table are shown.` : "");
    swap(rows, ...(pods ? [
      table("By namespace", ["Namespace", "Pods", ...headers], body.teams.slice(0, most).map(each => [each.namespace, `${each.pods}`, ...sums(each)]), "numbers cards"),
      saveButton("idle by namespace", body.teams),
      table("By owner", ["Namespace", "Owner", "Pods", ...headers], body.owners.slice(0, most).map(each => [each.namespace, `${each.kind} ${each.name}`, `${each.pods}`, ...sums(each)]), "cards"),
      saveButton("idle by owner", body.owners),
      table("Pods, the most wasteful first", ["Pod", "Idle for", "Node and device", ...headers], body.pods.slice(0, most).map(each => [
        [podLink(each.namespace, each.name)], [el("span", {title: each.idle_since}, age(each.idle_s))],
        [each.node, el("div", {class: "quiet"}, each.device)], ...sums(each),
      ]), "cards"),
      saveButton("idle pods", body.pods),
    ] : []));
  }
  return {refresh: () => { loadCosts(); return load(); }, leastMs: 4500};
}

/** Show what each namespace held and used in a range of time. Returns a function that loads it again if that is due. */
function costs(view, state) {
  const range = choice("In", "since", RANGES, state), status = el("p", {role: "status"}), rows = el("div");
  view.append(el("h3", {}, "Held and used"), el("form", {class: "tools"}, ...range.parts), status, rows);
  range.select.addEventListener("change", () => { state.set("since", range.select.value); dueAt = 0; load(); });

  let loads = 0, dueAt = 0;
  async function load() {
    if (Date.now() < dueAt) return;
    const ownLoad = ++loads;
    dueAt = Date.now() + EVERY_MS;
    let body;
    try {
      body = await ask("v1/costs", {since: range.select.value});
    } catch (err) {
      if (ownLoad !== loads) return;
      dueAt = Date.now() + FAILED_EVERY_MS;
      status.textContent = `Not available: ${err.message}`;
      rows.replaceChildren();
      return;
    }
    if (ownLoad !== loads) return;  // another load has started
    const number = value => value.toLocaleString("en", {minimumFractionDigits: 2, maximumFractionDigits: 2});
    const {total} = body, priced = body.gpu_hour_price !== null, hours = body.covered_s / 3600;
    status.textContent = (body.namespaces.length ? `Pods held ${number(total.held_gpu_hours)} GPU hours and left ${number(total.idle_gpu_hours)} idle` +
      (priced ? `, which cost ${number(total.idle_cost)} of ${number(total.cost)}.` : ".") : "No pod held a GPU.")
      + (body.covered_s < .99 * (body.to_s - body.from_s) ? ` Recorded: ${hours.toFixed(1)} of ${((body.to_s - body.from_s) / 3600).toFixed(1)} hours.` : "");
    const columns = [["GPU hours held", "held_gpu_hours"], ["GPU hours used", "used_gpu_hours"], ["GPU hours idle", "idle_gpu_hours"], ["GPU hours not measured", "unmeasured_gpu_hours"],
      ["GiB days held", "held_gib_days"], ["GiB days unused", "unused_gib_days"], ...(priced ? [["Cost", "cost"], ["Idle cost", "idle_cost"]] : [])];
    swap(rows, ...(body.namespaces.length ? [table("GPU hours by namespace, the most idle first", ["Namespace", ...columns.map(([header]) => header)],
      body.namespaces.slice(0, atMost(MOST, PHONE)).map(each => [each.namespace, ...columns.map(([, field]) => number(each[field]))]), "numbers cards"), saveButton("costs by namespace", body.namespaces)] : []));
  }
  return load;
}
