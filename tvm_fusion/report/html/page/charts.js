/* Four figures: roofline, predicted against measured, bytes saved by kernel, memory over time. */

const MARGIN = { top: 14, right: 16, bottom: 38, left: 62 };
const MOST_BARS = 12;

/** A scale from values to pixels; `at(value)`, and ticks with their texts. */
function logScale([low, high], [from, to]) {
  const [a, b] = [Math.log10(low), Math.log10(high)];
  const at = (value) => from + ((Math.log10(value) - a) / (b - a)) * (to - from);
  const steps = b - a > 3 ? [1] : [1, 2, 5];
  const every = Math.max(1, Math.ceil((b - a) / (Math.abs(to - from) / 52)));
  const ticks = [];
  for (let power = Math.floor(a); power <= Math.ceil(b); power += 1) {
    if (steps.length === 1 && power % every) continue;
    for (const step of steps) {
      const value = step * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) ticks.push(value);
    }
  }
  return { at, ticks: spaced(ticks, at, 34) };
}

function linearScale([low, high], [from, to]) {
  const span = high - low || 1;
  const at = (value) => from + ((value - low) / span) * (to - from);
  const raw = span / 5;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5].find((factor) => factor * power >= raw) ?? 10);
  const count = Math.floor(high / step) - Math.ceil(low / step) + 1;
  const ticks = Array.from({ length: count }, (_, k) => (Math.ceil(low / step) + k) * step);
  return { at, ticks };
}

/** Ticks without those that stand too near the one before. */
function spaced(ticks, at, gap) {
  const kept = [];
  for (const tick of ticks) {
    if (!kept.length || Math.abs(at(tick) - at(kept.at(-1))) >= gap) kept.push(tick);
  }
  return kept;
}

function frame(size, x, y, names, forms) {
  const { width, height } = size;
  const [bottom, right] = [height - MARGIN.bottom, width - MARGIN.right];
  const lines = [
    ...x.ticks.map((tick) => [
      svg("line", { class: "grid", x1: x.at(tick), x2: x.at(tick), y1: MARGIN.top, y2: bottom }),
      svg(
        "text",
        { class: "tick", x: x.at(tick), y: bottom + 15, "text-anchor": "middle" },
        forms[0](tick),
      ),
    ]),
    ...y.ticks.map((tick) => [
      svg("line", { class: "grid", x1: MARGIN.left, x2: right, y1: y.at(tick), y2: y.at(tick) }),
      svg(
        "text",
        { class: "tick", x: MARGIN.left - 6, y: y.at(tick) + 4, "text-anchor": "end" },
        forms[1](tick),
      ),
    ]),
  ];
  return [
    lines,
    svg(
      "text",
      { class: "axis", x: (MARGIN.left + right) / 2, y: height - 6, "text-anchor": "middle" },
      names[0],
    ),
    svg(
      "text",
      {
        class: "axis",
        x: 0,
        y: 0,
        "text-anchor": "middle",
        transform: `translate(11 ${(MARGIN.top + bottom) / 2}) rotate(-90)`,
      },
      names[1],
    ),
  ];
}

const drawing = (size, label, ...children) =>
  svg(
    "svg",
    { class: "chart", width: size.width, height: size.height, role: "group", "aria-label": label },
    children,
  );

/** The range of values, a little wider; whole decades are not forced on a narrow one. */
function around(values, factor = 1.6) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return [low / factor, high * factor];
}

/** A kernel in a figure: a click opens it; the keyboard has the graph and the table. */
function point(model, group, at, radius, open, text, extra) {
  return svg(
    "circle",
    {
      class: isMeasured(group) ? "point" : "point hollow",
      cx: at[0],
      cy: at[1],
      r: radius,
      style: `--colour: ${colourOf(model, group.kernel_class)}`,
      "data-group": group.index,
      onclick: () => open(group.index),
      ...extra,
    },
    svg("title", {}, `${group.title}\n${text}`),
  );
}

/* ---- Roofline */

function roofline(model, size, open) {
  const { device } = model.report;
  const shown = model.groups.filter((g) => g.flops > 0 && g.bytes_fused > 0 && timeOf(g) > 0);
  if (!device?.memory_bytes_per_s || !shown.length) return null;
  const rates = Object.entries(device.flops_per_s ?? {}).filter(([, rate]) => rate > 0);
  rates.sort((a, b) => b[1] - a[1]);
  const intensity = (group) => group.flops / group.bytes_fused;
  const speed = (group) => group.flops / (timeOf(group) * 1e-6);
  const ridge = (rates[0]?.[1] ?? 1) / device.memory_bytes_per_s;
  const xs = around([...shown.map(intensity), ridge], 2.2);
  const ys = around([...shown.map(speed), ...rates.map(([, rate]) => rate)], 2.2);
  const x = logScale(xs, [MARGIN.left, size.width - MARGIN.right]);
  const y = logScale(ys, [size.height - MARGIN.bottom, MARGIN.top]);
  const peak = rates[0]?.[1] ?? ys[1];
  const slopes = [
    ["memory", device.memory_bytes_per_s, "limit"],
    ["L2", device.l2_bytes_per_s, "limit l2"],
  ].filter(([, rate]) => rate > 0);
  const total = sum(model.groups.map((group) => timeOf(group) ?? 0));
  const points = shown
    .toSorted((a, b) => timeOf(b) - timeOf(a))
    .map((group) => {
      const radius = 3.5 + 9 * Math.sqrt(timeOf(group) / total);
      const text = [
        `${formatPlain(intensity(group))} FLOP/B`,
        formatRate(speed(group)),
        formatTime(timeOf(group)),
      ].join(", ");
      return point(model, group, [x.at(intensity(group)), y.at(speed(group))], radius, open, text);
    });
  return drawing(
    size,
    "Roofline: arithmetic per second over arithmetic per byte",
    frame(
      size,
      x,
      y,
      ["FLOP per byte of memory traffic", "FLOP/s"],
      [formatNumber, (v) => formatRate(v).replace("FLOP/s", "")],
    ),
    slopes.map((slope) => slopedLimit(slope, xs, ys, peak, x, y)),
    flatLimits(rates, device.memory_bytes_per_s, xs, x, y),
    points,
    flatNames(rates, y, size),
  );
}

function slopedLimit([name, rate, style], xs, ys, peak, x, y) {
  const start = Math.max(xs[0], ys[0] / rate);
  const end = Math.min(xs[1], peak / rate);
  if (end <= start) return null;
  const [x1, y1, x2, y2] = [x.at(start), y.at(start * rate), x.at(end), y.at(end * rate)];
  const angle = (Math.atan2(y2 - y1, x2 - x1) * 180) / Math.PI;
  const long = Math.hypot(x2 - x1, y2 - y1);
  const text = `${name} ${scaled(rate, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"])}`;
  const label = widthOf(text, "small") + 20 < long;
  return [
    svg("line", { class: style, x1, y1, x2, y2 }),
    label
      ? svg(
          "text",
          {
            class: "note",
            transform: `translate(${x1} ${y1}) rotate(${angle})`,
            x: 10,
            y: name === "memory" ? 13 : -5,
          },
          text,
        )
      : null,
  ];
}

function flatLimits(rates, memory, xs, x, y) {
  return rates.map(([, rate]) => {
    const ends = { x1: x.at(Math.max(xs[0], rate / memory)), x2: x.at(xs[1]) };
    return svg("line", { class: "limit", ...ends, y1: y.at(rate), y2: y.at(rate) });
  });
}

/** What the limits are, above them; one that stands too near the one above is not named. */
function flatNames(rates, y, size) {
  const named = spaced(rates, ([, rate]) => y.at(rate), 13);
  return named.map(([name, rate]) => {
    const place = { x: size.width - MARGIN.right - 2, y: y.at(rate) - 4, "text-anchor": "end" };
    return svg("text", { class: "note", ...place }, `${name} ${formatRate(rate)}`);
  });
}

/* ---- Predicted against measured */

function predictedMeasured(model, size, open) {
  const shown = model.groups.filter((group) => isMeasured(group) && group.predicted_us > 0);
  if (!shown.length) return null;
  const range = around(shown.flatMap((group) => [group.predicted_us, timeOf(group)]));
  const x = logScale(range, [MARGIN.left, size.width - MARGIN.right]);
  const y = logScale(range, [size.height - MARGIN.bottom, MARGIN.top]);
  const line = (factor, style) => {
    const [from, to] = factor > 1 ? [range[0], range[1] / factor] : [range[0] / factor, range[1]];
    return svg("line", {
      class: style,
      x1: x.at(from),
      y1: y.at(from * factor),
      x2: x.at(to),
      y2: y.at(to * factor),
    });
  };
  const points = shown.map((group) => {
    const { low_us: low, high_us: high } = group.measured ?? {};
    const at = [x.at(group.predicted_us), y.at(timeOf(group))];
    const times = [formatTime(group.predicted_us), formatTime(timeOf(group))];
    const text = `predicted ${times[0]}, measured ${times[1]}`;
    return [
      low > 0 && high > low
        ? svg("line", {
            class: "whisker",
            x1: at[0],
            x2: at[0],
            y1: y.at(Math.max(low, range[0])),
            y2: y.at(Math.min(high, range[1])),
          })
        : null,
      point(model, group, at, 4.5, open, text),
    ];
  });
  return drawing(
    size,
    "Predicted against measured time of each kernel",
    frame(size, x, y, ["predicted", "measured"], [formatTime, formatTime]),
    line(1, "limit"),
    line(1.25, "limit l2"),
    line(0.8, "limit l2"),
    points,
  );
}

/* ---- Bytes saved, as a waterfall from what operators one by one move to what kernels do */

function savings(model) {
  const rows = equalGroups(model).map((groups) => ({
    text: sharedTitle(groups),
    group: groups[0],
    count: groups.length,
    bytes: sum(groups.map((group) => group.bytes_unfused - group.bytes_fused)),
  }));
  return rows.filter((row) => row.bytes !== 0).sort((a, b) => b.bytes - a.bytes);
}

function waterfall(model, size, open) {
  const { fused, unfused } = model.report.bytes ?? {};
  if (!Number.isFinite(fused) || !Number.isFinite(unfused)) return null;
  const all = savings(model);
  const steps = all.length > MOST_BARS ? all.slice(0, MOST_BARS - 1) : [...all];
  const others = all.slice(steps.length);
  if (others.length) {
    const bytes = sum(others.map((row) => row.bytes));
    steps.push({ text: `${others.length} other kinds of kernels`, bytes });
  }
  const rest = unfused - fused - sum(steps.map((step) => step.bytes));
  if (Math.abs(rest) >= 1) steps.push({ text: "rewritten away", bytes: rest });
  const [left, row] = [Math.min(210, size.width * 0.42), 24];
  const most = Math.max(unfused, fused);
  const x = linearScale([0, most], [left, size.width - 66]);
  let level = unfused;
  const lines = steps.map((step, k) => {
    const bar = { from: level - step.bytes, to: level, ...step };
    level -= step.bytes;
    return waterfallRow(model, bar, k + 1, row, x, left, open);
  });
  const total = (text, bytes, k, style) =>
    waterfallRow(model, { text, from: 0, to: bytes, style }, k, row, x, left, open);
  return drawing(
    { ...size, height: (steps.length + 2) * row + 6 },
    `Memory traffic: ${formatBytes(unfused)} one by one, ${formatBytes(fused)} fused`,
    total("operators one by one", unfused, 0, "unfused"),
    lines,
    total("fused", fused, steps.length + 1, "fused"),
  );
}

function waterfallRow(model, bar, k, row, x, left, open) {
  const { group, from, to } = bar;
  const [start, end] = [x.at(Math.min(from, to)), x.at(Math.max(from, to))];
  const saved = group || !bar.style;
  const value = saved
    ? `${to >= from ? "−" : "+"}${formatBytes(Math.abs(to - from))}`
    : formatBytes(to);
  const times = bar.count > 1 ? ` x${bar.count}` : "";
  const text = fitted(bar.text, "small", left - 14 - widthOf(times, "small")) + times;
  return svg(
    "g",
    {
      class: group ? "row can" : "row",
      "data-group": group?.index,
      style: group && `--colour: ${colourOf(model, group.kernel_class)}`,
      transform: `translate(0 ${k * row})`,
      onclick: group ? () => open(group.index) : null,
    },
    svg("title", {}, `${bar.text}${times}: ${value}`),
    svg("text", { class: "small", x: left - 8, y: 16, "text-anchor": "end" }, text),
    svg("rect", {
      class: `bar ${bar.style ?? "saved"}`,
      x: start,
      y: 4,
      width: Math.max(1, end - start),
      height: row - 8,
      rx: 2,
    }),
    svg("text", { class: "small", x: end + 6, y: 16 }, value),
  );
}

/* ---- Memory over time */

function memoryOverTime(model, size) {
  const { fused, unfused } = model.report.timeline ?? {};
  if (!fused?.length || !unfused?.length) return null;
  const most = Math.max(...fused, ...unfused);
  const x = linearScale([0, 100], [MARGIN.left, size.width - MARGIN.right]);
  const y = linearScale([0, most * 1.12], [size.height - MARGIN.bottom, MARGIN.top]);
  const path = (values) => {
    const step = 100 / values.length;
    const level = (value, k) => `V${y.at(value).toFixed(1)}H${x.at((k + 1) * step).toFixed(1)}`;
    return `M${x.at(0)} ${y.at(values[0]).toFixed(1)}${values.map(level).join("")}`;
  };
  const area = `${path(fused)}V${y.at(0)}H${x.at(0)}Z`;
  return drawing(
    size,
    `Memory in use, at most ${peak(unfused)} one by one and ${peak(fused)} fused`,
    frame(size, x, y, ["launches of a call, in percent", "bytes live"], [String, formatBytes]),
    svg("path", { class: "area", d: area }),
    svg("path", { class: "line unfused", d: path(unfused) }),
    svg("path", { class: "line fused", d: path(fused) }),
  );
}

/* ---- All of them */

const peak = (values) => formatBytes(Math.max(...values));

const FIGURES = [
  {
    title: "Roofline",
    draw: roofline,
    words: (model) => {
      const still = model.groups.filter((group) => group.flops === 0).length;
      const hollow = model.groups.some(isMeasured)
        ? "; hollow: predicted, not measured"
        : ", as predicted";
      const without = still ? ` ${plural(still, "kernel")} without arithmetic: not shown.` : "";
      return `Size: share of the time${hollow}.${without}`;
    },
    none: "No figure: the device's rates or the kernels' arithmetic are not known.",
  },
  {
    title: "Predicted and measured",
    draw: predictedMeasured,
    words: () => "Medians, the bars are quartiles; dashed: 25% more and 20% less than predicted.",
    none: "No kernel was timed by itself: bench does that, where there is the device.",
  },
  {
    title: "Bytes saved",
    draw: waterfall,
    words: (model) =>
      `Of ${formatBytes(model.report.bytes.unfused)} that operators one by one move, by kernel.`,
    none: "No figure: memory traffic was not counted.",
  },
  {
    title: "Memory over time",
    draw: memoryOverTime,
    words: ({ report: { timeline } }) =>
      `Intermediates and results in memory at each launch. Grey: one by one, at most ` +
      `${peak(timeline.unfused)}; filled: fused, at most ${peak(timeline.fused)}.`,
    none: "No figure: sizes are symbolic, or memory was not planned.",
  },
];

function figures(model, open) {
  const parts = FIGURES.map((figure) => {
    const holder = el("div", { class: "drawing" });
    const caption = el("figcaption", {});
    const node = el("figure", {}, el("h3", {}, figure.title), holder, caption);
    const draw = () => {
      const width = Math.max(260, holder.clientWidth);
      const drawn = figure.draw(
        model,
        { width, height: Math.min(340, Math.max(250, width * 0.62)) },
        open,
      );
      holder.replaceChildren(drawn ?? el("p", { class: "empty" }, figure.none));
      caption.textContent = drawn ? figure.words(model) : "";
    };
    return { node, draw };
  });
  return {
    element: el(
      "section",
      { id: "figures", "aria-labelledby": "figures-title" },
      el("h2", { id: "figures-title" }, "Figures"),
      el(
        "div",
        { class: "figures" },
        parts.map(({ node }) => node),
      ),
    ),
    draw: () => parts.forEach(({ draw }) => draw()),
  };
}
