// The ResourceQuotas that limit GPU memory, beside what the pods of each namespace have reserved.

import {saveButton} from "./csv.js";
import {ask, el, gib, swap, table} from "./dom.js";

/** Milliseconds between two reads. For each read, the console lists the quotas at the API server. */
const READ_EVERY_MS = 60_000;

/** Return an element and the function that refreshes it. The element is empty if no quota limits GPU memory. It also shows errors. */
export function quotas(namespace) {
  const element = el("div");
  let dueMs = 0;

  async function refresh() {
    if (Date.now() < dueMs) return;
    dueMs = Date.now() + READ_EVERY_MS;
    try {
      const rows = (await ask("v1/quotas", {namespace})).quotas;
      swap(element, rows.length ? table("Quotas", ["Namespace", "Quota", "Used", "Hard", "Left", "Reserved"], rows.map(cells)) : null, rows.length ? saveButton("quotas", rows) : null);
    } catch (error) {
      swap(element, el("p", {class: "quiet"}, `Quotas: ${error.message}.`));
    }
  }

  function cells(row) {
    const left = row.hard_bytes - row.used_bytes, text = gib(left);
    return [row.namespace, row.name, gib(row.used_bytes), gib(row.hard_bytes), [left > 0 ? text : el("span", {class: "bad"}, text)], gib(row.reserved_bytes)];
  }
  return {element, refresh};
}
