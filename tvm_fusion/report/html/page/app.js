/* The page: totals, times, graph, kernels, figures, what was refused; and what opens what. */

const PEERS = { tvm: "TVM's default pipeline", torch: "torch eager" };
const FIRST_ROWS = { kernels: 10, refusals: 8 };

/* ---- Totals */

function totals(report) {
  const time = report.time_us ?? {};
  const verdict = report.times?.unfused?.verdict;
  const even = verdict && !["faster", "slower"].includes(verdict) ? verdict : null;
  const cards = [
    card("launches", "Launches", report.launches, formatCount),
    card("bytes", "Memory traffic", report.bytes, formatBytes),
    card("time_us", "Time of a call", time, formatTime, even),
    card("memory", "Memory at the peak", report.memory ?? {}, formatBytes),
  ];
  const { verify } = report;
  if (verify) {
    const text = verify.passed ? "passed" : "failed";
    const share = verify.not_finite ?? 0;
    const error =
      share < 1
        ? ["worst error ", said("total.verify.worst_error", formatNumber(verify.worst_error))]
        : "no number was compared";
    const apart = share ? `; ${significant(share * 100)}% of an output is NaN or infinite` : null;
    cards.push(
      el(
        "div",
        { class: verify.passed ? "card" : "card bad" },
        el("h3", {}, "Check"),
        el("p", { class: "big" }, said("total.verify.passed", text)),
        el("p", { class: "quiet" }, error, apart),
      ),
    );
  }
  return el("section", { class: "cards", "aria-label": "Totals" }, cards);
}

function card(field, title, pair, form, even) {
  if (!Number.isFinite(pair?.fused) && !Number.isFinite(pair?.unfused)) return null;
  const ratio = pair.fused ? pair.unfused / pair.fused : NaN;
  const less = even ?? (Number.isFinite(ratio) ? formatRatio(ratio) : null);
  return el(
    "div",
    { class: "card" },
    el("h3", {}, title),
    el("p", { class: "big" }, said(`total.${field}.fused`, form(pair.fused))),
    el(
      "p",
      { class: "quiet" },
      "unfused ",
      said(`total.${field}.unfused`, form(pair.unfused)),
      less ? el("b", { class: even ? "even" : "gain" }, said(`total.${field}.ratio`, less)) : null,
    ),
  );
}

/* ---- Times of this package and of others */

function times(report) {
  const entries = Object.entries(report.times ?? {});
  if (!entries.length) return null;
  const most = Math.max(...entries.map(([, time]) => time.high_us ?? time.median_us ?? 0));
  const lines = entries.map(([name, time]) => timeRow(name, time, most));
  const head = ["", "median", "quartiles", "samples", "of fused", "fused is"];
  return el(
    "section",
    { id: "times", "aria-labelledby": "times-title" },
    el("h2", { id: "times-title" }, "Time of a call"),
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        { class: "times-table" },
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            head.map((text) => el("th", { scope: "col" }, text)),
            el("th", { class: "range" }),
          ),
        ),
        el("tbody", {}, lines),
      ),
    ),
  );
}

function timeRow(name, time, most) {
  const title = el("th", { scope: "row" }, PEERS[name] ?? name);
  if (!Number.isFinite(time.median_us)) {
    const why = time.failure ?? "not timed";
    return el(
      "tr",
      { "data-peer": name },
      title,
      el("td", { colspan: 6, class: "failure" }, said("failure", why)),
    );
  }
  const share = (us) => `${((us / most) * 100).toFixed(2)}%`;
  const range = el(
    "div",
    { class: name === "fused" ? "whiskers ours" : "whiskers" },
    el("i", { style: `left: ${share(time.low_us)}; width: ${share(time.high_us - time.low_us)}` }),
    el("b", { style: `left: ${share(time.median_us)}` }),
  );
  const cells = [
    said("median_us", formatTime(time.median_us)),
    [said("low_us", formatTime(time.low_us)), " – ", said("high_us", formatTime(time.high_us))],
    said("samples", formatCount(time.samples)),
    Number.isFinite(time.ratio) ? said("ratio", formatRatio(time.ratio)) : "",
    time.verdict ? said("verdict", time.verdict) : "",
  ];
  return el(
    "tr",
    { "data-peer": name },
    title,
    cells.map((cell) => el("td", { class: "number" }, cell)),
    el("td", { class: "range" }, range),
  );
}

/* ---- Kernels as a table: those with the same kernel are one row */

function kernelRows(model) {
  const total = (groups, value) => sum(groups.map((group) => value(group) ?? 0));
  return equalGroups(model).map((groups) => ({
    title: sharedTitle(groups),
    group: groups[0],
    count: groups.length,
    time: total(groups, timeOf),
    bytes: total(groups, (group) => group.bytes_fused),
    saved: total(groups, (group) => group.bytes_unfused - group.bytes_fused),
  }));
}

const COLUMNS = [
  { name: "kernel", value: (row) => row.title },
  { name: "family", value: (row) => row.group.kernel_class },
  { name: "time", value: (row) => row.time, text: formatTime },
  { name: "of all", value: (row) => row.time / row.all, text: formatShare },
  { name: "traffic", value: (row) => row.bytes, text: formatBytes },
  { name: "saved", value: (row) => row.saved, text: formatBytes },
  { name: "of the limit", value: (row) => row.group.roofline_share, text: formatShare },
];

function kernels(model, open) {
  const rows = kernelRows(model);
  const all = sum(rows.map((row) => row.time));
  rows.forEach((row) => Object.assign(row, { all }));
  const state = { column: 2, down: true, full: rows.length <= FIRST_ROWS.kernels };
  const body = el("tbody");
  const heads = COLUMNS.map(({ name }, k) => {
    const sort = () => {
      state.down = state.column === k ? !state.down : k > 1;
      state.column = k;
      fill();
    };
    return el(
      "th",
      { scope: "col", class: k > 1 ? "number" : null },
      el("button", { type: "button", onclick: sort }, name),
    );
  });
  const more = el("button", { type: "button", class: "more" });
  more.addEventListener("click", () => {
    state.full = !state.full;
    fill();
  });
  const fill = () => {
    const { value } = COLUMNS[state.column];
    const sign = state.down ? -1 : 1;
    const compare = (a, b) => (value(a) < value(b) ? -sign : value(a) > value(b) ? sign : 0);
    const sorted = rows.toSorted(compare);
    const shown = state.full ? sorted : sorted.slice(0, FIRST_ROWS.kernels);
    body.replaceChildren(...shown.map((row) => kernelRow(model, row, open)));
    heads.forEach((head, k) => {
      head.setAttribute(
        "aria-sort",
        k !== state.column ? "none" : state.down ? "descending" : "ascending",
      );
    });
    more.hidden = rows.length <= FIRST_ROWS.kernels;
    more.textContent = state.full ? `Show ${FIRST_ROWS.kernels}` : `Show all ${rows.length}`;
  };
  fill();
  return el(
    "section",
    { id: "kernels", "aria-labelledby": "kernels-title" },
    el("h2", { id: "kernels-title" }, "Kernels"),
    el(
      "div",
      { class: "scroll" },
      el("table", { class: "kernels" }, el("thead", {}, el("tr", {}, heads)), body),
    ),
    more,
  );
}

function kernelRow(model, row, open) {
  const { group, count } = row;
  const name = el(
    "button",
    { type: "button", class: "link", onclick: () => open(group.index) },
    row.title,
  );
  const cells = COLUMNS.slice(2).map(({ value, text }) =>
    el("td", { class: "number" }, text(value(row))),
  );
  return el(
    "tr",
    { "data-group": group.index, style: `--colour: ${colourOf(model, group.kernel_class)}` },
    el(
      "th",
      { scope: "row" },
      name,
      count > 1 ? el("span", { class: "times" }, `x${count}`) : null,
    ),
    el("td", {}, el("span", { class: "tag" }, el("i"), group.kernel_class)),
    cells,
  );
}

/* ---- What was refused, and notes */

function refusals(report) {
  const all = (report.refusals ?? []).toSorted((a, b) => (b.cost_us ?? -1) - (a.cost_us ?? -1));
  if (!all.length) return null;
  const list = el("div", { class: "refusals" });
  const more = el("button", { type: "button", class: "more" });
  let shown = 0;
  const show = (count) => {
    list.append(...all.slice(shown, shown + count).map(refusalCard));
    shown = Math.min(all.length, shown + count);
    more.hidden = shown === all.length;
    more.textContent = `Show ${Math.min(50, all.length - shown)} of ${all.length - shown} more`;
  };
  more.addEventListener("click", () => show(50));
  show(FIRST_ROWS.refusals);
  const counts = new Map();
  for (const { code } of all) counts.set(code, (counts.get(code) ?? 0) + 1);
  const words = [...counts].sort((a, b) => b[1] - a[1]).map(([code, count]) => `${count} ${code}`);
  return el(
    "section",
    { id: "refused", "aria-labelledby": "refused-title" },
    el("h2", { id: "refused-title" }, "Not fused"),
    el("p", { class: "quiet" }, words.join(", ")),
    list,
    more,
  );
}

/** Why two parts of the model are one kernel or are not, where that was asked. */
function pairAnswer({ pair }) {
  if (!pair) return null;
  return el(
    "section",
    { id: "pair", "aria-labelledby": "pair-title" },
    el("h2", { id: "pair-title" }, (pair.names ?? []).join(" and ")),
    rows([
      pair.kernels ? ["kernels", said("pair.kernels", pair.kernels)] : null,
      ["relation", said("pair.relation", pair.relation)],
      ["price", said("pair.price", pair.price)],
    ]),
    el("div", { class: "refusals" }, (pair.refusals ?? []).map(refusalCard)),
  );
}

function notes(report) {
  const { bound, call_us: call } = report;
  const found = rows([
    report.threads ? ["threads", formatCount(report.threads)] : null,
    report.cuda_graph ? ["CUDA graph", report.cuda_graph] : null,
    call?.fused
      ? [
          "a call on the clock",
          `${formatTime(call.fused)}, launch by launch ${formatTime(call.unfused)}`,
        ]
      : null,
    report.measured_memory_bytes
      ? ["memory measured", `${formatBytes(report.measured_memory_bytes)} at the peak`]
      : null,
    bound ? ["bound", `no plan is predicted below ${formatTime(bound.least_us)}`] : null,
    report.unlearned ? ["learned correction", `not used: ${report.unlearned}`] : null,
    report.plan?.rewrites?.length ? ["rewritten", shown(report.plan.rewrites)] : null,
    ...Object.entries(report.plain ?? {}).map(([name, how]) => [`${name} is slow`, how]),
    ...(report.layouts ?? []).map((change) => {
      const cost = `${formatTime(change.predicted_us)}, ${formatBytes(change.bytes)}`;
      const reasons = (change.neighbours ?? []).map((refusal) => refusal.why);
      return [`${change.name} only changes a layout`, [cost, ...reasons].join(". ")];
    }),
  ]);
  return found && el("section", { id: "notes" }, el("h2", {}, "Notes"), found);
}

/* ---- The page of one function */

class Page {
  constructor(report, { name, sources }) {
    this.model = readReport(report);
    const open = (index) => this.open(index);
    this.graph = new GraphView(this.model, open);
    this.figures = figures(this.model, open);
    this.panel = new Panel(this.model, { sources, open, onclose: (from) => this.closed(from) });
    this.main = el(
      "main",
      {},
      this.head(report, name),
      totals(report),
      times(report),
      pairAnswer(report),
      this.graph.element,
      kernels(this.model, open),
      this.figures.element,
      refusals(report),
      notes(report),
    );
    this.element = el("div", { class: "page" }, this.main, this.panel.element);
  }

  head(report, name) {
    const { device } = report;
    const assumed = Object.entries(report.assumed ?? {});
    const sizes = assumed.map(([extent, size]) => `${extent} = ${size}`);
    const where = [
      name && `function ${name}`,
      device?.name ?? report.target,
      report.plan?.policy && `policy ${report.plan.policy}`,
      sizes.length && `predicted for ${sizes.join(", ")}`,
    ];
    const { unfused, fused } = report.launches ?? {};
    const headline = Number.isFinite(unfused)
      ? `${plural(fused, "launch", "launches")} instead of ${formatCount(unfused)}`
      : "Fusion report";
    return el(
      "header",
      { class: "top" },
      el("p", { class: "quiet" }, where.filter(Boolean).join(" · ")),
      el("h1", {}, headline),
    );
  }

  open(index) {
    const from = document.activeElement;
    this.settled(from, () => {
      this.panel.show(index);
      document.body.classList.add("with-panel");
    });
    this.mark(index);
  }

  closed(from) {
    this.settled(from, () => document.body.classList.remove("with-panel"));
    this.mark(null);
  }

  /** Make or take the room of the panel; what the user looks at stays where it is. */
  settled(from, change) {
    const place = () => from?.getBoundingClientRect().top ?? 0;
    const [width, top] = [this.main.clientWidth, place()];
    change();
    if (this.main.clientWidth === width) return;
    this.fit();
    if (from?.closest(".node")) from.scrollIntoView({ block: "nearest", inline: "nearest" });
    scrollBy(0, place() - top);
  }

  mark(index) {
    this.main.inert = index !== null && matchMedia("(max-width: 700px)").matches;
    this.graph.select(index);
    this.element.querySelectorAll(".chosen").forEach((node) => node.classList.remove("chosen"));
    if (index === null) return;
    const nodes = `#figures [data-group="${index}"], tr[data-group="${index}"]`;
    this.element.querySelectorAll(nodes).forEach((node) => node.classList.add("chosen"));
  }

  fit() {
    this.graph.fit();
    this.figures.draw();
  }
}

function start() {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const whole = read("report");
  const functions = whole.functions ?? { "": whole };
  const names = Object.keys(functions);
  const app = document.getElementById("app");
  let texts = null;
  let page = null;
  const show = (name) => {
    const report = functions[name];
    document.body.classList.remove("with-panel");
    if (report === null || typeof report !== "object") {
      page = null;
      holder.replaceChildren(
        el("main", {}, el("pre", {}, report ?? "There is no report of this function.")),
      );
      return;
    }
    const sources = () => (texts ??= read("sources"))[name] ?? {};
    page = new Page(report, { name, sources });
    holder.replaceChildren(page.element);
    page.graph.fit();
    const { figures } = page;
    requestAnimationFrame(() =>
      setTimeout(() => {
        figures.draw();
        performance.mark("report-ready");
      }),
    );
  };
  const options = names.map((name) => el("option", { value: name }, name));
  const choice = el(
    "select",
    { "aria-label": "Function", onchange: (event) => show(event.target.value) },
    options,
  );
  const holder = el("div");
  app.append(
    ...(names.length > 1 ? [el("nav", {}, el("label", {}, "Function ", choice))] : []),
    holder,
  );
  show(names[0]);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") page?.panel.close();
  });
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    requestAnimationFrame(() => page?.fit());
  });
}

start();
