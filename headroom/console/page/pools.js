// Totals of node pools, or of the nodes with one value of a label, by GPU model.

import {ask, el, gib, many, percent, swap, table, timed} from "./dom.js";

export function pools(view, _, state) {
  const label = el("input", {type: "search", id: "label", placeholder: "topology.kubernetes.io/zone", value: state.get("label"), autocomplete: "off"});
  const form = el("form", {class: "tools", role: "search"}, el("label", {for: "label"}, "Group by node label"), label, el("button", {}, "Show")), status = el("p", {role: "status"}), rows = el("div");
  form.addEventListener("submit", event => { event.preventDefault(); state.set("label", label.value.trim()); load(); });
  view.append(el("h2", {}, "Pools"), form, status, rows);

  async function load() {
    const wanted = state.get("label"), {pools: found} = await ask("v1/pools", {label: wanted});
    if (wanted !== state.get("label")) return;  // another load has started
    const names = new Set(found.map(each => each.pool)), groups = wanted ? [many(names.size, "value"), `of label ${wanted}`] : [many(names.size, "pool")];
    status.textContent = found.length ? `${groups.join(" ")}, ${many(found.reduce((all, each) => all + each.devices, 0), "GPU")}.` : "No GPU is known.";
    const share = (bytes, each) => [gib(bytes), el("div", {class: "quiet"}, percent(each.allocatable_bytes ? bytes / each.allocatable_bytes : null))];
    const trouble = each => [["overcommitted", each.overcommitted], ["unhealthy", each.unhealthy], ["cordoned", each.cordoned]].filter(([, count]) => count).map(([word, count]) => el("div", {class: "bad"}, `${count.toLocaleString("en")} ${word}`));
    swap(rows, ...(found.length ? [found.some(each => each.waiting_pods) ? el("p", {class: "quiet"}, "Waiting: pods that may run in the pool. A pod that may run in several counts in each.") : null, table("Totals", [wanted || "Pool", "Model", "Nodes", "GPUs", "Pods", "Allocatable", "Reserved", "In use", "Headroom", "Waiting", "Trouble"], found.map(each => [
      each.pool || [el("span", {class: "quiet"}, wanted ? "without this label" : "no pool label")],
      [el("a", {href: `#/pods?${new URLSearchParams({model: each.model})}`}, each.model)], each.nodes.toLocaleString("en"), each.devices.toLocaleString("en"), each.pods.toLocaleString("en"),
      gib(each.allocatable_bytes), share(each.reservation_bytes, each), share(each.used_bytes, each), share(each.headroom_bytes, each), each.waiting_pods ? [many(each.waiting_pods, "pod"), el("div", {class: "quiet"}, gib(each.waiting_bytes))] : "-",
      each.overcommitted + each.unhealthy + each.cordoned ? trouble(each) : "none",
    ]), "numbers named cards")] : []));
  }
  const each = timed(load);
  return {refresh: each.load, get leastMs() { return each.leastMs; }};
}
