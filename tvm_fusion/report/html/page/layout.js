/* Boxes and edges of one part of a graph: placed by dagre, drawn as SVG. */

const MOST_PORTS = 8; // on each side of a part; the smaller ones are drawn as one
const MOST_LINES = 6; // of operators in a group's box
const BOX = { least: 132, most: innerWidth < 700 ? 210 : 300, pad: 12 };

/** What a group's box says of its operators: those of one composite are one line. */
function operatorLines(group) {
  const lines = [];
  for (const op of group.members) {
    const name = (op.operator ?? op.name).replace(/#\d+$/, "");
    if (op.operator && lines.at(-1)?.operator === op.operator) lines.at(-1).count += 1;
    else lines.push({ name, operator: op.operator, count: 1 });
  }
  const texts = lines.map(({ name, count }) => (count > 1 ? `${name} (${count})` : name));
  if (texts.length <= MOST_LINES) return texts;
  return [...texts.slice(0, MOST_LINES - 1), `and ${texts.length - MOST_LINES + 1} more`];
}

function box(key, texts, more) {
  const inner = Math.max(...texts.map(({ text, font }) => widthOf(text, font)));
  const most = more.most ?? BOX.most;
  const width = Math.min(most, Math.max(more.least ?? BOX.least, Math.ceil(inner) + 2 * BOX.pad));
  const lines = texts.map((line) => ({ ...line, text: fitted(line.text, line.font, width - 22) }));
  const height = sum(lines.map((line) => (line.font === "title" ? 19 : 15))) + 12;
  return { key, lines, width, height, ...more };
}

/** What a box is called in a part that is named after the module around it. */
function shortTitle(model, group, part) {
  const around = part.repeat ? mainModule(part.groups.map((index) => model.groups[index])) : "";
  if (around && group.place === around) return group.label.slice(around.length + 2);
  if (around && group.place?.startsWith(`${around}.`)) return group.title.slice(around.length + 1);
  return part.stands ? commonTitle(model, group.index) : group.title;
}

function groupBox(model, group, part) {
  const time = timeOf(group);
  const said = [group.kernel_class, formatTime(time), isMeasured(group) ? "measured" : "predicted"];
  const texts = [
    { text: shortTitle(model, group, part), font: "title", style: "name" },
    { text: said.slice(0, 2).join(" · "), font: "small", style: "meta" },
    ...operatorLines(group).map((text) => ({ text, font: "small", style: "op" })),
  ];
  const count = plural(group.members.length, "operator");
  return box(`g${group.index}`, texts, {
    kind: "group",
    group: group.index,
    colour: colourOf(model, group.kernel_class),
    label: `${group.title}, ${said.join(" ")}, ${count}`,
  });
}

function opBox(model, op) {
  const group = model.groups[op.groups[0]];
  const { operator, name } = op;
  const plain = operator && !operator.includes("#") && !name.includes(operator);
  const texts = [{ text: plain ? `${operator} ${name}` : name, font: "small", style: "name" }];
  return box(`o${op.index}`, texts, {
    kind: group ? "op" : "free",
    group: group?.index,
    op: op.index,
    least: 72,
    most: 190,
    colour: group ? colourOf(model, group.kernel_class) : "var(--line)",
    label: group ? `${op.name}, in ${group.title}` : `${op.name}, no kernel: renames its input`,
  });
}

function portBox(key, text, more) {
  const texts = [{ text, font: "small", style: "meta" }];
  return {
    ...box(key, texts, { kind: "port", least: 40, most: 220, label: text, ...more }),
    height: 22,
  };
}

/* ---- What a part shows. `end` of an edge is {group}, {op} or {tensor}. */

/** Boxes and edges of a part; what lies in another part, and the caller, are ports. */
function contents(model, part, before) {
  const own = new Set(before ? part.ops : part.groups);
  const key = (end) => (before ? end.op : end.group);
  const boxes = before
    ? part.ops.map((index) => opBox(model, model.ops[index]))
    : part.groups.map((index) => groupBox(model, model.groups[index], part));
  const edges = [];
  const crossing = { in: new Map(), out: new Map() };
  for (const edge of before ? model.opEdges : model.groupEdges) {
    const [comes, goes] = [own.has(key(edge.from)), own.has(key(edge.to))];
    if (comes && goes) edges.push(drawnEdge(nodeKey(edge.from), nodeKey(edge.to), edge));
    else if (goes) gather(crossing.in, edge.from, edge, model);
    else if (comes) gather(crossing.out, edge.to, edge, model);
  }
  for (const side of ["in", "out"]) addPorts(model, boxes, edges, crossing[side], side);
  if (!model.hasGraph) {
    const follow = (index, k) => ({ from: `g${part.groups[k]}`, to: `g${index}`, hidden: true });
    edges.push(...part.groups.slice(1).map(follow));
  }
  return { boxes, edges };
}

const nodeKey = (end) =>
  end.op !== undefined
    ? `o${end.op}`
    : end.group !== undefined
      ? `g${end.group}`
      : `t${end.tensor}`;

const drawnEdge = (from, to, edge) => ({
  from,
  to,
  text: edgeLabel(edge),
  kept: edge.kept,
  tensors: edge.tensors,
});

function gather(ports, end, edge, model) {
  // Operators of one group are one port: what it is to the part is one kernel.
  const group = end.op !== undefined ? model.ops[end.op].groups[0] : end.group;
  const key = group !== undefined ? `g${group}` : nodeKey(end);
  const port = ports.get(key) ?? { group, tensor: end.tensor, op: end.op, edges: [] };
  port.edges.push(edge);
  ports.set(key, port);
}

function addPorts(model, boxes, edges, ports, side) {
  const size = (port) => bytesOf(port.edges.flatMap((edge) => edge.tensors)) ?? Infinity;
  const ordered = [...ports.values()].sort((a, b) => size(b) - size(a));
  const apart = ordered.length > MOST_PORTS ? MOST_PORTS - 1 : ordered.length;
  const drawn = ordered.slice(0, apart).map((port) => [port, portText(model, port, side)]);
  if (apart < ordered.length) {
    const rest = { edges: ordered.slice(apart).flatMap((port) => port.edges) };
    drawn.push([rest, `${side === "in" ? "from" : "to"} ${ordered.length - apart} more`]);
  }
  drawn.forEach(([port, text], k) => {
    const key = `${side}${k}`;
    boxes.push(portBox(key, text, { group: port.group }));
    const merged = new Map();
    for (const edge of port.edges) {
      const other = nodeKey(side === "in" ? edge.to : edge.from);
      const tensors = merged.get(other) ?? new Set();
      edge.tensors.forEach((tensor) => tensors.add(tensor));
      merged.set(other, tensors);
    }
    for (const [other, tensors] of merged) {
      const ends = side === "in" ? [key, other] : [other, key];
      edges.push(drawnEdge(...ends, { tensors: [...tensors] }));
    }
  });
}

function portText(model, port, side) {
  if (port.group !== undefined) {
    const { place, title } = model.groups[port.group];
    return `${side === "in" ? "from" : "to"} ${place ?? title}`;
  }
  if (port.op !== undefined) return model.ops[port.op].name;
  const tensor = model.tensors.get(port.tensor);
  return `${tensor?.role ?? "tensor"} ${tensor?.name ?? ""}`;
}

/* ---- Places and drawing. */

function placed({ boxes, edges }, ranksep) {
  const graph = new dagre.graphlib.Graph({ multigraph: true });
  graph.setGraph({ rankdir: "TB", nodesep: 16, edgesep: 12, ranksep, marginx: 6, marginy: 6 });
  for (const { key, width, height } of boxes) graph.setNode(key, { width, height });
  edges.forEach((edge, k) => {
    const label = edge.text ? { width: widthOf(edge.text, "small") + 8, height: 14 } : {};
    graph.setEdge(edge.from, edge.to, { ...label, labelpos: "c" }, String(k));
  });
  dagre.layout(graph);
  return graph;
}

function drawGraph(content, { label, gap, onopen, onport }) {
  const graph = placed(content, gap);
  const { width, height } = graph.graph();
  const edges = content.edges.map((edge, k) =>
    edge.hidden ? null : drawEdge(edge, graph.edge(edge.from, edge.to, String(k))),
  );
  const labels = content.edges.map((edge, k) =>
    edge.text ? drawLabel(edge, graph.edge(edge.from, edge.to, String(k))) : null,
  );
  const boxes = content.boxes.map((item) =>
    drawBox(item, graph.node(item.key), item.kind === "port" ? onport : onopen),
  );
  return svg(
    "svg",
    {
      class: "graph",
      role: "group",
      "aria-label": label,
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
    },
    edges,
    labels,
    boxes,
  );
}

function drawBox(item, place, act) {
  const acts = item.group !== undefined;
  const [left, top] = [place.x - item.width / 2, place.y - item.height / 2];
  const node = svg("g", {
    class: `node ${item.kind}`,
    transform: `translate(${left} ${top})`,
    style: item.colour && `--colour: ${item.colour}`,
    "data-key": item.key,
    "data-group": item.group,
    role: acts ? (item.kind === "port" ? "link" : "button") : "img",
    tabindex: acts ? 0 : null,
    "aria-label": item.label,
    onclick: acts ? () => act(item.group) : null,
    onkeydown: acts ? (event) => pressed(event, () => act(item.group)) : null,
  });
  const corner = item.kind === "port" ? item.height / 2 : 5;
  node.append(
    svg("title", {}, item.label),
    svg("rect", { class: "box", width: item.width, height: item.height, rx: corner }),
  );
  if (item.kind !== "port") {
    node.append(
      svg("rect", { class: "stripe", y: 5, x: 5, width: 3, height: item.height - 10, rx: 1.5 }),
    );
  }
  let y = item.kind === "port" ? 0 : 6;
  for (const line of item.lines) {
    const step = line.font === "title" ? 19 : 15;
    const middle =
      item.kind === "port"
        ? { x: item.width / 2, y: 15, "text-anchor": "middle" }
        : { x: 15, y: y + step - 4 };
    node.append(svg("text", { class: `${line.font} ${line.style}`, ...middle }, line.text));
    y += step;
  }
  return node;
}

function pressed(event, act) {
  if (event.key !== "Enter" && event.key !== " ") return;
  event.preventDefault();
  act();
}

const edgeEnds = (edge) => `${edge.from} ${edge.to}`;

function drawEdge(edge, place) {
  const points = place.points;
  const [end, last] = [points.at(-1), points.at(-2)];
  const angle = (Math.atan2(end.y - last.y, end.x - last.x) * 180) / Math.PI;
  const kind = edge.kept ? "edge kept" : "edge";
  return svg(
    "g",
    { class: kind, "data-edge": edgeEnds(edge) },
    svg("path", { d: smooth(points) }),
    svg("path", {
      class: "head",
      d: "M0 0 L-7 -3.5 L-7 3.5 Z",
      transform: `translate(${end.x} ${end.y}) rotate(${angle})`,
    }),
  );
}

/** A path along the points, its corners round. */
function smooth(points) {
  const at = ({ x, y }) => `${x.toFixed(1)} ${y.toFixed(1)}`;
  const middle = (a, b) => ({ x: (a.x + b.x) / 2, y: (a.y + b.y) / 2 });
  let path = `M${at(points[0])}`;
  for (let k = 1; k < points.length - 1; k += 1) {
    const to = k === points.length - 2 ? points[k + 1] : middle(points[k], points[k + 1]);
    path += ` Q${at(points[k])} ${at(to)}`;
  }
  return points.length === 2 ? `${path} L${at(points[1])}` : path;
}

function drawLabel(edge, place) {
  const names = edge.tensors.map((tensor) => `${tensor.name ?? tensor.id}: ${shapeOf(tensor)}`);
  return svg(
    "text",
    {
      class: edge.kept ? "bytes kept" : "bytes",
      x: place.x,
      y: place.y + 4,
      "text-anchor": "middle",
      "data-edge": edgeEnds(edge),
    },
    svg("title", {}, names.join("\n")),
    edge.text,
  );
}
