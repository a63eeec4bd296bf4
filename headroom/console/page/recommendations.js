// Recommended requests from the peaks of past lives, and what accepting them would free.

import {saveButton} from "./csv.js";
import {ask, atMost, el, gib, many, table} from "./dom.js";

/** Maximum number of rows shown, on a desktop and on a phone. */
const MOST = 200, PHONE = 10;
/** Time between two loads: recommendations change slowly. */
const EVERY_MS = 60000;

export function recommendations(view) {
  const namespace = el("input", {id: "of-namespace", type: "text", class: "name"});
  const form = el("form", {class: "tools"}, el("label", {for: "of-namespace"}, "Namespace ", namespace), " ", el("button", {}, "Show"), " ",
    el("button", {type: "button", onclick: simulate}, "Simulate that all are accepted"));
  const status = el("p", {role: "status"}), effect = el("p", {role: "status"}), rows = el("div");
  form.addEventListener("submit", event => { event.preventDefault(); effect.replaceChildren(); loadedAt = -EVERY_MS; load(); });
  view.append(el("h2", {}, "Recommendations"), el("p", {}, "Recommended requests, based on the memory peaks of past lives. Headroom changes no request by itself, unless a pod has ",
    el("code", {}, "headroom.gpu/vram: auto"), "."), form, status, effect, rows);

  let loads = 0, loadedAt = -EVERY_MS;
  async function load() {
    const ownLoad = ++loads;
    loadedAt = performance.now();
    const body = await ask("v1/recommendations", {namespace: namespace.value});
    if (ownLoad !== loads) return;  // another load has started
    const found = [...body.recommendations].sort((a, b) => Math.abs(b.reclaimable_bytes) - Math.abs(a.reclaimable_bytes));
    const most = atMost(MOST, PHONE), freed = body.teams.reduce((all, team) => all + team.reclaimable_bytes, 0);
    status.textContent = (found.length ? `Lower requests would free ${gib(freed)}.` : "No lives of containers are recorded. Does the recorder run?")
      + (found.length > most ? ` Only ${most} of ${many(found.length, "row")} are shown.` : "");
    const teams = body.teams.filter(team => team.reclaimable_bytes).sort((a, b) => b.reclaimable_bytes - a.reclaimable_bytes).slice(0, most);
    rows.replaceChildren(...(found.length ? [
      teams.length ? table("By namespace", ["Namespace", "Frees", "Most by"], teams.map(team => [team.namespace, gib(team.reclaimable_bytes),
        team.owners.slice(0, 3).map(each => `${each.kind} ${each.name} (${many(each.pods, "pod")}, ${gib(each.reclaimable_bytes)})`).join(", ") || "-"])) : "",
      table("By container, the largest difference first", ["Owner", "Container", "Pods", "Request", "Recommended", "Frees", "Basis"], found.slice(0, most).map(each => [
        [`${each.namespace}/${each.owner_name}${each.family ? "*" : ""}`, el("div", {class: "quiet"}, each.owner_kind)],
        [each.container, el("div", {class: "quiet"}, each.model)],
        `${each.pods}`,
        each.current_bytes === null ? "-" : gib(each.current_bytes),
        each.request_bytes === null ? "-" : gib(each.request_bytes),
        each.request_bytes === null || !each.pods ? "-" : [el("span", {class: each.reclaimable_bytes < 0 ? "bad" : ""}, gib(each.reclaimable_bytes))],
        [each.message, each.setting ? el("div", {class: "quiet"}, each.setting) : null],
      ]), "sums cards"),
      saveButton("recommendations", found),
    ] : []));
  }

  /** Show what accepting all recommendations changes. It takes seconds on large clusters, so it is not repeated. */
  async function simulate() {
    effect.textContent = "Simulating …";
    try {
      const {accepted} = await ask("v1/recommendations", {namespace: namespace.value, accepted: "true"});
      effect.textContent = `Simulated: ${accepted.message}. Not checked: ${accepted.not_checked.join(", ")}.`;
    } catch (err) {
      effect.textContent = `The simulation failed: ${err.message}`;
    }
  }
  return {refresh: async () => { if (performance.now() - loadedAt >= EVERY_MS) await load(); }};
}
