// One pod: why it is pending or where it is placed, with the memory accounting of the nearest nodes.

import {ask, el, gib, gpuLink, local, many, podLink, since, swap, table} from "./dom.js";
import {grafana} from "./grafana.js";
import {asks} from "./lists.js";
import {about, plot} from "./plot.js";
import {ranges} from "./ranges.js";

const VERDICTS = {bound: "good", not_scheduled: "bad", rejected: "bad", unreadable: "bad", gated: "bad", other_scheduler: "bad"};

export function pod(view, [namespace = "", name = ""]) {
  const box = el("input", {id: "pod", placeholder: "namespace/name", required: true, pattern: "[^\\/]+\\/[^\\/]+", autocomplete: "off",
    value: name ? `${namespace}/${name}` : null});
  const answer = el("div", {id: "answer", "aria-live": "polite"});
  const form = el("form", {class: "tools"}, el("label", {for: "pod"}, "Pod"), box, el("button", {}, "Why?"));
  form.addEventListener("submit", event => {
    event.preventDefault();
    const [within, which] = box.value.trim().split("/").map(encodeURIComponent);
    location.hash = `#/pod/${within}/${which}`;
  });
  const memory = plot("Memory of the pod"), activity = plot("SM activity of its GPUs"), range = ranges(() => plots()), source = el("p", {class: "quiet"}), life = el("div"), details = el("div", {id: "details"});
  memory.element.hidden = activity.element.hidden = true;
  view.append(el("h2", {}, name ? `Pod ${namespace}/${name}` : "Explain a pod"), form, answer, name ? range.element : "", memory.element, activity.element, source, name ? grafana({namespace, pod: name}) : "", life, details);
  if (!name) { box.focus(); return {refresh: async () => {}}; }

  async function load() {
    let body;
    try {
      body = await ask(`v1/explain?pod=${encodeURIComponent(`${namespace}/${name}`)}`);
    } catch (err) {
      if (err.isLost) throw err; // keep what is shown
      swap(answer, el("p", {class: "bad"}, err.message));
      swap(details);
      return;
    }
    swap(answer, ...first(body));
    swap(details, ...rest(body));
    await Promise.all([showLife(), body.bound_to ? plots() : null]);
  }

  const plots = () => range.show(`v1/history?pod=${encodeURIComponent(`${namespace}/${name}`)}`, showHistory, withoutHistory);

  /** Show the use of each device of the pod, if any report has shown the pod on one. */
  async function showHistory(history) {
    const {span_s} = range, of = kind => history.series.filter(each => each.kind === kind), uses = of("pod"), sm = of("sm");
    [memory.element.hidden, activity.element.hidden] = [!uses.length, !sm.length];
    if (!uses.length) { withoutHistory("Prometheus has no use of this pod in this range."); return; }
    source.textContent = `${about(history)}${range.isLong ? " SM activity is shown for the last hour only." : ""}`;
    const requested = uses[0].requested_bytes ?? null;
    if (sm.length) await activity.show({at: history.at_s, span_s, most: 1, series: sm.map((each, i) => ({label: `SM activity of ${each.device}`, values: each.values, unit: "ratio", colour: i ? `var(--pod-${1 + i % 5})` : "var(--sm)", fill: i === 0}))});
    await memory.show({at: history.at_s, span_s, series: [
      ...uses.map((each, i) => ({label: `in use on ${each.device}`, values: each.values, unit: "bytes", colour: `var(--pod-${1 + i % 5})`, fill: i === 0})),
      ...(requested === null ? [] : [{label: "reserved", values: history.at_s.map(() => requested), unit: "bytes", colour: "var(--reservations)", dash: [6, 4]}])]});
  }
  /** Hide the plots. The reason is shown only for long ranges, because most pods without a value in the last hour have just started. */
  function withoutHistory(why) {
    memory.element.hidden = activity.element.hidden = true;
    source.textContent = range.isLong ? why : "";
  }
  /** Show what happened to the pod, the latest first. */
  async function showLife() {
    const found = await ask(`v1/timeline?pod=${encodeURIComponent(`${namespace}/${name}`)}`).catch(() => null);
    if (!found) return;
    const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
    swap(life, ...(found.entries.length ? [el("h3", {}, "Timeline, the latest first"), el("ol", {class: "timeline", reversed: true, "aria-label": "Timeline"}, ...found.entries.toReversed().map(each =>
      el("li", {class: each.kind}, el("time", {datetime: each.at, title: each.at}, new Date(each.at).toLocaleString("en-GB", {day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit"})), " ", el("b", {}, each.kind), ` ${local(each.message)}`))),
      el("p", {class: "quiet"}, `Times in ${zone}. ${found.kept}`)] : []));
  }
  return {refresh: load, close: () => { memory.close(); activity.close(); }, leastMs: 1500};
}

/** Return a text to copy, with a button that copies it. Browsers copy only on pages of localhost or https, so elsewhere the text is selected. */
function fix(text) {
  const code = el("code", {}, text), button = el("button", {type: "button", onclick: async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "Selected: copy it with Ctrl+C";
    }
  }}, "Copy");
  return el("div", {class: "fix"}, el("pre", {tabindex: "0"}, code), button);
}

/** The verdict and what helps. */
function first(body) {
  return [
    el("p", {class: `verdict ${body.overuse.length || body.overcommitted.some(each => !each.until) || body.failed_containers.length ? "bad" : VERDICTS[body.verdict] ?? ""}`}, local(body.message)),
    body.group ? el("p", {}, local(body.group)) : null,
    body.devices.length ? el("p", {}, ...body.devices.flatMap((gpu, i) => [i ? ", " : "", gpuLink(body.bound_to, gpu)])) : null,
    body.changed ? el("p", {class: "bad"}, body.changed) : null,
    body.overuse.length ? el("section", {}, el("h3", {}, "Overuse"),
      el("ul", {}, ...body.overuse.map(over => el("li", {class: "bad"}, el("code", {}, over.device), ` uses ${gib(over.used_bytes, true)}, but has reserved ${gib(over.reserved_bytes)}; ${over.message}`)))) : null,
    body.failed_containers.length ? el("section", {}, el("h3", {}, "Failed containers"),
      el("ul", {}, ...body.failed_containers.map(each => el("li", {class: "bad"}, local(each.message))))) : null,
    body.overcommitted.length ? el("section", {}, el("h3", {}, "Overcommitted GPU"),
      el("ul", {}, ...body.overcommitted.map(each => el("li", {class: each.until ? null : "bad"}, local(each.message))))) : null,
    body.request.length ? el("ul", {}, ...body.request.map(a => el("li", {}, `container ${a.container} requests ${asks(a)}`)),
      body.memory_class && body.memory_class !== "unlimited" ? el("li", {}, `class ${body.memory_class}`) : null) : null,
    !body.bound_to && body.advice.length ? el("section", {}, el("h3", {}, "Suggestions"),
      el("ul", {}, ...body.advice.map(each => el("li", {}, local(each.sentence), each.fix ? fix(each.fix) : null)))) : null,
    !body.bound_to && body.reasons.length + body.ineligible.length + body.left_out_nodes ? el("section", {}, el("h3", {}, "Nodes that cannot take it"),
      el("ul", {}, ...[...body.reasons, ...body.ineligible].map(r => el("li", {}, `${many(r.nodes, "node")}: ${r.message}`)),
        body.left_out_nodes ? el("li", {}, `${many(body.left_out_nodes, "node")}: excluded by kube-scheduler for other resources, volumes or affinity`) : null)) : null,
    el("p", {class: "quiet"}, local(body.attempts.message)),
    body.bound_to ? null : el("p", {class: "quiet"}, `Computed by the console now, from generation ${body.snapshot_generation} of its snapshot.`),
  ];
}

/** The evidence. */
function rest(body) {
  return [
    ...decision(body.last_decision),
    body.bound_to && body.caps.length ? el("section", {}, el("h3", {}, "Memory limit"),
      el("ul", {}, ...body.caps.map(cap => el("li", {}, el("code", {}, cap.device), ` ${cap.message}`)))) : null,
    body.bound_to ? placement(body) : el("section", {}, el("h3", {}, "Eligible nodes, the nearest first"), ...body.nearest.map(nearest)),
  ];
}

/** The source of a result: recorded by an extender, or computed by the console from its own snapshot. */
function sourceOf(source, generation, replica) {
  return `source: ${source}${generation === undefined ? "" : `, generation ${generation}`}${replica ? ` of extender ${replica}` : ""}`;
}

/** The last decision about the pod, verb by verb, merged over all replicas. */
function decision(last) {
  if (!last) return [];
  const {filter, prioritize, preempt, bind} = last, lines = [];
  if (filter) lines.push(`filter ${since(filter.at)} ago: ${many(filter.offered, "node")} offered, ${filter.observed_only && filter.fits < filter.offered ? "all passed in mode observe, mode enforce would pass " : ""}${filter.fits.toLocaleString("en")}${filter.observed_only && filter.fits < filter.offered ? "" : " could take it"} (${filter.took_ms.toFixed(1)} ms)`);
  if (prioritize?.by_filter) lines.push(`filter returned only the best: ${prioritize.winner} of ${many(prioritize.offered, "node")}`);
  else if (prioritize) lines.push(`prioritize: ${prioritize.winner ?? "any"} of ${many(prioritize.offered, "node")} (${prioritize.took_ms.toFixed(1)} ms)`);
  for (const text of preempt?.lines ?? []) lines.push(`preempt ${since(preempt.at)} ago: ${text}`);
  if (bind) lines.push(`bind to ${bind.node}: ${bind.outcome}${bind.message ? `, ${bind.message}` : ""} (${bind.took_ms.toFixed(1)} ms)`);
  const decisive = prioritize ?? filter, best = prioritize?.candidates ?? [], names = Object.keys(best[0]?.score_terms ?? {});
  return [el("section", {}, el("h3", {}, "Last decision"),
    el("ul", {}, ...lines.map(text => el("li", {}, text))),
    best.length ? table("Best nodes, with the terms of their score", ["Node", "Score", ...names],
      best.map(each => [each.node, [el("b", {}, each.score_ratio.toFixed(3))], ...names.map(name => each.score_terms[name].toFixed(2))]), "sums") : null,
    el("p", {class: "quiet"}, `Decision ${last.decision_id}; ${sourceOf(last.source, decisive?.snapshot_generation, decisive?.replica)}`))];
}

function placement(body) {
  return el("section", {}, el("h3", {}, "Annotations by Headroom"),
    table("Annotations", ["Annotation", "Value"], Object.entries(body.annotations).sort().map(([key, value]) => [key, [el("code", {}, value)]])));
}

/** Merge candidate devices with equal quantities into one row; "which" has their names. */
function alike(candidates) {
  const kinds = new Map();
  for (const each of candidates) {
    const {uuid, driver_index, gpu, memory_id, holders, sm_activity_ratio, sm_activity_age_s, ...same} = each.device;
    const key = JSON.stringify([same, each.need_bytes, each.free_for_pod_bytes, each.short_bytes]);
    if (kinds.has(key)) kinds.get(key).which.push(gpu); else kinds.set(key, {...each, which: [gpu]});
  }
  return [...kinds.values()].map(each => ({...each, which: each.which.join(", ")}));
}

/** Amounts that are subtracted from the memory of a device. */
const LESS = [["- driver reserve", d => d.driver_reserve_bytes], ["- node reserve", d => d.node_reserve_bytes], ["- reserved by pods", d => d.pods_reserved_bytes],
  ["- unconfirmed", d => d.pods_unconfirmed_bytes],
  ["- unreserved pods", d => d.unreserved_pods_bytes], ["- unattributed", d => d.unattributed_bytes]];

/** Return the memory accounting of each candidate device. An amount is left out if it is 0 on all of them. */
function candidateTable(node) {
  const less = LESS.filter(([, of]) => node.candidates.some(each => of(each.device)));
  return table(`Candidate devices of ${node.node}`, ["GPU", "Memory", ...less.map(([name]) => name), "= headroom", "Free for this pod", "Needs", "Short by", "Reason"],
    alike(node.candidates).map(({device: d, which, ...c}) => [`${which} ${d.model}`, gib(d.memory_bytes), ...less.map(([, of]) => gib(of(d), true)), gib(d.headroom_bytes),
      gib(c.free_for_pod_bytes), gib(c.need_bytes, true), [el("b", {class: c.short_bytes ? "bad" : "good"}, c.short_bytes ? gib(c.short_bytes, true) : "nothing")], d.candidate_because]), "sums cards");
}

function nearest(node, i) {
  const terms = Object.entries(node.score_terms);
  return el("details", {open: i === 0},
    el("summary", {}, el("b", {}, node.node), " ",
      el("span", {class: node.fits ? "good" : "bad"}, node.fits ? `fits, score ${node.score_ratio?.toFixed(2) ?? "-"}` : local(node.message)),
      node.short_bytes ? ` ${gib(node.short_bytes, true)} short` : ""),
    el("div", {class: "inside"},
      node.detail ? el("p", {class: "quiet"}, local(node.detail)) : null,
      node.blockers.length ? el("ul", {}, ...node.blockers.map(b => el("li", {}, podLink(b.namespace, b.name),
        ` has held ${gib(b.charged_bytes)}${b.since ? ` for ${since(b.since)}` : ""}${b.priority === null ? "" : `, priority ${b.priority}`}`))) : null,
      node.hidden_blockers ? el("p", {class: "quiet"}, `${node.hidden_blockers === 1 ? "1 pod that you may not read holds" : `${node.hidden_blockers} pods that you may not read hold`} ${gib(node.hidden_blockers_bytes)}`) : null,
      node.candidates.length ? candidateTable(node) : null,
      terms.length ? el("p", {class: "quiet"}, `Score ${node.score_ratio.toFixed(2)}: ${terms.map(([name, value]) => `${name} ${value.toFixed(2)}`).join(", ")}`) : null));
}
