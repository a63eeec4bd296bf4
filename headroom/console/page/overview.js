// The overview: what is at risk, what waits, what is broken, and an hour of the fleet.

import {age, ask, el, gib, gpuLink, local, many, podLink, swap} from "./dom.js";
import {RISKS} from "./device.js";
import {about, plot} from "./plot.js";
import {ranges} from "./ranges.js";

const MOST = 10;
/** Lines of the fleet's plot. */
const LINES = [["used", "in use", "var(--used)"], ["reserved", "reserved by pods", "var(--reservations)"], ["allocatable", "allocatable", "var(--quiet)"]];

export function overview(view) {
  const risks = section("At risk", "GPUs that are overcommitted or full soon, or whose pods use more than they requested", "GPU"), waiting = section("Waiting", "Pending pods by owner, the longest first", "pod");
  const broken = section("Broken", "Nodes, GPUs and inputs that do not work", "problem"), memory = plot("Memory of the fleet"), pending = plot("Pending pods"), range = ranges(() => plots()), source = el("p", {class: "quiet"});
  view.append(el("h2", {class: "unseen"}, "Overview"), el("div", {class: "three"}, risks.element, waiting.element, broken.element), range.element, el("div", {class: "two"}, memory.element, pending.element), source);

  async function load() {
    const shown = plots(), body = await ask("v1/overview", {limit: MOST}), {totals} = body;
    risks.show(totals.at_risk, body.at_risk.map(riskItem), "All is well: no GPU is overcommitted, and none will be full within an hour.", ["#/fleet?colour=risk", "on the map"]);
    waiting.show(totals.waiting_pods, body.waiting.map(waitingItem), "All is well: no pod waits for a GPU.", ["#/pending", "all pending pods"], totals.waiting - body.waiting.length);
    broken.show(totals.broken, body.broken.map(brokenItem), "All is well: all nodes report, and all GPUs are healthy.", ["#/nodes", "all nodes"]);
    await shown;
  }
  const plots = () => range.show("v1/history/fleet", showHistory, why => { source.textContent = why; });
  async function showHistory(history) {
    if (history.at_s.length < 2) return;
    const of = kind => history.series.find(each => each.kind === kind)?.values ?? history.at_s.map(() => null), {span_s} = range;
    source.textContent = about(history);
    await Promise.all([
      memory.show({at: history.at_s, span_s, series: LINES.map(([kind, label, colour], i) => ({label, colour, values: of(kind), unit: "bytes", fill: i === 0, dash: i === 2 ? [2, 4] : undefined}))}),
      pending.show({at: history.at_s, span_s, series: [{label: "pending pods", colour: "var(--soon)", values: of("pending_pods"), unit: "count", fill: true}]}),
    ]);
  }
  return {refresh: load, close: () => { memory.close(); pending.close(); }};
}

/** A list with a heading, which counts with the noun: {element, show}. An unchanged list is left alone, so focus and selection stay. */
function section(title, purpose, noun) {
  const count = el("span", {class: "count"}), body = el("div"), element = el("section", {class: "list", "aria-label": title}, el("h3", {}, title, " ", count), el("p", {class: "quiet"}, purpose), body);
  return {
    element,
    show(total, items, wellText, [href, more], hidden = total - items.length) {
      count.textContent = total ? many(total, noun) : "";
      swap(body, ...(items.length ? [el("ol", {}, ...items), hidden > 0 ? el("a", {href}, `${hidden.toLocaleString("en")} more: ${more}`) : null] : [el("p", {class: "good"}, wellText)]));
    },
  };
}

function riskItem(risk) {
  return el("li", {class: risk.kind}, gpuLink(risk.node, risk.gpu), el("b", {class: "tag"}, RISKS[risk.kind]),
    el("div", {}, risk.message), risk.pods.length ? el("div", {class: "quiet"}, ...risk.pods.flatMap((each, i) => [i ? ", " : "", podLink(each.namespace, each.name)])) : null);
}

function waitingItem(group) {
  const name = group.owner_kind === "Pod" ? podLink(group.namespace, group.name) : el("a", {href: `#/pod/${encodeURIComponent(group.namespace)}/${encodeURIComponent(group.name)}`}, `${group.namespace}/${group.owner_name}`);
  return el("li", {}, name, el("b", {class: "tag"}, `${group.owner_kind === "Pod" ? "" : `${group.owner_kind}, `}${many(group.pods, "pod")}${group.oldest_s === null ? "" : `, ${age(group.oldest_s)}`}`),
    el("div", {class: group.verdict === "not_scheduled" ? "bad" : null}, local(group.message)), group.request ? el("div", {class: "quiet"}, `each requests ${group.request}`) : null, group.fix ? el("div", {}, el("b", {}, "Fix: "), local(group.fix)) : null);
}

function brokenItem(fault) {
  const link = fault.kind === "device" ? gpuLink(fault.node, fault.gpu) : fault.node ? el("a", {href: `#/nodes?find=${encodeURIComponent(fault.node)}`}, fault.node) : null;
  return el("li", {}, link, el("div", {}, fault.message), el("div", {class: "quiet"}, el("code", {}, fault.fix)));
}
