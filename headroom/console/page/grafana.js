// Links to a dashboard of the cluster's Grafana, if setting grafana_url has a template.

import {ask, el} from "./dom.js";

const HOUR_MS = 3_600_000;
let settings = null;

/** Return the settings of the console. They are read only once, unless an error occurs. */
export function readSettings() {
  return settings ??= ask("v1/status").then(body => body.settings).catch(() => { settings = null; return {}; });
}

/** Return a link for the values {node, uuid, namespace, pod}; it stays empty without a template. Query parameters with a missing value are left out. */
export function grafana(values) {
  const place = el("span", {class: "grafana"});
  readSettings().then(({grafana_url: text}) => {
    if (text) place.append(el("a", {href: filled(text, values), onclick: event => { event.currentTarget.href = filled(text, values); }, target: "_blank", rel: "noreferrer"}, "Grafana"));
  });
  return place;
}

function filled(text, values) {
  const [address, query = ""] = text.split(/\?(.*)/s), known = {...values, from_ms: Date.now() - HOUR_MS, to_ms: Date.now()};
  const names = part => [...part.matchAll(/\{(\w+)\}/g)].map(([, name]) => name);
  const kept = query.split("&").filter(part => names(part).every(name => known[name] !== undefined));
  const parts = kept.map(part => part.replace(/\{(\w+)\}/g, (_, name) => encodeURIComponent(known[name])));
  return parts.length ? `${address}?${parts.join("&")}` : address;
}
