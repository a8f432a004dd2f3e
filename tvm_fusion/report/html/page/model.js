/* One function's report (version 3 of the JSON) with its indexes: who writes a tensor, who reads
   it, and which parts the graph is drawn in. What a report lacks is empty. */

const FEWEST_HIDDEN = 6; // kernels that a repetition has to save the reader
const LARGEST_PART = { groups: 24, ops: 90 };
const MOST_OF = 0.7;

function readReport(report) {
  const groups = (report.groups ?? []).map((group, index) => ({ ...group, index }));
  const graph = report.graph ?? { ops: [], tensors: [] };
  const ops = graph.ops.map((op, index) => ({ ...op, index, groups: [] }));
  const byName = new Map(ops.map((op) => [op.name, op]));
  for (const group of groups) {
    group.members = (group.ops ?? []).map((name) => byName.get(name) ?? { name, groups: [] });
    for (const op of group.members) op.groups.push(group.index);
    group.reads ??= [];
    group.writes ??= [];
    group.modules = (group.modules ?? []).filter(Boolean);
    group.place = group.label?.includes(": ") ? group.label.split(": ")[0] : null;
    group.title = titleOf(group);
  }
  const model = {
    report,
    groups,
    ops,
    tensors: new Map(graph.tensors.map((tensor) => [tensor.id, tensor])),
    opWriter: new Map(ops.flatMap((op) => op.outputs.map((id) => [id, op]))),
    groupWriter: new Map(groups.flatMap((group) => group.writes.map((id) => [id, group.index]))),
    families: familiesOf(groups),
    repeats: (report.repeats ?? []).filter(
      ({ groups: size, count }) => size * (count - 1) >= FEWEST_HIDDEN,
    ),
    hasGraph: ops.length > 0,
  };
  homes(model);
  model.groupEdges = groupEdges(model);
  model.opEdges = opEdges(model);
  return model;
}

/** The label, with the name of the result where the model has no name for the place. */
function titleOf(group) {
  if (group.place) return group.label;
  const result = group.ops?.at(-1) ?? group.name;
  return group.label ? `${result}: ${group.label}` : group.name;
}

const timeOf = (group) => group.measured?.median_us ?? group.measured_us ?? group.predicted_us;
const isMeasured = (group) => (group.measured?.median_us ?? group.measured_us ?? null) !== null;

/** Families of kernels, the one that takes most time first: their colours go by this order. */
function familiesOf(groups) {
  const times = new Map();
  for (const group of groups) {
    times.set(group.kernel_class, (times.get(group.kernel_class) ?? 0) + (timeOf(group) ?? 0));
  }
  return [...times.keys()].sort((a, b) => times.get(b) - times.get(a) || (a < b ? -1 : 1));
}

const colourOf = (model, family) => `var(--family-${model.families.indexOf(family) % 8})`;

/* ---- Edges. An operator that no group has (a reshape) only renames what it reads. */

/** What writes a tensor into memory: groups, and tensors that the caller gives. */
function origins(model, id, seen = new Set()) {
  if (seen.has(id)) return [];
  seen.add(id);
  if (model.groupWriter.has(id)) return [{ group: model.groupWriter.get(id) }];
  const op = model.opWriter.get(id);
  if (!op) return [{ tensor: id }];
  if (op.groups.length) return [{ group: op.groups[0] }];
  return op.inputs.flatMap((input) => origins(model, input, seen));
}

function addEdge(edges, from, to, tensor) {
  const key = `${from.group ?? `t${from.tensor}`}>${to.group ?? `t${to.tensor}`}`;
  const edge = edges.get(key) ?? { from, to, tensors: [] };
  if (!edge.tensors.includes(tensor)) edge.tensors.push(tensor);
  edges.set(key, edge);
}

/** Tensors in memory between groups, and from and to the caller. */
function groupEdges(model) {
  const edges = new Map();
  for (const group of model.groups) {
    for (const id of group.reads) {
      const tensor = model.tensors.get(id);
      if (!tensor || tensor.role === "constant") continue;
      for (const from of origins(model, id)) {
        if (model.tensors.get(from.tensor)?.role === "constant") continue;
        if (from.group !== group.index) addEdge(edges, from, { group: group.index }, tensor);
      }
    }
  }
  for (const tensor of model.tensors.values()) {
    if (tensor.role !== "output") continue;
    for (const from of origins(model, tensor.id)) {
      if (from.group !== undefined) addEdge(edges, from, { tensor: tensor.id }, tensor);
    }
  }
  return [...edges.values()];
}

/** Tensors between operators; `kept` where fusion keeps them out of memory. */
function opEdges(model) {
  const edges = [];
  for (const op of model.ops) {
    for (const id of new Set(op.inputs)) {
      const tensor = model.tensors.get(id);
      const writer = model.opWriter.get(id);
      if (!tensor || (!writer && tensor.role === "constant")) continue;
      const from = writer ? { op: writer.index } : { tensor: id };
      const kept = Boolean(writer) && writer.groups.some((group) => op.groups.includes(group));
      edges.push({ from, to: { op: op.index }, tensors: [tensor], kept });
    }
  }
  for (const tensor of model.tensors.values()) {
    const writer = model.opWriter.get(tensor.id);
    if (tensor.role !== "output" || !writer) continue;
    edges.push({ from: { op: writer.index }, to: { tensor: tensor.id }, tensors: [tensor] });
  }
  return edges;
}

function bytesOf(tensors) {
  return tensors.some((tensor) => !Number.isFinite(tensor.bytes))
    ? null
    : sum(tensors.map((tensor) => tensor.bytes));
}

const shapeOf = ({ shape, dtype }) => `${(shape ?? []).join(" × ") || "scalar"} ${dtype ?? ""}`;

/** "4.2 MB", or shapes where the sizes are symbolic. */
function edgeLabel(edge) {
  const bytes = bytesOf(edge.tensors);
  return bytes === null ? edge.tensors.map(shapeOf).join(", ") : formatBytes(bytes);
}

/** The group near which an operator is drawn: its own, or that of its neighbour. */
function homes(model) {
  for (const op of model.ops) {
    const before = op.inputs.map((id) => model.opWriter.get(id)?.home);
    op.home = op.groups[0] ?? before.find((home) => home !== undefined);
  }
  for (const op of model.ops.toReversed()) {
    if (op.home === undefined) continue;
    for (const id of op.inputs) {
      const writer = model.opWriter.get(id);
      if (writer) writer.home ??= op.home;
    }
  }
  for (const op of model.ops) op.home ??= 0;
}

/* ---- Parts: stretches of groups that are laid out on their own; a repetition is one. */

/** The parts in order; `opened` holds the repeats (by their first group) whose copies are shown. */
function partsOf(model, opened) {
  const parts = [];
  const ends = new Map(model.repeats.map((repeat) => [repeat.first, repeat]));
  let run = [];
  const close = () => {
    for (const groups of chunks(run, (index) => opCount(model, index))) {
      parts.push({ groups });
    }
    run = [];
  };
  for (let index = 0; index < model.groups.length; index += 1) {
    const repeat = ends.get(index);
    if (!repeat) {
      run.push(index);
      continue;
    }
    close();
    const copies = opened.has(repeat.first) ? repeat.count : 1;
    for (let copy = 0; copy < copies; copy += 1) {
      const first = repeat.first + copy * repeat.groups;
      const groups = Array.from({ length: repeat.groups }, (_, k) => first + k);
      const pieces = chunks(groups, (k) => opCount(model, k));
      pieces.forEach((piece, k) =>
        parts.push({ groups: piece, repeat, copy, continued: k > 0, stands: copies === 1 }),
      );
    }
    index += repeat.groups * repeat.count - 1;
  }
  close();
  const place = new Map(parts.flatMap((part, k) => part.groups.map((group) => [group, k])));
  parts.forEach((part, k) => Object.assign(part, { index: k, ops: [] }));
  for (const op of model.ops) {
    const part = parts[place.get(op.home)];
    if (part) part.ops.push(op.index);
  }
  return { parts, place };
}

const opCount = (model, index) => model.groups[index].members.length;

/** Items in order, in pieces of about the same weight. */
function chunks(items, weight) {
  const total = sum(items.map(weight));
  const count = Math.ceil(Math.max(items.length / LARGEST_PART.groups, total / LARGEST_PART.ops));
  const pieces = Array.from({ length: count }, () => []);
  let before = 0;
  for (const item of items) {
    pieces[Math.min(count - 1, Math.floor((before / total) * count))].push(item);
    before += weight(item);
  }
  return pieces.filter((piece) => piece.length);
}

/** The same group in the first repetition, and how often it is there. */
function representative(model, index) {
  for (const repeat of model.repeats) {
    const offset = index - repeat.first;
    if (offset >= 0 && offset < repeat.groups * repeat.count) {
      return { index: repeat.first + (offset % repeat.groups), repeat };
    }
  }
  return { index, repeat: null };
}

/** One title of several kernels: "layers.*.mlp: linear, gelu"; the first where words differ. */
function sharedTitle(groups) {
  const all = groups.map(({ title }) => title.split(/(\d+)/));
  const [first] = all;
  const varies = first.map((word, k) => all.some((words) => words[k] !== word));
  const alike = all.every((words) => words.length === first.length);
  if (!alike || varies.some((does, k) => does && k % 2 === 0)) return groups[0].title;
  return first.map((word, k) => (varies[k] ? "*" : word)).join("");
}

/** The title of a group in all repetitions. */
function commonTitle(model, index) {
  const { repeat, index: first } = representative(model, index);
  if (!repeat) return model.groups[first].title;
  const copies = Array.from({ length: repeat.count }, (_, k) => first + k * repeat.groups);
  return sharedTitle(copies.map((copy) => model.groups[copy]));
}

/** Groups with the same kernel, together. */
function equalGroups(model) {
  const found = new Map();
  for (const group of model.groups) {
    const first = group.same_as ?? representative(model, group.index).index;
    found.set(first, [...(found.get(first) ?? []), group]);
  }
  return [...found.values()];
}

/** The innermost module that most of the groups are in. */
function mainModule(groups) {
  const counts = new Map();
  for (const { place } of groups) {
    const words = place ? place.split(".") : [];
    words.forEach((_, k) => {
      const path = words.slice(0, k + 1).join(".");
      counts.set(path, (counts.get(path) ?? 0) + 1);
    });
  }
  const main = [...counts].filter(([, count]) => count >= MOST_OF * groups.length);
  return main.reduce((longest, [path]) => (path.length > longest.length ? path : longest), "");
}

/** What a part is called: "layers.0 … layers.11", "kernels 3 to 9". */
function partTitle(model, part, opened) {
  const ends = [part.groups[0] + 1, part.groups.at(-1) + 1];
  const kernels = ends[0] === ends[1] ? `kernel ${ends[0]}` : `kernels ${ends[0]} to ${ends[1]}`;
  if (!part.repeat) return kernels;
  const named = (copy) => {
    const first = part.repeat.first + copy * part.repeat.groups;
    return mainModule(model.groups.slice(first, first + part.repeat.groups));
  };
  const name = named(part.copy);
  if (opened) return name || `repetition ${part.copy + 1}, ${kernels}`;
  const last = named(part.repeat.count - 1);
  return name && last && name !== last ? `${name} … ${last}` : name || kernels;
}
