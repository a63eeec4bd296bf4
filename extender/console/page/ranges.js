// The range of time of a view's plots. The console has the last hour; longer ranges come from Prometheus.

import {ask, el} from "./dom.js";
import {readSettings} from "./grafana.js";

/** Value of the parameter since -> words, seconds. */
const RANGES = {"1h": ["the last hour", 3600], "6h": ["the last 6 hours", 21_600], "24h": ["the last day", 86_400], "7d": ["the last 7 days", 604_800]};
/** Prometheus is asked again after this time. */
const EVERY_MS = 60_000;

/** Return a choice of the range, which is hidden without Prometheus: {element, span_s, read}. changed is called after each choice. */
export function ranges(changed) {
  const select = el("select", {id: "range", onchange: () => { known = null; changed(); }}, ...Object.entries(RANGES).map(([value, [words]]) => el("option", {value}, words)));
  const element = el("p", {hidden: true}, el("label", {for: "range"}, "Plots of "), select);
  let known = null;
  readSettings().then(({long_history: isLong}) => { element.hidden = !isLong; });
  return {
    element,
    get span_s() { return RANGES[select.value][1]; },
    /** Return the history at a path of the API in the chosen range. */
    async read(path) {
      if (select.value === "1h") return ask(path);
      if (known?.path !== path || Date.now() - known.at > EVERY_MS) known = {path, answer: ask(path, {since: select.value}), at: Date.now()};
      return known.answer;
    },
  };
}
