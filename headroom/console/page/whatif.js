// What-if: a form for changes, the cluster before and after them, and where each pod would be placed. Nothing is changed.

import {ask, atMost, el, gib, many, podLink, table} from "./dom.js";

/** Fields by group: id (also the name in the URL), label, attributes of the input, hint. */
const GROUPS = {
  "Pods": [
    ["count", "Pods to add", {type: "number", min: "0", max: "1000"}],
    ["vram", "GPU memory of each pod", {placeholder: "20Gi"}],
    ["gpus", "GPUs of each pod", {type: "number", min: "1", max: "1024"}],
    ["release", "Pods to remove", {placeholder: "namespace/name"}],
  ],
  "Nodes": [
    ["drain", "Nodes to drain", {placeholder: "gpu-a, gpu-b"}],
    ["replicas", "Replicas to change", {placeholder: "gpu-a=4"}, "NODE=COUNT for each of its GPUs. 1: not shared."],
    ["device_choices", "Device choices to change", {placeholder: "gpu-a=steered"}, "NODE=predicted, gated or steered."],
    ["add", "Nodes to add", {placeholder: "gpu-a=2"}, "NODE=COUNT of idle nodes like this node."],
  ],
};
/** Values of the form if the URL has none. */
const FIRST = {count: "1", vram: "8Gi"};
/** Maximum number of names, of groups of rejected pods, and of rows on a desktop and on a phone. */
const NAMES = 3, REJECTIONS = 5, ROWS = 20, PHONE = 8;

export function whatif(view, _, state) {
  const isLink = state.text() !== "";
  const field = ([id, label, attributes, hint]) => [el("label", {for: id}, label),
    el("input", {id, autocomplete: "off", value: (isLink ? state.get(id) : FIRST[id]) || (id === "gpus" ? "1" : ""), "aria-describedby": hint ? `${id}-hint` : null, ...attributes}),
    hint ? el("p", {class: "quiet hint", id: `${id}-hint`}, hint) : null];
  const form = el("form", {class: "groups"}, ...Object.entries(GROUPS).map(([legend, fields]) =>
    el("fieldset", {}, el("legend", {}, legend), el("div", {class: "fields"}, ...fields.flatMap(field)))),
  el("div", {}, el("button", {}, "What if?")));
  const verdict = el("p", {role: "status"}), rest = el("div");
  view.append(el("h2", {}, "What if"), el("p", {class: "quiet"}, "A simulation on a copy of the cluster. Nothing is changed."), form, el("div", {id: "answer"}, verdict, rest));
  const inputs = [...form.querySelectorAll("input")];
  let asks = 0;

  async function answer() {
    const own = ++asks;
    for (const input of inputs) {
      input.removeAttribute("aria-invalid");
      const isDefault = input.id === "gpus" && input.value.trim() === "1";
      state.set(input.id, isDefault ? "" : input.value.trim());
    }
    try {
      const body = await ask("v1/whatif", {}, asked(form));
      if (own !== asks) return;  // another request was sent
      verdict.className = `verdict ${body.rejected ? "bad" : "good"}`;
      verdict.textContent = body.message;
      rest.replaceChildren(...parts(body));
    } catch (err) {
      if (own !== asks) return;
      verdict.className = "bad";
      verdict.textContent = err.message;
      rest.replaceChildren();
      err.input?.setAttribute("aria-invalid", "true");
      err.input?.focus();
    }
  }
  form.addEventListener("submit", event => { event.preventDefault(); answer(); });
  if (isLink) answer();
  return {refresh: async () => {}, close: () => { asks += 1; }};
}

/** Return the body of the request. Throws an Error with its input if a field is not NODE=COUNT or NODE=CHOICE. */
function asked(form) {
  const value = id => form.querySelector(`#${id}`).value.trim();
  const list = id => value(id).split(/[\s,]+/).filter(Boolean);
  const pairs = (id, pattern, words) => list(id).map(each => {
    const [, node, given] = pattern.exec(each) ?? [];
    if (!node) throw Object.assign(new Error(`${each} is not ${words}`), {input: form.querySelector(`#${id}`)});
    return [node, given];
  });
  const counts = id => pairs(id, /^(.+)=(\d+)$/, "NODE=COUNT. Example: gpu-a=2").map(([node, count]) => [node, Number(count)]);
  const count = Number(value("count"));
  return {
    pods: count ? [{count, vram: value("vram"), gpus: Number(value("gpus"))}] : [],
    drain: list("drain"), release: list("release"), replicas: Object.fromEntries(counts("replicas")),
    device_choices: Object.fromEntries(pairs("device_choices", /^(.+)=(\w+)$/, "NODE=CHOICE. Example: gpu-a=steered")),
    add: counts("add").map(([like, count]) => ({like, count})),
  };
}

/** Return the rows of the totals; `kubectl headroom whatif` prints the same words. */
function totals({before, after, rejected}) {
  const number = count => count.toLocaleString("en");
  return [
    ["Pods placed", before.pods, after.pods, number],
    ["Pods that would not fit", 0, rejected, number],
    ["GPU memory reserved", before.reserved_bytes, after.reserved_bytes, gib],
    ["GPU memory free", before.headroom_bytes, after.headroom_bytes, gib],
    ["GPUs", before.devices, after.devices, number],
    ["GPUs in use", before.devices_in_use, after.devices_in_use, number],
    ["GPUs empty", before.devices_empty, after.devices_empty, number],
  ].map(([label, was, becomes, shown]) => [label, shown(was),
    label === "Pods that would not fit" && becomes ? [el("span", {class: "bad"}, shown(becomes))] : shown(becomes),
    `${becomes > was ? "+" : ""}${shown(becomes - was)}`]);
}

function names(pods) {
  const more = pods.length - NAMES;
  return pods.slice(0, NAMES).join(", ") + (more > 0 ? ` and ${more.toLocaleString("en")} more` : "");
}

function parts(body) {
  const pod = name => name.startsWith("default/asked-") ? name : podLink(...name.split("/"));
  const space = s => `${gib(s.headroom_bytes)} free, largest request that fits ${s.largest_fitting_bytes === null ? "none" : gib(s.largest_fitting_bytes)}`;
  const rows = atMost(ROWS, PHONE);
  const others = body.rejections.slice(REJECTIONS).flatMap(r => r.pods), kept = body.placements.some(p => p.devices.length > 1);
  return [
    ...body.rejections.slice(0, REJECTIONS).map(r => el("p", {class: "bad"}, `${many(r.pods.length, "pod")} would not fit: ${names(r.pods)}. `,
      r.not_tried ?? [...r.reasons, ...r.ineligible].map(each => `${many(each.nodes, "node")}: ${each.message}`).join("; "))),
    others.length ? el("p", {class: "bad"}, `${many(others.length, "more pod")} would not fit, for other reasons: ${names(others)}`) : null,
    table("Before and after", ["Total", "Before", "After", "Difference"], totals(body), "figures"),
    kept ? el("p", {class: "quiet"}, "Until a pod's GPU is known, its memory is not free on any GPU that the pod could get.") : null,
    body.spaces.length ? table("Free memory for pods of one size", ["For pods of", "Before", "After", "Capacity"], body.spaces.map(s => [
      `${s.request.count} x ${s.request.amount}`, space(s.before), space(s.after),
      s.fullness_before === s.fullness_after ? s.fullness_after : `${s.fullness_before}, then ${s.fullness_after}`]), "cards") : null,
    body.placements.length ? table("Placements", ["Pod", "From", "To", "Score", "Device"], body.placements.slice(0, rows).map(p => [
      [pod(p.pod)], p.leaves ?? "-", p.node, p.score_ratio.toFixed(3),
      p.devices.length === 1 ? p.devices[0] : [el("span", {title: p.devices.join("\n")}, `one of ${many(p.devices.length, "device")}`)]]), "cards") : null,
    body.placements.length > rows ? el("p", {class: "quiet"}, `and ${many(body.placements.length - rows, "more pod")}: kubectl headroom whatif lists all of them.`) : null,
    el("p", {class: "quiet"}, `Not checked: ${body.not_checked.join(", ")}`),
  ].filter(Boolean);
}
