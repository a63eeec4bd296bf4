// One GPU: what holds its memory, a segment for each pod, and an hour of memory and SM activity.

import {age, ask, clock, el, gib, gpuNoun, many, measured, percent, podLink, since, swap} from "./dom.js";
import {grafana} from "./grafana.js";
import {about, plot} from "./plot.js";
import {ranges} from "./ranges.js";

/** Number of pods that have their own colour and line. */
const MOST_PODS = 5;
/** Events that are marked in the plots: letter, colour, words. */
const MARKS = {
  reservation_made: ["P", "--good", "placed"], reservation_removed: ["R", "--quiet", "reservation removed"], pod_observed: ["S", "--good", "seen on the GPU"],
  "reservation_changed is_to_leave": ["E", "--bad", "to be evicted"], device_unhealthy: ["X", "--bad", "GPU unhealthy"], device_healthy: ["H", "--good", "GPU healthy again"],
  overuse_began: ["U", "--bad", "uses more than reserved"], overuse_ended: ["U", "--good", "uses no more than reserved"],
  overcommit_began: ["O", "--bad", "GPU overcommitted"], overcommit_ended: ["O", "--good", "GPU no longer overcommitted"],
  device_cordoned: ["C", "--unattributed", "GPU cordoned"], device_uncordoned: ["C", "--unattributed", "GPU uncordoned"], report_lost: ["L", "--bad", "report lost"], report_returned: ["L", "--good", "report returned"],
};
/** Kinds of risks in words. */
export const RISKS = {overcommitted: "overcommitted", growing: "full soon", unhealthy: "unhealthy", overuse: "overuse"};
const CHOICES = {exact: "known in advance", "slot-safe": "any, and each has enough memory", predicted: "the plugin's choice among several", steered: "steered by Headroom"};

/** Show the GPU in the panel: {refresh, close}. onClose is called by the button that closes it. */
export function device(panel, nodeName, gpu, onClose) {
  const heading = el("h3", {id: "detail-title"}, `${nodeName} ${gpuNoun(gpu)}`), now = el("div"), memory = plot("Memory"), activity = plot("SM activity"), marked = el("div"), source = el("p", {class: "quiet"}), links = el("p", {class: "quiet"});
  panel.setAttribute("aria-labelledby", "detail-title");
  panel.tabIndex = -1;
  panel.replaceChildren(el("button", {type: "button", class: "close", "aria-label": "Close", onclick: onClose}, "×"), heading, now, memory.element, activity.element, marked, source, links);
  const range = ranges(() => refresh());
  now.after(range.element);
  let loads = 0;

  async function refresh() {
    const ownLoad = ++loads;
    try {
      const {node} = await ask(`v1/nodes/${encodeURIComponent(nodeName)}`);
      const found = node.devices.find(each => each.gpu === gpu);
      if (!found) throw new Error(`node ${nodeName} reports no ${gpuNoun(gpu)}`);
      const path = `nodes/${encodeURIComponent(nodeName)}/devices/${encodeURIComponent(found.uuid)}`;
      const both = Promise.all([ask(`v1/${path}`), ask("v1/events", {follow: "false", since: "1h", node: nodeName})]);
      const shown = range.show(`v1/history/${path}`, async history => {
        const answers = await both.catch(() => null); // shown below
        if (!answers || ownLoad !== loads) return;
        source.textContent = history.series.length ? about(history) : "No history yet: the first value is recorded within 10 s of a report.";
        if (history.series.length) await showHistory(history, answers[0], answers[1].events);
      }, why => { source.textContent = why; });
      const [body] = await both;
      if (ownLoad !== loads) return;
      if (!links.childElementCount) links.append(grafana({node: nodeName, uuid: found.uuid}));
      heading.textContent = `${nodeName} ${gpuNoun(gpu)}, ${found.model}`;
      swap(now, ...present(node, body));
      await shown;
    } catch (err) {
      if (ownLoad === loads && !err.isLost) swap(now, el("p", {class: "bad"}, err.message));
    }
  }

  async function showHistory(history, body, events) {
    const of = kind => history.series.find(each => each.kind === kind)?.values ?? history.at_s.map(() => null), {span_s} = range, ours = new Set(history.series.map(each => each.uid).filter(Boolean));
    const marks = events.filter(event => event.device === body.device.uuid || ours.has(event.uid) && !event.device).map(event => [event, MARKS[`${event.kind} ${event.cause}`] ?? MARKS[event.kind]])
      .filter(([, mark]) => mark).map(([event, [letter, colour, words]]) => ({at_s: Date.parse(event.at) / 1000, letter, colour: `var(${colour})`, words, event}));
    const pods = history.series.filter(each => each.kind === "pod").sort((a, b) => highest(b) - highest(a));
    const colours = coloursOf(body.holders);
    const lines = pods.slice(0, MOST_PODS).map(each => ({label: `${each.namespace}/${each.name}`, values: each.values, unit: "bytes", colour: colours.get(each.uid) ?? "var(--quiet)"}));
    await Promise.all([
      memory.show({at: history.at_s, span_s, marks, most: body.device.memory_bytes, series: [
        {label: "in use", values: of("used"), unit: "bytes", colour: "var(--used)", fill: true},
        {label: "reserved, or in use if more", values: of("reserved"), unit: "bytes", colour: "var(--reservations)", dash: [6, 4]}, ...lines]}),
      activity.show({at: history.at_s, span_s, marks, most: 1, series: [{label: "SM activity", values: of("sm"), unit: "ratio", colour: "var(--sm)", fill: true}]}),
    ]);
    const latest = marks.slice(-12).reverse();
    swap(marked, ...(latest.length ? [el("h4", {}, "Marked on the time axis"), el("ul", {class: "marks"}, ...latest.map(({at_s, letter, words, event}) =>
      el("li", {}, el("b", {}, letter), ` ${clock(at_s)} ${words}${event.name ? ": " : ""}`, event.name ? podLink(event.namespace, event.name) : null, event.message ? ` ${event.message}` : null)))] : []));
  }
  return {refresh, close: () => { loads += 1; memory.close(); activity.close(); }};
}

const highest = ({values}) => values.reduce((most, value) => Math.max(most, value ?? 0), 0);

/** Colours of the pods that hold most: uid -> colour. */
const coloursOf = holders => new Map(holders.slice(0, MOST_PODS).map((held, i) => [held.uid, `var(--pod-${i + 1})`]));

/** The GPU now: its state, the bar of its memory, and its pods. */
function present(node, {device: d, risk, holders, health, report_age_s: reportAge, unattributed_processes: processes}) {
  const state = [
    node.message && el("li", {class: "bad"}, node.message), node.cordoned && el("li", {class: "bad"}, "node cordoned"), d.cordoned && el("li", {class: "bad"}, "GPU cordoned: takes no new pods"),
    d.unhealthy && el("li", {class: "bad"}, `unhealthy${health.since ? ` for ${since(health.since)}` : ""}: ${d.unhealthy_detail ?? d.unhealthy}`),
    ...node.taints.map(taint => el("li", {}, `taint ${taint}`)),
    el("li", {}, `${gib(Math.max(0, d.headroom_bytes))} free for reservation`), el("li", {}, `${measured(d.used_bytes)} in use`), el("li", {}, `SM activity ${percent(d.sm_activity_ratio)}`),
    d.kind === "mig" && el("li", {}, "MIG device"),
    el("li", {}, d.sharing === "none" ? "not shared" : `${d.sharing}, ${d.replicas_free} of ${many(d.replicas_free + d.replicas_allocated + d.replicas_unhealthy, "replica")} free`),
    node.certainty && !node.message && el("li", {}, `GPU of the next pod: ${CHOICES[node.certainty] ?? node.certainty}`),
    el("li", {}, reportAge === null ? "no report" : `report ${age(reportAge)} old`),
  ].filter(Boolean);
  const key = el("p", {class: "key"}, "Each pod: ", ...[["outlined", "reserved"], ["filled", "in use"], ["beyond", "in use, not reserved"], ["system", "driver and node reserve"]].map(([name, words]) => el("span", {}, el("i", {class: name, "aria-hidden": "true"}), words)));
  const atRisk = risk && el("p", {class: "verdict bad"}, `${RISKS[risk.kind]}: ${risk.message}`, ...(risk.kind === "growing" ? risk.pods.slice(0, 1).flatMap(each => ["; mostly ", podLink(each.namespace, each.name)]) : []));
  return [atRisk, el("ul", {class: "badges"}, ...state), bar(d, holders), key, podList(holders, d, node.overuse, node.pod_limits), processList(processes)].filter(Boolean);
}

/** The memory of the GPU in segments: one for each pod, outlined as far as it is reserved and filled as far as it is in use. */
function bar(d, holders) {
  const colours = coloursOf(holders);
  const unattributed = d.unattributed_bytes, system = Math.max(0, d.driver_reserve_bytes), reserve = d.node_reserve_bytes;
  const charged = holders.reduce((all, held) => all + held.charged_bytes, 0), whole = Math.max(1, d.memory_bytes, charged + unattributed + system + reserve);
  const segment = (className, bytes, words, ...inside) => {
    const part = el("span", {class: `segment ${className}`, role: "listitem", title: words, "aria-label": words}, ...inside);
    part.style.width = `${100 * bytes / whole}%`;
    return part;
  };
  const pods = holders.filter(held => held.charged_bytes > 0).map(held => {
    const inUse = held.measured_bytes ?? 0, fill = el("i"), outline = el("u"), over = el("b");
    const part = segment("pod", held.charged_bytes, `${held.namespace}/${held.name}: ${gib(held.requested_bytes)} reserved, ${held.measured_bytes === null ? "use unknown" : `${gib(inUse)} in use`}`, fill, over, outline);
    part.style.setProperty("--pod", colours.get(held.uid) ?? "var(--quiet)");
    fill.style.width = `${100 * Math.min(1, inUse / held.charged_bytes)}%`;
    over.style.left = `${100 * Math.min(1, held.requested_bytes / held.charged_bytes)}%`;
    over.hidden = !(held.exceeds_by_bytes > 0);
    outline.style.width = `${100 * Math.min(1, held.requested_bytes / held.charged_bytes)}%`;
    return part;
  });
  return el("div", {class: "segments", role: "list", "aria-label": `Memory of the GPU, ${gib(d.memory_bytes)}`}, ...pods,
    unattributed > 0 ? segment("unattributed", unattributed, `${gib(unattributed)} unattributed`) : null,
    system + reserve > 0 ? segment("system", system + reserve, `${gib(system)} driver reserve, ${gib(reserve)} reserve of the node`) : null);
}

/** Return the pods of the GPU. overuse: the pods that use more than they reserved, and whether they are evicted. limits: the pods with a limit. */
function podList(holders, d, overuse, limits) {
  const colours = coloursOf(holders), hidden = d.hidden_holders ? el("p", {class: "quiet"}, `${many(d.hidden_holders, "more pod")} that you may not read`) : null;
  if (!holders.length) return hidden ?? el("p", {class: "quiet"}, "No pod holds memory of this GPU.");
  return el("div", {}, el("ul", {class: "pods"}, ...holders.map(held => {
    const swatch = el("i", {"aria-hidden": "true"});
    swatch.style.background = colours.get(held.uid) ?? "var(--quiet)";
    const eviction = overuse.find(each => each.uid === held.uid && each.device === d.uuid);
    const limit = limits.find(each => each.uid === held.uid && each.device === d.uuid);
    const over = held.exceeds_by_bytes > 0 ? el("span", {class: "bad"}, el("b", {}, ` ${gib(held.exceeds_by_bytes)} more than reserved`), eviction ? `; ${eviction.message}` : null) : null;
    return el("li", {}, swatch, podLink(held.namespace, held.name), ` ${held.reserved ? `${gib(held.requested_bytes)} reserved${limit ? `, limit ${gib(limit.limit_bytes)} (${limit.memory_class})` : ""}` : "no reservation"}, ${held.measured_bytes === null ? "use unknown" : `${gib(held.measured_bytes)} in use`}${held.phase === "running" ? "" : `, ${held.phase}`}`, over, held.cap?.capped ? `; ${held.cap.message}` : null);
  })), hidden);
}

function processList(processes) {
  if (!processes?.length) return null;
  return el("p", {}, `Unattributed processes: ${processes.map(each => `${each.command || "unknown"} (pid ${each.pid}) ${each.used_bytes === null ? "" : gib(each.used_bytes)}`).join(", ")}`);
}
