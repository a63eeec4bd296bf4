// Saves rows of the debug API as a CSV file, for a spreadsheet.

import {el} from "./dom.js";

/**
 * Return a button that saves rows of the API. The columns are their fields that are not lists or objects, as kubectl headroom -o csv prints them.
 * rows is a list, or an async function that returns it.
 */
export function saveButton(name, rows) {
  const button = el("button", {type: "button", class: "save", title: `Save all rows of "${name}" for a spreadsheet`, onclick: save}, "Save as CSV");
  async function save() {
    const found = typeof rows === "function" ? await rows() : rows;
    // Excel reads UTF-8 only behind a byte order mark.
    const url = URL.createObjectURL(new Blob(["\ufeff", csv(found)], {type: "text/csv"}));
    el("a", {href: url, download: `headroom ${name}.csv`.toLowerCase().replace(/[^a-z0-9.]+/g, "-")}).click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
  }
  return el("p", {class: "saves"}, button);
}

/** Return the rows as CSV. */
export function csv(rows) {
  const isPlain = value => value === null || typeof value !== "object", fields = [...new Set(rows.flatMap(row => Object.keys(row).filter(key => isPlain(row[key]))))];
  return [fields, ...rows.map(row => fields.map(field => isPlain(row[field]) ? row[field] : ""))].map(cells => cells.map(cell).join(",")).join("\r\n") + "\r\n";
}

/** Return a cell. Text that a spreadsheet would take for a formula begins with an apostrophe. */
function cell(value) {
  const text = value === null || value === undefined ? "" : typeof value === "string" && /^[=+\-@]/.test(value) ? `'${value}` : `${value}`;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
