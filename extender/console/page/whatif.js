// What-if: a form for changes, and where each pod would be placed. Nothing is changed.

import {ask, el, gib, many, podLink, table} from "./dom.js";

export function whatif(view) {
  const answer = el("div", {id: "answer", "aria-live": "polite"});
  const field = (id, label, attributes) => [el("label", {for: id}, label), el("input", {id, autocomplete: "off", ...attributes})];
  const form = el("form", {class: "fields"},
    ...field("count", "Pods to add", {type: "number", min: "0", max: "1000", value: "1"}),
    ...field("vram", "GPU memory of each pod", {placeholder: "20Gi", value: "8Gi"}),
    ...field("gpus", "GPUs of each pod", {type: "number", min: "1", max: "1024", value: "1"}),
    ...field("drain", "Nodes to drain", {placeholder: "names, separated by commas"}),
    ...field("add", "Nodes to add", {placeholder: "gpu-a=2: two more like gpu-a"}),
    ...field("replicas", "Replicas to change", {placeholder: "gpu-a=4: of each of its GPUs"}),
    ...field("modes", "Modes to change", {placeholder: "gpu-a=steered: how its GPUs are chosen"}),
    ...field("release", "Pods to remove", {placeholder: "namespace/name, separated by commas"}),
    el("button", {}, "What if?"));
  form.addEventListener("submit", async event => {
    event.preventDefault();
    try {
      answer.replaceChildren(...parts(await ask("v1/whatif", {}, asked(form))));
    } catch (err) {
      answer.replaceChildren(el("p", {class: "bad"}, err.message));
    }
  });
  view.append(el("h2", {}, "What if"), form, answer);
  return {refresh: async () => {}};
}

/** Return the body of the request. Throws an Error if a field is not NODE=COUNT or NODE=MODE. */
function asked(form) {
  const value = id => form.querySelector(`#${id}`).value.trim();
  const list = id => value(id).split(/[\s,]+/).filter(Boolean);
  const pairs = (id, pattern, words) => list(id).map(each => {
    const [, node, given] = pattern.exec(each) ?? [];
    if (!node) throw new Error(`${each} is not ${words}`);
    return [node, given];
  });
  const counts = id => pairs(id, /^(.+)=(\d+)$/, "NODE=COUNT. Example: gpu-a=2").map(([node, count]) => [node, Number(count)]);
  const count = Number(value("count"));
  return {
    pods: count ? [{count, vram: value("vram"), gpus: Number(value("gpus"))}] : [],
    drain: list("drain"), release: list("release"), replicas: Object.fromEntries(counts("replicas")),
    modes: Object.fromEntries(pairs("modes", /^(.+)=(\w+)$/, "NODE=MODE. Example: gpu-a=steered")),
    add: counts("add").map(([like, count]) => ({like, count})),
  };
}

function parts(body) {
  const pod = name => name.startsWith("default/asked-") ? name : podLink(...name.split("/"));
  const space = s => `${gib(s.headroom_bytes)} free, largest request that fits ${s.largest_fitting_bytes === null ? "none" : gib(s.largest_fitting_bytes)}`;
  return [
    el("p", {class: `verdict ${body.rejected ? "bad" : "good"}`}, body.message),
    ...body.rejections.map(r => el("p", {class: "bad"}, `${many(r.pods.length, "pod")} (${r.pods.slice(0, 3).join(", ")}${r.pods.length > 3 ? ", ..." : ""}) cannot be placed: `,
      r.not_tried ?? [...r.reasons, ...r.ineligible].map(each => `${many(each.nodes, "node")}: ${each.message}`).join("; "))),
    el("p", {class: "quiet"}, `Not checked: ${body.not_checked.join(", ")}`),
    body.spaces.length ? table("Free memory, before and after", ["For pods of", "Before", "After", "Capacity"], body.spaces.map(s => [
      `${s.request.count} x ${s.request.amount}`, space(s.before), space(s.after),
      s.fullness_before === s.fullness_after ? s.fullness_after : `${s.fullness_before}, then ${s.fullness_after}`])) : null,
    body.placements.length ? table("Placements", ["Pod", "From", "To", "Score", "Device"], body.placements.map(p => [
      [pod(p.pod)], p.leaves ?? "-", p.node, p.score_ratio.toFixed(3),
      p.devices.length === 1 ? p.devices[0] : [el("span", {title: p.devices.join("\n")}, `one of ${many(p.devices.length, "device")}`)]])) : null,
  ].filter(Boolean);
}
