// Memory by namespace and by owner: who reserves how much, who uses it, and what is unused.

import {saveButton} from "./csv.js";
import {ask, atMost, choice, el, gib, many, percent, swap, table, timed} from "./dom.js";
import {link} from "./pods.js";
import {quotas} from "./quotas.js";

const SORTS = {unused_bytes: "unused memory", reserved_bytes: "reserved memory", used_bytes: "memory in use", overuse_bytes: "overuse", waiting_bytes: "waiting memory", waiting_pods: "waiting pods"};

/** Number of namespaces and owners that are shown at first, on a desktop and on a phone. */
const MOST = 15, PHONE = 8;

export function teams(view, [namespace = ""], state) {
  const sort = choice("Sort by", "sort", SORTS, state), search = el("input", {type: "search", id: "find", placeholder: "namespace, owner", value: state.get("find"), autocomplete: "off"});
  const status = el("p", {role: "status"}), rows = el("div"), form = el("form", {class: "tools", role: "search"}, el("label", {for: "find"}, "Find"), search, ...sort.parts);
  form.addEventListener("submit", event => event.preventDefault());
  view.append(el("h2", {}, namespace ? `Namespace ${namespace}` : "Teams"), ...(namespace ? [el("p", {}, el("a", {href: "#/teams"}, "All namespaces"))] : []), form, status, rows);
  const limits = quotas(namespace);
  view.append(limits.element);
  let body = null;
  sort.select.addEventListener("change", () => { state.set("sort", sort.select.value); show(); });
  search.addEventListener("input", () => { state.set("find", search.value.trim()); show(); });

  function show() {
    if (!body) return;
    const text = search.value.trim().toLowerCase(), key = sort.select.value, most = (a, b) => b[key] - a[key];
    const found = each => !text || `${each.namespace}/${each.name ?? ""}`.toLowerCase().includes(text);
    const all = body.teams.filter(each => !namespace || each.namespace === namespace).filter(each => !text || found(each) || body.owners.some(owner => owner.namespace === each.namespace && found(owner))).sort(most), owners = body.owners.filter(found).sort(most), isShort = !state.get("all"), shown = each => isShort ? each.slice(0, atMost(MOST, PHONE)) : each;
    const first = all[0];
    status.textContent = !first ? "No pod holds GPU memory or waits for it." : namespace ? "" : key === "unused_bytes" && first[key] ? wastes(first, owners[0]) : key === "unused_bytes" ? "No namespace wastes memory." : `${first.namespace} comes first by ${SORTS[key]}: ${key === "waiting_pods" ? many(first[key], "pod") : gib(first[key])}.`;
    const headers = ["Pods", "Reserved", "In use", "Peak", "Unused", "Overuse", "Waiting"];
    const sums = each => [each.pods.toLocaleString("en"), gib(each.reserved_bytes), gib(each.used_bytes), each.peak_bytes ? gib(each.peak_bytes) : "-", each.unused_bytes ? [el("b", {}, gib(each.unused_bytes)), share(each)] : "-", each.overuse_bytes ? [el("span", {class: "bad"}, gib(each.overuse_bytes))] : "-", each.waiting_pods ? [link({namespace: each.namespace, ...(each.name ? {owner: `${each.kind}/${each.name}`} : {}), state: "waiting"}, waiting(each))] : "-"];
    swap(rows, ...(all.length ? [
      table("By namespace", ["Namespace", ...headers], shown(all).map(each => [[el("a", {href: `#/teams/${encodeURIComponent(each.namespace)}`}, each.namespace)], ...sums(each)]), "numbers cards"),
      saveButton("teams by namespace", all),
      table("By owner", ["Owner", ...headers], shown(owners).map(each => [[link({namespace: each.namespace, owner: `${each.kind}/${each.name}`}, `${each.namespace}/${each.name}`), el("div", {class: "quiet"}, each.kind)], ...sums(each)]), "numbers cards"),
      saveButton("teams by owner", owners),
      shown(all).length < all.length || shown(owners).length < owners.length ? el("button", {type: "button", onclick: () => { state.set("all", "1"); show(); }}, `Show all ${many(all.length, "namespace")} and ${many(owners.length, "owner")}`) : null,
      body.matching > body.owners.length ? el("p", {class: "quiet"}, `Only the ${body.owners.length} owners with the most unused memory are shown, of ${body.matching.toLocaleString("en")}.`) : null,
    ] : []));
  }
  const wastes = (team, owner) => `${team.namespace} wastes most: ${gib(team.unused_bytes)} are reserved and unused, ${percent(team.unused_bytes / team.reserved_bytes)} of its reservations.`
    + (owner ? ` Of all owners, ${owner.kind} ${owner.namespace}/${owner.name} wastes most: ${gib(owner.unused_bytes)}.` : "");
  const waiting = each => `${many(each.waiting_pods, "pod")}${each.waiting_bytes ? `, ${gib(each.waiting_bytes)}` : ""}`;
  const share = each => each.reserved_bytes ? el("div", {class: "quiet"}, `${percent(each.unused_bytes / each.reserved_bytes)} of its reservations`) : null;

  const teams = timed(async () => { body = await ask("v1/teams", {namespace}); });
  async function load() {
    await teams.load();
    show();
    await limits.refresh();
  }
  return {refresh: load, get leastMs() { return teams.leastMs; }};
}
