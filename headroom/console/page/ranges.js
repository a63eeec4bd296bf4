// The range of time of a view's plots. The console has the last hour; longer ranges come from Prometheus.

import {ask, el} from "./dom.js";
import {readSettings} from "./grafana.js";

const HOUR = "1h";
/** Value of the parameter since -> words, seconds. */
const RANGES = {[HOUR]: ["the last hour", 3600], "6h": ["the last 6 hours", 21_600], "24h": ["the last day", 86_400], "7d": ["the last 7 days", 604_800]};
/** Prometheus is asked again after this time, and after the shorter time if it could not be read. */
export const EVERY_MS = 60_000, FAILED_EVERY_MS = 5_000;
/** The last hour, which has a value every 10 s, is read again after this time. */
const HOUR_EVERY_MS = 2_000;

/** Return a choice of the range, which is hidden without Prometheus: {element, span_s, isLong, show}. changed is called after each choice. */
export function ranges(changed) {
  const select = el("select", {id: "range", onchange: () => { known = null; changed(); }}, ...Object.entries(RANGES).map(([value, [words]]) => el("option", {value}, words)));
  const element = el("p", {hidden: true}, el("label", {for: "range"}, "Plots of "), select);
  let known = null;
  readSettings().then(({long_history: isLong}) => { element.hidden = !isLong; });

  const isLong = () => select.value !== HOUR;

  /** Return the last answer, or a new answer if it is due. */
  function answer(path) {
    if (known?.path === path && Date.now() < known.until) return known.answer;
    const asked = known = {path, answer: isLong() ? ask(path, {since: select.value}) : ask(path), until: Date.now() + (isLong() ? EVERY_MS : HOUR_EVERY_MS)};
    asked.answer.catch(() => { asked.until = isLong() ? Date.now() + FAILED_EVERY_MS : 0; });
    return asked.answer;
  }
  return {
    element,
    get span_s() { return RANGES[select.value][1]; },
    get isLong() { return isLong(); },
    /**
     * Read the history at a path of the API in the chosen range, and call draw with it, or call without with the reason why there is none. Wait only
     * for the last hour, because Prometheus can take seconds, during which the rest of the view must stay live.
     */
    async show(path, draw, without) {
      const chosen = select.value;
      if (isLong() && !known) without("Reading Prometheus …");
      const shown = answer(path)
        .then(history => chosen === select.value ? draw(history) : null)
        .catch(err => { if (chosen === select.value) without(err.message); });
      if (!isLong()) await shown;
    },
  };
}
