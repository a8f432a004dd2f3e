/* The panel of one group: everything that the report says of a kernel. */

class Panel {
  /** `sources()` gives the texts by PrimFunc; `onclose` is told, `open(index)` shows another. */
  constructor(model, { sources, open, onclose }) {
    Object.assign(this, { model, sources, open, onclose });
    this.body = el("div", { class: "panel-body" });
    this.heading = el("h2", { id: "panel-title", tabindex: -1 });
    const close = el(
      "button",
      { type: "button", class: "close", "aria-label": "Close", onclick: () => this.close() },
      "×",
    );
    this.element = el(
      "aside",
      { id: "panel", role: "dialog", "aria-labelledby": "panel-title", hidden: true },
      el("header", {}, this.heading, close),
      this.body,
    );
  }

  show(index) {
    if (this.element.hidden) this.opener = document.activeElement;
    const group = this.model.groups[index];
    this.element.style.setProperty("--colour", colourOf(this.model, group.kernel_class));
    this.element.dataset.group = index;
    this.heading.replaceChildren(group.title);
    this.body.replaceChildren(...this.content(group).flat().filter(Boolean));
    this.body.scrollTop = 0;
    this.element.hidden = false;
    this.heading.focus({ preventScroll: true });
  }

  close() {
    if (this.element.hidden) return;
    this.element.hidden = true;
    const opener = this.opener?.isConnected ? this.opener : null;
    this.onclose(opener);
    opener?.focus({ preventScroll: true });
  }

  content(group) {
    return [
      this.what(group),
      section("Time", timeRows(group)),
      section("Memory and arithmetic", trafficRows(group)),
      section("Machine code", codeRows(group)),
      section("Why it is one kernel", reasonRows(group)),
      this.rejected(group),
      this.operators(group),
      this.tensors("Reads", group.reads),
      this.tensors("Writes", group.writes),
      this.texts(group),
    ];
  }

  what(group) {
    const { repeat } = representative(this.model, group.index);
    const config = this.sources()[group.name]?.config;
    const same = this.model.groups[group.same_as];
    const copies = repeat ? `one of ${repeat.count} equal kernels in repeated layers` : null;
    return rows([
      ["family", tag(group)],
      group.label ? ["computes", said("label", group.label)] : null,
      ["function", el("code", {}, said("name", group.name))],
      config ? ["configuration", said("config", config)] : null,
      group.modules.length ? ["module", said("modules", group.modules.join(", "))] : null,
      group.lines?.length ? ["source", said("lines", group.lines.join(", "))] : null,
      ["launches", said("launches", formatCount(group.launches))],
      group.fallback ? ["runs unfused", said("fallback", group.fallback)] : null,
      same && same !== group ? ["same kernel as", this.link(same)] : null,
      copies ? ["repeated", copies] : null,
    ]);
  }

  link(group) {
    const act = () => this.open(group.index);
    return el(
      "button",
      { type: "button", class: "link", onclick: act },
      said("same_as", group.title),
    );
  }

  rejected(group) {
    const refusal = (this.model.report.refusals ?? [])[group.rejected];
    return refusal ? section("Best rejected alternative", [refusalCard(refusal)]) : null;
  }

  operators(group) {
    const items = group.members.map((op) =>
      el(
        "li",
        {},
        el("code", {}, op.name),
        op.operator && op.operator !== op.name ? el("span", {}, ` ${op.operator}`) : null,
        el("span", { class: "quiet" }, [op.module, op.source].filter(Boolean).join(" · ")),
      ),
    );
    return section(`Operators (${items.length})`, [
      el("ol", { class: "ops", "data-field": "ops" }, items),
    ]);
  }

  tensors(title, ids) {
    const found = ids.map((id) => this.model.tensors.get(id)).filter(Boolean);
    if (!found.length) return null;
    const lines = found.map((tensor) =>
      el(
        "tr",
        {},
        el("td", {}, el("code", {}, tensor.name ?? String(tensor.id))),
        el("td", {}, shapeOf(tensor)),
        el("td", { class: "number" }, formatBytes(tensor.bytes)),
        el("td", { class: "quiet" }, tensor.role),
      ),
    );
    const table = el("table", { "data-field": title.toLowerCase() }, el("tbody", {}, lines));
    return section(title, [el("div", { class: "scroll" }, table)]);
  }

  texts(group) {
    const found = this.sources()[group.name];
    if (!found) return null;
    return [
      sourceText("Generated kernel", "kernel", found.kernel),
      sourceText("TensorIR", "tensor_ir", found.tensor_ir),
    ];
  }
}

/** A value of the report as text; the field's name is that of the JSON. */
const said = (field, text) => el("span", { "data-field": field }, text);

const quiet = (text) => el("span", { class: "quiet" }, text);

const tag = (group) =>
  el("span", { class: "tag" }, el("i"), said("kernel_class", group.kernel_class));

const section = (title, children) =>
  children?.length ? el("section", {}, el("h3", {}, title), children) : null;

/** Pairs of a name and what is said of it; null is left out. */
function rows(pairs) {
  const lines = pairs
    .filter(Boolean)
    .map(([name, ...value]) => [el("dt", {}, name), el("dd", {}, value)]);
  return lines.length ? el("dl", {}, lines) : null;
}

function timeRows(group) {
  const { measured } = group;
  const clock = measured
    ? [
        said("measured.median_us", formatTime(measured.median_us)),
        quiet(" quartiles "),
        said("measured.low_us", formatTime(measured.low_us)),
        " to ",
        said("measured.high_us", formatTime(measured.high_us)),
        quiet(", "),
        said("measured.samples", plural(measured.samples, "sample")),
      ]
    : group.measured_us === null || group.measured_us === undefined
      ? [quiet("not measured")]
      : [said("measured_us", formatTime(group.measured_us))];
  return [
    rows([
      ["predicted", said("predicted_us", formatTime(group.predicted_us))],
      ["predicted apart", said("unfused_predicted_us", formatTime(group.unfused_predicted_us))],
      ["measured", ...clock],
      ["share of the limit", said("roofline_share", formatShare(group.roofline_share))],
    ]),
    termBars(group),
  ].filter(Boolean);
}

/** The predicted time by resource, the largest first. */
function termBars(group) {
  const terms = Object.entries(group.terms ?? {}).sort((a, b) => b[1] - a[1]);
  const most = Math.max(...terms.map(([, us]) => us), 0);
  if (!most) return null;
  const bars = terms.map(([name, us]) => [
    el("dt", {}, name),
    el(
      "dd",
      {},
      el("i", { style: `width: ${(us / most) * 100}%` }),
      said(`terms.${name}`, formatTime(us)),
    ),
  ]);
  return el("dl", { class: "bars", "aria-label": "Predicted time by resource" }, bars);
}

function trafficRows(group) {
  const ratio = group.bytes_unfused / group.bytes_fused;
  const intensity = group.flops / group.bytes_fused;
  const assumed = Object.entries(group.assumed_l2 ?? {});
  const list = assumed.map(([name, bytes]) => `${name} ${formatBytes(bytes)}`).join(", ");
  return [
    rows([
      ["traffic", said("bytes_fused", formatBytes(group.bytes_fused))],
      [
        "traffic apart",
        said("bytes_unfused", formatBytes(group.bytes_unfused)),
        ratio > 0 && Number.isFinite(ratio) ? quiet(` ${formatRatio(ratio)}`) : null,
      ],
      Number.isFinite(group.flops)
        ? [
            "arithmetic",
            said("flops", formatFlops(group.flops)),
            Number.isFinite(intensity) ? quiet(` ${formatPlain(intensity)} FLOP/B`) : null,
          ]
        : null,
      assumed.length ? ["from the L2", said("assumed_l2", list)] : null,
    ]),
  ];
}

function codeRows(group) {
  const known = (field, text) =>
    Number.isFinite(group[field]) ? said(field, text(group[field])) : null;
  const found = [
    ["registers a thread", known("registers", formatCount)],
    ["spilled a thread", known("spill_bytes", formatBytes)],
    ["code", known("code_bytes", formatBytes)],
    ["error", known("error", formatNumber)],
  ].filter(([, value]) => value);
  return found.length ? [rows(found)] : null;
}

const EVIDENCE = {
  model: "by the model, at most",
  prediction: "predicted, about",
  measured: "timed, about",
};

function reasonRows(group) {
  const { evidence, tuned } = group;
  const lines = [];
  if (evidence) {
    const share = evidence.kind === "model" ? evidence.high : evidence.ratio;
    lines.push([
      "evidence",
      said("evidence.verdict", evidence.verdict ?? ""),
      quiet(`: ${EVIDENCE[evidence.kind] ?? evidence.kind} `),
      said("evidence.share", significant(share)),
      quiet(" of the time one by one, "),
      said("evidence.low", significant(evidence.low)),
      quiet(" to "),
      said("evidence.high", significant(evidence.high)),
    ]);
    if (Number.isFinite(evidence.together_us)) {
      lines.push([
        "timed",
        said("evidence.together_us", formatTime(evidence.together_us)),
        quiet(" together, "),
        said("evidence.apart_us", formatTime(evidence.apart_us)),
        quiet(` apart, ${plural(evidence.samples ?? 0, "pair")} of samples`),
      ]);
    }
  }
  if (tuned) lines.push(["tuned", said("tuned", tunedText(tuned))]);
  return lines.length ? [rows(lines)] : null;
}

function tunedText(tuned) {
  if (tuned.stale) return `the choice is stale: ${tuned.stale}`;
  if (tuned.choice === "default")
    return `the untuned kernel is the fastest, ${formatTime(tuned.us)}`;
  if (tuned.instead_of) {
    const spilled = `${tuned.instead_of_spill_bytes} bytes a thread spilled`;
    const times = `${formatTime(tuned.predicted_us)} for ${formatTime(tuned.instead_of_us)}`;
    return `${tuned.choice}: predicted ${times} (${spilled})`;
  }
  return `${tuned.choice}: ${formatTime(tuned.us)}, untuned ${formatTime(tuned.untuned_us)}`;
}

/** A fusion that was not done: what it costs, why, on what numbers, and what would turn it. */
function refusalCard(refusal) {
  const numbers = Object.entries(refusal.numbers ?? {});
  const list = numbers.map(([name, value]) => `${name} = ${formatNumber(value)}`).join(", ");
  return el(
    "article",
    { class: "refusal" },
    el(
      "header",
      {},
      el("b", {}, said("refusal.code", refusal.code)),
      refusal.kernel_class
        ? quiet(["of ", said("refusal.kernel_class", refusal.kernel_class)])
        : null,
      refusal.cost_us
        ? el(
            "span",
            { class: "cost" },
            "costs ",
            said("refusal.cost_us", formatTime(refusal.cost_us)),
          )
        : null,
    ),
    el("p", { class: "where" }, said("refusal.where", (refusal.where ?? []).join(", "))),
    el("p", {}, said("refusal.why", refusal.why)),
    list ? el("p", { class: "quiet" }, said("refusal.numbers", list)) : null,
    refusal.flip ? el("p", { class: "flip" }, said("refusal.flip", refusal.flip)) : null,
  );
}

function sourceText(title, field, text) {
  if (!text) return null;
  const lines = text.split("\n").length;
  const code = el("pre", { tabindex: 0, "data-field": field });
  const details = el(
    "details",
    {},
    el("summary", {}, title, quiet(` ${plural(lines, "line")}`)),
    code,
  );
  details.addEventListener("toggle", () => {
    if (details.open && !code.textContent) code.textContent = text;
  });
  return details;
}
