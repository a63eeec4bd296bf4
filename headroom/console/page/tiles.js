// Geometry and drawing of the map: one tile for each device. Tiles of a node touch, nodes are apart.

/** Sides of a tile in pixels, by zoom. */
export const SIDES = [3, 5, 7, 10, 14, 20, 28];
/** Minimum side at which the names of nodes are shown. */
const NAMED = 20;
const HEADER = 30, NAME = 14;

/**
 * Place all nodes. groups: [{name, nodes: [{devices: [...]}]}].
 * Return {blocks, height}: a block for each group, with the position of its first node and the size of a node's cell.
 */
export function layOut(groups, width, side) {
  const blocks = [];
  let y = 0;
  for (const group of groups) {
    const most = Math.max(1, ...group.nodes.map(node => node.devices.length));
    const perLine = most <= 4 ? most : Math.min(8, Math.ceil(most / 2)), lines = Math.ceil(most / perLine);
    const gap = side < 5 ? 2 : side < 10 ? 4 : 7, named = side >= NAMED ? NAME : 0;
    const cellWidth = perLine * (side + 1) + gap, cellHeight = lines * (side + 1) + gap + named;
    const columns = Math.max(1, Math.floor((width + gap) / cellWidth));
    blocks.push({group, y: y + HEADER, columns, perLine, lines, cellWidth, cellHeight, side, named});
    y += HEADER + Math.ceil(group.nodes.length / columns) * cellHeight + 8;
  }
  return {blocks, height: y};
}

/** Return the tile at a point, as {block, node, device}: positions in the layout; null between tiles. */
export function tileAt({blocks}, x, y) {
  const block = blocks.find((each, i) => y >= each.y && (i + 1 === blocks.length || y < blocks[i + 1].y - HEADER));
  if (!block) return null;
  const column = Math.floor(x / block.cellWidth), row = Math.floor((y - block.y) / block.cellHeight);
  const node = row * block.columns + column;
  const inX = Math.floor((x - column * block.cellWidth) / (block.side + 1)), inY = Math.floor((y - block.y - row * block.cellHeight - block.named) / (block.side + 1));
  const device = inY * block.perLine + inX;
  if (column >= block.columns || inX >= block.perLine || inY < 0 || !block.group.nodes[node]?.devices[device]) return null;
  return {block: blocks.indexOf(block), node, device};
}

/** Return the upper left corner of a tile. */
export function corner({blocks}, {block: number, node, device}) {
  const block = blocks[number];
  return [
    (node % block.columns) * block.cellWidth + (device % block.perLine) * (block.side + 1),
    block.y + Math.floor(node / block.columns) * block.cellHeight + block.named + Math.floor(device / block.perLine) * (block.side + 1),
  ];
}

/**
 * Return a function that draws the part between top and top + height, in CSS pixels. A CSS pixel has ratio pixels of the canvas. Tiles are written
 * into an image, because 40,000 rectangles of a canvas take several times as long. colourOf(node, device) returns a colour of theme.paint, and
 * dimmed(node) returns whether the node does not match the search.
 */
export function painter(canvas) {
  const context = canvas.getContext("2d");
  let image = null;
  return (layout, view) => {
    const {width, height} = canvas;
    if (!width || !height) return;
    if (image?.width !== width || image.height !== height) image = context.createImageData(width, height);
    const pixels = new Uint32Array(image.data.buffer), visible = [...nodesIn(layout, view)];
    pixels.fill(0);
    for (const each of visible) paintNode({pixels, width, height, ratio: view.ratio}, each, view);
    context.putImageData(image, 0, 0);
    context.setTransform(view.ratio, 0, 0, view.ratio, 0, -view.top * view.ratio);
    write(context, layout, visible, view);
    for (const [tile, colour] of [[view.selected, view.theme.link], [view.cursor, view.theme.text]]) {
      if (!tile) continue;
      const [x, y] = corner(layout, tile), {side} = layout.blocks[tile.block];
      context.lineWidth = 2;
      context.strokeStyle = colour;
      context.strokeRect(x - 1.5, y - 1.5, side + 3, side + 3);
    }
  };
}

/** Yield the visible nodes with the corner of each: {node, block, x, y}. */
function* nodesIn(layout, {top, height}) {
  for (const block of layout.blocks) {
    const {nodes} = block.group, first = Math.max(0, Math.floor((top - block.y) / block.cellHeight)) * block.columns;
    const last = Math.min(nodes.length, (Math.floor((top + height - block.y) / block.cellHeight) + 1) * block.columns);
    for (let i = first; i < last; i += 1) yield {node: nodes[i], block, x: (i % block.columns) * block.cellWidth, y: block.y + Math.floor(i / block.columns) * block.cellHeight};
  }
}

/** Write the titles of groups and the names of nodes. */
function write(context, {blocks}, visible, {width, theme, dimmed}) {
  context.fillStyle = theme.text;
  context.font = "600 13px system-ui, sans-serif";
  for (const block of blocks) context.fillText(block.group.title, 0, block.y - 9, width);
  context.fillStyle = theme.quiet;
  context.font = "11px system-ui, sans-serif";
  for (const {node, block, x, y} of visible) {
    if (!block.named) continue;
    context.globalAlpha = dimmed(node) ? 0.15 : 1;
    context.fillText(node.name, x, y + 10, block.cellWidth - 6);
  }
  context.globalAlpha = 1;
}

function paintNode(image, {node, block, x, y}, {top, colourOf, dimmed, theme}) {
  const {side} = block, {text, quiet, bad} = theme.paint, paint = dimmed(node) ? faint : colour => colour;
  node.devices.forEach((device, number) => {
    const box = boxOf(image, x + (number % block.perLine) * (side + 1), y - top + block.named + Math.floor(number / block.perLine) * (side + 1), side);
    fill(image, box, paint(colourOf(node, device)));
    if (node.closed) {
      const middle = (box.top + box.bottom) >> 1;
      fill(image, {...box, top: middle, bottom: middle + box.line}, paint(quiet));
    }
    if (device.state === 1) cross(image, box, paint(text), true);
    if (device.state || node.cordoned) cross(image, box, paint(text), false);
    if (device.risk === 4) frame(image, box, paint(bad));
  });
}

/** Return a tile in pixels of the image, with the width of a line. */
const boxOf = ({ratio}, x, y, side) => ({
  left: Math.round(x * ratio), top: Math.round(y * ratio), right: Math.round((x + side) * ratio), bottom: Math.round((y + side) * ratio),
  line: Math.max(1, Math.round((side < 10 ? 1 : 1.5) * ratio)),
});

/** Return a colour with 15 % of its opacity, which is in the highest byte. */
const faint = colour => ((colour & 0xffffff) | 0x26000000) >>> 0;

function fill({pixels, width, height}, {left, top, right, bottom}, colour) {
  const from = Math.max(0, left), to = Math.min(width, right), last = Math.min(height, bottom);
  for (let y = Math.max(0, top); y < last; y += 1) for (let at = y * width + from, end = y * width + to; at < end; at += 1) pixels[at] = colour;
}

/** Draw a diagonal line, which begins in the upper left corner or ends in the upper right one. */
function cross(image, {left, top, right, bottom, line}, colour, isDownwards) {
  for (let y = top; y < bottom; y += 1) {
    const x = isDownwards ? left + y - top : right - 1 - (y - top), from = x - (line >> 1);
    fill(image, {left: Math.max(left, from), right: Math.min(right, from + line), top: y, bottom: y + 1}, colour);
  }
}

function frame(image, box, colour) {
  const width = Math.max(1, Math.round(2 * image.ratio));
  fill(image, {...box, bottom: box.top + width}, colour);
  fill(image, {...box, top: box.bottom - width}, colour);
  fill(image, {...box, right: box.left + width}, colour);
  fill(image, {...box, left: box.right - width}, colour);
}
