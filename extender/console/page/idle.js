// Pods that hold GPU memory and use no SM, by namespace and owner, with what that costs.

import {age, ask, el, gib, many, podLink, swap, table} from "./dom.js";

/** Maximum number of pods shown. */
const MOST = 200;

export function idle(view) {
  const hours = el("input", {id: "hours", type: "number", min: "0", step: "any", value: "1"});
  const held = el("input", {id: "held", type: "text", value: "1Gi", size: "6"});
  const form = el("form", {}, el("label", {for: "hours"}, "Idle for at least ", hours, " hours"), " ",
    el("label", {for: "held"}, "and holding at least ", held), " ", el("button", {}, "Show"));
  const status = el("p", {role: "status"}), rows = el("div");
  let limits = {hours: hours.value, held: held.value};  // as submitted: a refresh must not use a half-typed value
  form.addEventListener("submit", event => { event.preventDefault(); limits = {hours: hours.value, held: held.value}; load(); });
  view.append(el("h2", {}, "Idle"), el("p", {}, "Pods that hold memory of a GPU and use none of its SMs. Headroom does not evict them."), form, status, rows);

  let loads = 0;
  async function load() {
    const ownLoad = ++loads;
    const body = await ask("v1/idle", limits);
    if (ownLoad !== loads) return;  // another load has started
    const costs = body.gpu_hour_price !== null;
    const sums = each => [gib(each.held_bytes), (each.gpu_ratio ?? each.gpus_ratio).toFixed(2), each.gpu_days.toFixed(2), ...(costs ? [each.cost.toFixed(2)] : [])];
    const headers = ["Held", "GPUs", "GPU days", ...(costs ? ["Cost"] : [])];
    const pods = body.teams.reduce((all, team) => all + team.pods, 0), days = body.teams.reduce((all, team) => all + team.gpu_days, 0);
    status.textContent = (pods ? `${many(pods, "pod")} held ${days.toFixed(2)} GPU days without using them.` : "No such pod.")
      + (body.devices_without_sm_activity ? ` Not checked: ${many(body.devices_without_sm_activity, "device")} without a measurement of SM activity.` : "")
      + (body.pods.length > MOST ? ` Shown are the first ${MOST} rows of pods.` : "");
    swap(rows, ...(pods ? [
      table("By namespace", ["Namespace", "Pods", ...headers], body.teams.map(each => [each.namespace, `${each.pods}`, ...sums(each)])),
      table("By owner", ["Namespace", "Owner", "Pods", ...headers], body.owners.map(each => [each.namespace, `${each.kind} ${each.name}`, `${each.pods}`, ...sums(each)])),
      table("Pods, the most wasteful first", ["Pod", "Idle for", "Node and device", ...headers], body.pods.slice(0, MOST).map(each => [
        [podLink(each.namespace, each.name)], [el("span", {title: each.idle_since}, age(each.idle_s))],
        [each.node, el("div", {class: "quiet"}, each.device)], ...sums(each),
      ])),
    ] : []));
  }
  return {refresh: load, leastMs: 4500};
}
