// Pending pods, changes, and missed predictions.

import {saveButton} from "./csv.js";
import {ask, atMost, el, gib, local, many, podLink, since, swap, table} from "./dom.js";

/** Number of pods on a page, on a desktop and on a phone. */
const PODS = 50, PHONE = 10;

export function pending(view) {
  const rows = el("div"), status = el("p", {role: "status"}), steering = el("div");
  const next = el("button", {type: "button"}, "Next"), first = el("button", {type: "button"}, "From the start");
  let after = "";
  next.addEventListener("click", () => { after = next.dataset.after; load(); });
  first.addEventListener("click", () => { after = ""; load(); });
  view.append(el("h2", {}, "Pending"), status, steering, rows, el("div", {class: "pages"}, first, next));

  let loads = 0;
  async function load() {
    const ownLoad = ++loads;
    const body = await ask("v1/pending", {continue: after, steering: "true", limit: atMost(PODS, PHONE)});
    if (ownLoad !== loads) return;  // another load has started
    status.textContent = body.matching ? `${many(body.matching, "pod")} pending for a GPU.` : "No pod is pending for a GPU.";
    swap(steering, ...(body.steering ? [el("p", {}, `${body.steering.sentence}. To do: ${body.steering.to_do}`)] : []));
    first.disabled = !after;
    next.disabled = !body.remaining;
    next.dataset.after = body.continue ?? "";
    const seen = new Set(), isNew = key => !seen.has(key) && seen.add(key);
    const shown = body.pods.filter(pod => !pod.group || isNew(`${pod.namespace}/${pod.group.name}`));
    swap(rows, ...(shown.length ? [table("Pending pods", ["Pod", "Request", "Recommended", "Pending for", "Reason", "Nearest node"], shown.map(pod => pod.group ? [
      [podLink(pod.namespace, pod.name), el("div", {class: "quiet"}, `${many(pod.group.waiting, "pod")} of group ${pod.group.name}`)],
      pod.group.requests, "-", pod.since ? since(pod.since) : "-", pod.group.message, "-",
    ] : [
      [podLink(pod.namespace, pod.name)],
      pod.request.map(asks).join(", ") || "-",
      pod.recommended ?? "-",
      pod.since ? since(pod.since) : "-",
      pod.fits ? [el("span", {class: pod.verdict === "not_scheduled" ? "bad" : null}, local(pod.message)), pod.verdict === "fits" ? el("div", {class: "quiet"}, pod.asked ? "kube-scheduler will retry it" : "kube-scheduler has not called Headroom for it yet") : null]
        : [local(pod.message), el("ul", {}, ...[...pod.reasons, ...pod.ineligible].map(r => el("li", {}, `${many(r.nodes, "node")}: ${r.message}`)))],
      pod.fits ? pod.nearest : pod.short_bytes === null ? "-" : [el("b", {}, `${gib(pod.short_bytes, true)} short`), ` on ${pod.nearest}`],
    ]), "cards reasons"), saveButton("pending pods", body.pods)] : []));
  }
  return {refresh: load, leastMs: 4500};
}

const ORIGIN = {namespace: " (the namespace's default)", recommendation: " (its recommendation)", replica: " (the share of a replica)"};

/** Return the request of one container, with the source of its amount unless it is an annotation. */
export const asks = a => `${a.count} x ${a.resource} with ${a.amount}${a.limit ? `, limit ${a.limit}` : ""}${ORIGIN[a.source] ?? ""}`;

export function drift(view) {
  const status = el("p", {role: "status"}), rows = el("div");
  view.append(el("h2", {}, "Drift"), el("p", {}, "Headroom predicts which devices a pod gets, and compares the prediction with the first report that shows the pod."), status, rows);
  async function load() {
    const {results, misses, claims} = await ask("v1/drift", {pods: "false"});
    const seen = results.hit + results.shifted + results.miss;
    status.textContent = seen ? `${(seen - results.miss).toLocaleString("en")} of ${many(seen, "pod")} were observed on a predicted device.`
      : "No pod has been observed on its device yet.";
    const shown = misses.slice(0, atMost(MISSES, PHONE));
    swap(rows, ...(shown.length ? [table("Missed predictions, the latest first", ["Pod", "Predicted", "Observed", "Reason"], shown.map(m => [
      [podLink(m.namespace, m.name), el("div", {class: "quiet"}, m.node)],
      [m.predicted.join(", "), m.choice.length ? el("div", {class: "quiet"}, `chosen by Headroom: ${m.choice.join(", ")}`) : null],
      m.observed.join(", "),
      [m.message, m.overcommitted_bytes ? el("div", {class: "bad"}, `overcommits the device by ${gib(m.overcommitted_bytes)}`) : null,
        el("div", {class: "quiet"}, `${since(m.at)} ago`)],
    ])), saveButton("missed predictions", misses)] : []), ...(claims.length ? [claimTable(claims)] : []));
  }
  return {refresh: load};
}

/** Maximum number of claims and of missed predictions shown. */
const CLAIMS = 200, MISSES = 200;

/** Return a table of DRA claims and their measured use. Use that no claim accounts for comes first. */
function claimTable(claims) {
  const worst = claims.toSorted((a, b) => b.excess_bytes - a.excess_bytes).slice(0, atMost(CLAIMS, PHONE));
  const title = worst.length < claims.length ? `DRA claims: ${worst.length} of ${claims.length}` : "DRA claims and measured use";
  return table(title, ["Pod", "Device", "Claimed", "Used", "Beyond the claims"], worst.map(c => [
    c.uid ? [podLink(c.namespace, c.name), el("div", {class: "quiet"}, c.claims.join(", ") || "no claim")] : "processes of no known pod",
    [`${c.pool}/${c.device}`, el("div", {class: "quiet"}, `${c.node}, ${c.uuid}`)],
    gib(c.claimed_bytes), c.measured_bytes === null ? "unknown" : gib(c.measured_bytes),
    c.excess_bytes ? el("span", {class: "bad"}, gib(c.excess_bytes)) : "-",
  ]));
}

/** Maximum number of changes shown, on a desktop and on a phone. */
const NEWEST = 200, NEWEST_ON_PHONE = 20;

export function changes(view) {
  const status = el("p", {role: "status"}), rows = el("div");
  view.append(el("h2", {}, "Changes"), status, rows);
  async function load() {
    const {events} = await ask("v1/events", {follow: "false"});
    const newest = events.slice(-atMost(NEWEST, NEWEST_ON_PHONE)).reverse();
    status.textContent = newest.length ? `The last ${many(newest.length, "change")} that this console recorded.` : "No changes since the console started.";
    swap(rows, ...(newest.length ? [table("Changes, the latest first", ["Time", "Change", "Cause", "Pod", "Node and device", "Details"], newest.map(e => [
      `${since(e.at)} ago`, e.kind.replaceAll("_", " "), e.cause?.replaceAll("_", " "),
      e.name ? [podLink(e.namespace, e.name)] : "-",
      [e.node ?? "-", e.device ? el("div", {class: "quiet"}, e.device) : null], e.message ?? "",
    ]), "cards"), saveButton("changes", events)] : []));
  }
  return {refresh: load};
}
