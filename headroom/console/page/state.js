// What the reader chose in a view: filters, order, zoom. It is in the URL, so a link shows the same.

/** Return the choices in the URL's fragment. An absent choice reads as "". */
export function stateOf(hash) {
  const parameters = new URLSearchParams(hash.split("?")[1] ?? "");
  const text = () => { const all = parameters.toString(); return all ? `?${all}` : ""; };
  return {
    get: name => parameters.get(name) ?? "",
    set: (name, value) => {
      if (value) parameters.set(name, value); else parameters.delete(name);
      history.replaceState(null, "", `${location.hash.split("?")[0] || "#/"}${text()}`);
    },
    text,
  };
}
