// The map of all devices. The first answer has all nodes in columns, later answers only the nodes that changed.

import {ask, choice, el, gib, gpuNoun, many} from "./dom.js";
import {device as detailOf} from "./device.js";
import {SIDES, corner, layOut, painter, tileAt} from "./tiles.js";

const COLOURS = {reserved: "memory reserved", used: "memory in use", sm: "SM activity", risk: "risk"};
const GROUPS = {pool: "pool", model: "model", label: "a label", none: "nothing"};
/** Words of the risks, as in the lists of the overview, and what the legend adds to each. */
const RISKS = ["no risk", "overuse", "unhealthy", "full soon", "overcommitted"];
const MEANINGS = ["", ": a pod uses more than it requested", ", with pods", ": within an hour at this rate", ""];
const RISK_COLOURS = ["--free", "--unattributed", "--quiet", "--soon", "--bad"];
/** Steps of the scale of colours. */
const STEPS = 10;
/** All nodes are read again after this time, because labels may have changed. */
const ALL_EVERY_MS = 60_000;

export function fleet(view, [node, gpu], state) {
  const nodes = new Map();  // name -> node
  let version = "", readAllAt = 0, layout = {blocks: [], height: 0}, cursor = null, chosen = node ? {node, gpu} : null, detail = null;
  const colour = choice("Colour", "colour", COLOURS, state), group = choice("Group by", "group", GROUPS, state);
  const label = el("input", {id: "label", placeholder: "topology.kubernetes.io/zone", "aria-label": "Label", value: state.get("label"), size: 26});
  const search = el("input", {type: "search", id: "find", placeholder: "node, model", value: state.get("find"), autocomplete: "off"});
  const bigger = el("button", {type: "button", "aria-label": "Zoom in", onclick: () => zoom(1)}, "+"), smaller = el("button", {type: "button", "aria-label": "Zoom out", onclick: () => zoom(-1)}, "-");
  const found = el("p", {id: "found", role: "status"}), hovered = el("p", {class: "hovered", "aria-hidden": "true"}), legend = el("p", {class: "key"});
  const canvas = el("canvas", {"aria-hidden": "true"}), option = el("div", {role: "option", id: "tile", class: "unseen", "aria-selected": "false"}, "no GPU yet");
  const map = el("div", {class: "map", role: "listbox", tabindex: "0", "aria-label": "GPUs; arrow keys move, Enter opens", "aria-activedescendant": "tile"}, option, canvas);
  const panel = el("aside", {id: "detail", hidden: true, "aria-label": "The chosen GPU"});
  const form = el("form", {class: "tools", role: "search"}, ...colour.parts, ...group.parts, label, el("label", {for: "find"}, "Find"), search, el("span", {class: "zoom"}, smaller, bigger), found);
  form.addEventListener("submit", event => event.preventDefault());
  view.append(el("h2", {}, "Fleet"), form, legend, hovered, map, panel);

  const draw = painter(canvas);
  let theme = readTheme(map);
  colour.select.addEventListener("change", () => { state.set("colour", colour.select.value); paint(); });
  group.select.addEventListener("change", () => { state.set("group", group.select.value); version = ""; load(); });
  label.addEventListener("change", () => { state.set("label", label.value.trim()); version = ""; load(); });
  search.addEventListener("input", () => { state.set("find", search.value.trim()); paint(); });

  function zoom(by) {
    state.set("zoom", String(Math.min(SIDES.length - 1, Math.max(0, level() + by))));
    arrange();
  }
  /** Return the chosen zoom, or else the largest zoom at which the map is at most 1.6 screens high. The smallest tiles are hard to hit, so they are used only if the map would otherwise be higher than four screens. */
  function level() {
    if (state.get("zoom") !== "") return Math.min(SIDES.length - 1, Math.max(0, Number(state.get("zoom")) || 0));
    const all = groups(), fits = screens => SIDES.findLastIndex(side => layOut(all, map.clientWidth, side).height < screens * innerHeight);
    const fitting = fits(1.6);
    return fitting > 0 ? fitting : Math.min(1, Math.max(0, fits(4)));
  }

  function groups() {
    const kind = group.select.value, byName = new Map();
    for (const each of nodes.values()) {
      const name = kind === "model" ? each.devices[0]?.model || "no devices" : kind === "none" ? "" : each.group || (kind === "label" ? "no such label" : "no pool");
      if (!byName.has(name)) byName.set(name, []);
      byName.get(name).push(each);
    }
    return [...byName].sort(([a], [b]) => a.localeCompare(b)).map(([name, found]) => {
      const devices = found.reduce((all, each) => all + each.devices.length, 0);
      return {name, nodes: found, title: `${name ? `${name}: ` : ""}${many(found.length, "node")}, ${many(devices, "GPU")}`};
    });
  }

  /** Compute the layout, and draw. */
  function arrange() {
    layout = layOut(groups(), map.clientWidth, SIDES[level()]);
    map.style.height = `${Math.max(60, layout.height)}px`;
    cursor = null;
    paint();
  }

  let isPainting = false;
  function paint() {
    if (isPainting) return;
    isPainting = true;
    requestAnimationFrame(() => { isPainting = false; paintNow(); });
  }
  function paintNow() {
    const box = map.getBoundingClientRect(), top = Math.max(0, -box.top), width = map.clientWidth;
    const height = Math.max(0, Math.min(layout.height - top, innerHeight - Math.max(0, box.top)));
    const ratio = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
      canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
    }
    canvas.style.transform = `translateY(${top}px)`;
    const text = search.value.trim().toLowerCase(), by = colour.select.value;
    draw(layout, {
      top, width, height, ratio, theme, cursor: map.matches(":focus") ? cursor : null, selected: chosen && positionOf(chosen),
      colourOf: (_, device) => by === "risk" ? theme.paint.risks[device.risk] : shade(theme.paint, device[by]),
      dimmed: each => text && !`${each.name} ${each.devices[0]?.model ?? ""}`.toLowerCase().includes(text),
    });
    drawLegend(legend, by);
  }

  function positionOf({node: name, gpu: wanted}) {
    for (const [block, {group: {nodes: there}}] of layout.blocks.entries()) {
      const at = there.findIndex(each => each.name === name);
      const device = at < 0 ? -1 : there[at].devices.findIndex(each => each.gpu === wanted);
      if (device >= 0) return {block, node: at, device};
    }
    return null;
  }
  const at = tile => {
    const there = layout.blocks[tile.block].group.nodes[tile.node];
    return [there, there.devices[tile.device]];
  };

  function open(tile, focus) {
    const [there, device] = at(tile);
    chosen = {node: there.name, gpu: device.gpu};
    history.pushState(null, "", `#/fleet/${encodeURIComponent(there.name)}/${encodeURIComponent(device.gpu)}${state.text()}`);
    show();
    if (focus) panel.focus();
    paint();
  }
  function show() {
    panel.hidden = !chosen;
    detail?.close();
    detail = chosen ? detailOf(panel, chosen.node, chosen.gpu, close) : null;
    detail?.refresh();
  }
  function close() {
    detail?.close();
    [chosen, detail, panel.hidden] = [null, null, true];
    history.pushState(null, "", `#/fleet${state.text()}`);
    map.focus({preventScroll: true});
    paint();
  }

  canvas.addEventListener("click", event => {
    const tile = tileAt(layout, ...inMap(event));
    if (tile) { cursor = tile; open(tile, true); }
  });
  canvas.addEventListener("mousemove", event => {
    const tile = tileAt(layout, ...inMap(event));
    canvas.style.cursor = tile ? "pointer" : "";
    hovered.textContent = tile ? words(...at(tile)) : "";
  });
  function inMap(event) {
    const box = map.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }
  map.addEventListener("focus", () => { cursor ??= (chosen && positionOf(chosen)) ?? firstTile(layout); move(cursor); });
  map.addEventListener("blur", paint);
  map.addEventListener("keydown", event => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); if (cursor) open(cursor, true); return; }
    const next = cursor && moved(layout, cursor, event.key);
    if (!next) return;
    event.preventDefault();
    move(next);
  });
  function move(tile) {
    cursor = tile;
    if (!tile) return;
    option.textContent = words(...at(tile));
    hovered.textContent = option.textContent;
    const y = corner(layout, tile)[1] + map.getBoundingClientRect().top;
    if (y < 60 || y > innerHeight - 60) scrollBy(0, y - innerHeight / 2);
    paint();
  }
  panel.addEventListener("keydown", event => { if (event.key === "Escape") close(); });

  async function load() {
    const isLabel = group.select.value === "label";
    label.hidden = !isLabel;
    if (Date.now() - readAllAt > ALL_EVERY_MS) version = "";
    const body = await ask("v1/map", {after: version, label: isLabel ? label.value.trim() : ""});
    const before = nodes.size;
    if (body.complete) { nodes.clear(); readAllAt = Date.now(); }
    const isNew = take(nodes, body);
    version = body.version;
    const devices = [...nodes.values()].reduce((all, each) => all + each.devices.length, 0);
    found.textContent = nodes.size ? `${many(devices, "GPU")} on ${many(nodes.size, "node")}` : "no nodes are known yet";
    if (body.complete || isNew || before !== nodes.size) arrange(); else paint();
    if (chosen && !detail) show(); else await detail?.refresh();
  }
  const scrolled = () => paint(), resized = () => arrange(), scheme = matchMedia("(prefers-color-scheme: dark)");
  const themed = () => { theme = readTheme(map); paint(); };
  addEventListener("scroll", scrolled, {passive: true});
  addEventListener("resize", resized);
  scheme.addEventListener("change", themed);
  return {
    refresh: load,
    close: () => { removeEventListener("scroll", scrolled); removeEventListener("resize", resized); scheme.removeEventListener("change", themed); detail?.close(); },
  };
}

/** Add the nodes of an answer. Return whether one of them has another number of devices, or another group, than before. */
function take(nodes, body) {
  const stale = new Set(body.stale), cordoned = new Set(body.cordoned);
  let d = 0, isNew = false;
  body.node.forEach((name, i) => {
    const devices = [];
    for (const end = d + body.devices[i]; d < end; d += 1)
      devices.push({gpu: body.gpu[d], model: body.models[body.model[d]], memory: body.memory_gib[d], reserved: body.reserved[d], used: body.used[d], sm: body.sm[d], state: body.state[d], risk: body.risk[d]});
    const group = body.groups[body.group[i]];
    const before = nodes.get(name);
    isNew ||= before?.devices.length !== devices.length || before.group !== group;
    nodes.set(name, {name, group, choice: body.choices[body.choice[i]], reason: body.reasons[body.reason[i]], devices});
  });
  for (const node of nodes.values()) {
    node.message = node.reason || (stale.has(node.name) ? "GPU report of the node is stale" : "");
    node.closed = node.message !== "";
    node.cordoned = cordoned.has(node.name);
  }
  return isNew;
}

const share = percent => percent < 0 ? "unknown" : `${percent} %`;

/** Describe a tile in one sentence. */
function words(node, device) {
  const state = [node.message, node.cordoned && "node cordoned", device.state === 1 && "unhealthy", device.state === 2 && "cordoned", device.risk && RISKS[device.risk]].filter((text, i, all) => text && all.indexOf(text) === i);
  return `${node.name} ${gpuNoun(device.gpu)}, ${device.model} ${gib(device.memory * 2 ** 30)}: ${share(device.reserved)} reserved, ${share(device.used)} in use, SM ${share(device.sm)}${state.length ? `; ${state.join(", ")}` : ""}`;
}

const firstTile = ({blocks}) => blocks.length ? {block: 0, node: 0, device: 0} : null;

/** Return the tile that a key leads to; null for other keys, and at the edge. */
function moved(layout, tile, key) {
  const [x, y] = corner(layout, tile), {side, cellWidth} = layout.blocks[tile.block], middle = side / 2;
  const search = (stepX, stepY) => {
    for (let i = 1, most = 2 * cellWidth + 200; i < most; i += 1) {
      const found = tileAt(layout, x + middle + stepX * i, y + middle + stepY * i);
      if (found && (found.block !== tile.block || found.node !== tile.node || found.device !== tile.device)) return found;
    }
    return null;
  };
  const steps = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};
  if (steps[key]) return search(...steps[key]);
  return key === "Home" ? firstTile(layout) : null;
}

/** Read the colours from the style sheet, which has them for light and dark: as CSS, and in "paint" as numbers for the pixels of an image. */
function readTheme(element) {
  const probe = el("i"), context = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const of = colour => { probe.style.color = colour; return getComputedStyle(probe).color; };
  const number = colour => {
    context.fillStyle = of(colour);
    context.fillRect(0, 0, 1, 1);
    return new Uint32Array(context.getImageData(0, 0, 1, 1).data.buffer)[0];
  };
  element.append(probe);
  const theme = {
    text: of("var(--text)"), quiet: of("var(--quiet)"), link: of("var(--link)"),
    paint: {
      text: number("var(--text)"), quiet: number("var(--quiet)"), bad: number("var(--bad)"), unknown: number("var(--line)"),
      risks: RISK_COLOURS.map(name => number(`var(${name})`)),
      scale: Array.from({length: STEPS + 1}, (_, i) => number(`color-mix(in oklab, var(--heat) ${100 * i / STEPS}%, var(--free))`)),
    },
  };
  probe.remove();
  return theme;
}

const shade = (paint, percent) => percent < 0 ? paint.unknown : percent > 100 ? paint.bad : paint.scale[Math.round(percent * STEPS / 100)];

function drawLegend(legend, by) {
  if (legend.dataset.by === by) return;
  legend.dataset.by = by;
  const key = (className, text) => el("span", {}, el("i", {class: className, "aria-hidden": "true"}), text);
  const scale = by === "risk" ? RISKS.map((text, i) => key(`risk-${i}`, `${text}${MEANINGS[i]}`)) : [key("scale", "0 to 100 %"), key("risk-4", "more than the memory"), key("unknown", "unknown")];
  legend.replaceChildren(`${COLOURS[by][0].toUpperCase()}${COLOURS[by].slice(1)}: `, ...scale, key("crossed", "unhealthy"), key("slashed", "cordoned"), key("struck", "node takes no pods"), key("framed", "overcommitted"));
}
