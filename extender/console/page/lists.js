// Pods that wait, what changed, and predictions that were missed.

import {ask, el, gib, many, podLink, since, table} from "./dom.js";

export function pending(view) {
  const rows = el("div"), told = el("p", {role: "status"});
  const on = el("button", {type: "button"}, "Next"), first = el("button", {type: "button"}, "From the start");
  let after = "";
  on.addEventListener("click", () => { after = on.dataset.after; load(); });
  first.addEventListener("click", () => { after = ""; load(); });
  view.append(el("h2", {}, "Pending"), told, rows, el("div", {class: "pages"}, first, on));

  let asked = 0;
  async function load() {
    const mine = ++asked;
    const body = await ask("v1/pending", {continue: after});
    if (mine !== asked) return;
    told.textContent = body.matching ? `${many(body.matching, "pod")} that wait for a GPU (source: recomputed, generation ${body.snapshot_generation}).` : "No pod waits for a GPU.";
    first.disabled = !after;
    on.disabled = !body.remaining;
    on.dataset.after = body.continue ?? "";
    rows.replaceChildren(...(body.pods.length ? [table("Pods that wait", ["Pod", "Asks for", "Waits", "Because", "Nearest fit"], body.pods.map(pod => [
      [podLink(pod.namespace, pod.name)],
      pod.request.map(asks).join(", ") || "-",
      pod.since ? since(pod.since) : "-",
      pod.fits ? [el("span", {class: "good"}, pod.message), el("div", {class: "quiet"}, pod.asked ? "kube-scheduler will try it again" : "kube-scheduler has not asked about it")]
        : [pod.message, el("ul", {}, ...[...pod.reasons, ...pod.ineligible].map(r => el("li", {}, `${many(r.nodes, "node")}: ${r.message}`)))],
      pod.fits ? pod.nearest : pod.short_bytes === null ? "-" : [el("b", {}, `${gib(pod.short_bytes)} short`), ` on ${pod.nearest}`],
    ]))] : []));
  }
  return {refresh: load};
}

export const asks = a => `${a.count} x ${a.resource} with ${a.amount}${a.source === "annotation" ? "" : a.source === "namespace" ? " (the namespace's default)" : " (what a replica is worth)"}`;

export function drift(view) {
  const told = el("p", {role: "status"}), rows = el("div");
  view.append(el("h2", {}, "Drift"), told, rows);
  async function load() {
    const {results, misses} = await ask("v1/drift", {pods: "false"});
    const seen = results.hit + results.shifted + results.miss;
    told.textContent = seen ? `${(seen - results.miss).toLocaleString("en")} of ${many(seen, "pod")} are on a device that was predicted.`
      : "No pod was seen on its device yet.";
    rows.replaceChildren(...(misses.length ? [table("Predictions that were missed, the latest first", ["Pod", "Predicted", "Is on", "Why"], misses.map(m => [
      [podLink(m.namespace, m.name), el("div", {class: "quiet"}, m.node)],
      [m.predicted.join(", "), m.choice.length ? el("div", {class: "quiet"}, `chosen by us: ${m.choice.join(", ")}`) : null],
      m.observed.join(", "),
      [m.message, m.overcommitted_bytes ? el("div", {class: "bad"}, `overcommits the device by ${gib(m.overcommitted_bytes)}`) : null,
        el("div", {class: "quiet"}, `${since(m.at)} ago`)],
    ]))] : []));
  }
  return {refresh: load};
}

const NEWEST = 200;

export function changes(view) {
  const told = el("p", {role: "status"}), rows = el("div");
  view.append(el("h2", {}, "Changes"), told, rows);
  async function load() {
    const {events} = await ask("v1/events", {follow: "false"});
    const newest = events.slice(-NEWEST).reverse();
    told.textContent = newest.length ? `The last ${many(newest.length, "change")} that this replica saw.` : "Nothing has changed since this replica began.";
    rows.replaceChildren(...(newest.length ? [table("What changed, the latest first", ["When", "What", "Why", "Pod", "Node and device", ""], newest.map(e => [
      `${since(e.at)} ago`, e.kind.replaceAll("_", " "), e.cause?.replaceAll("_", " "),
      e.name ? [podLink(e.namespace, e.name)] : "-",
      [e.node ?? "-", e.device ? el("div", {class: "quiet"}, e.device) : null], e.message ?? "",
    ]))] : []));
  }
  return {refresh: load};
}
