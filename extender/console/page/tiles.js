// Geometry and drawing of the map: one tile for each device. Tiles of a node touch, nodes are apart.

/** Sides of a tile in pixels, by zoom. */
export const SIDES = [5, 7, 10, 14, 20, 28];
/** From this side on, the names of nodes are shown. */
const NAMED = 20;
const HEADER = 30, NAME = 14;

/**
 * Place all nodes. groups: [{name, nodes: [{devices: [...]}]}].
 * Return {blocks, height}: a block for each group, with the position of its first node and the size of the cell that each node has.
 */
export function layOut(groups, width, side) {
  const blocks = [];
  let y = 0;
  for (const group of groups) {
    const most = Math.max(1, ...group.nodes.map(node => node.devices.length));
    const perLine = most <= 4 ? most : Math.min(8, Math.ceil(most / 2)), lines = Math.ceil(most / perLine);
    const gap = side < 10 ? 4 : 7, named = side >= NAMED ? NAME : 0;
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

/** Draw what is between top and top + height. colourOf(node, device) returns a colour; dimmed(node) whether the node does not match the search. */
export function draw(context, layout, {top, width, height, colourOf, dimmed, theme, cursor, selected}) {
  context.clearRect(0, 0, width, height);
  context.save();
  context.translate(0, -top);
  for (const block of layout.blocks) {
    const rows = Math.ceil(block.group.nodes.length / block.columns), end = block.y + rows * block.cellHeight;
    if (end < top || block.y - HEADER > top + height) continue;
    context.globalAlpha = 1;
    context.fillStyle = theme.text;
    context.font = "600 13px system-ui, sans-serif";
    context.fillText(block.group.title, 0, block.y - 9, width);
    const first = Math.max(0, Math.floor((top - block.y) / block.cellHeight)) * block.columns;
    const last = Math.min(block.group.nodes.length, (Math.floor((top + height - block.y) / block.cellHeight) + 1) * block.columns);
    for (let i = first; i < last; i += 1) drawNode(context, block, i, colourOf, dimmed, theme);
  }
  context.globalAlpha = 1;
  for (const [tile, colour] of [[selected, theme.link], [cursor, theme.text]]) {
    if (!tile) continue;
    const [x, y] = corner(layout, tile), {side} = layout.blocks[tile.block];
    context.lineWidth = 2;
    context.strokeStyle = colour;
    context.strokeRect(x - 1.5, y - 1.5, side + 3, side + 3);
  }
  context.restore();
}

function drawNode(context, block, i, colourOf, dimmed, theme) {
  const node = block.group.nodes[i], {side} = block;
  const left = (i % block.columns) * block.cellWidth, above = block.y + Math.floor(i / block.columns) * block.cellHeight;
  context.globalAlpha = dimmed(node) ? 0.15 : 1;
  if (block.named) {
    context.fillStyle = theme.quiet;
    context.font = "11px system-ui, sans-serif";
    context.fillText(node.name, left, above + 10, block.cellWidth - 6);
  }
  node.devices.forEach((device, number) => {
    const x = left + (number % block.perLine) * (side + 1), y = above + block.named + Math.floor(number / block.perLine) * (side + 1);
    context.fillStyle = colourOf(node, device);
    context.fillRect(x, y, side, side);
    if (node.closed) stroke(context, theme.quiet, side, [[x, y + side / 2, x + side, y + side / 2]]);
    if (device.state === 1) stroke(context, theme.text, side, [[x, y, x + side, y + side], [x, y + side, x + side, y]]);
    else if (device.state === 2 || node.cordoned) stroke(context, theme.text, side, [[x, y + side, x + side, y]]);
    if (device.risk === 4) {
      context.strokeStyle = theme.bad;
      context.lineWidth = 2;
      context.strokeRect(x + 1, y + 1, side - 2, side - 2);
    }
  });
}

function stroke(context, colour, side, lines) {
  context.strokeStyle = colour;
  context.lineWidth = side < 10 ? 1 : 1.5;
  context.beginPath();
  for (const [x1, y1, x2, y2] of lines) { context.moveTo(x1, y1); context.lineTo(x2, y2); }
  context.stroke();
}
