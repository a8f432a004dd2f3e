/* Elements, numbers and measures of text: what all parts of the page are made of.
   Text enters the page as text nodes and attributes only, never as markup. */

const SVG = "http://www.w3.org/2000/svg";

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

const el = (tag, attributes, ...children) =>
  filled(document.createElement(tag), attributes, children);

const svg = (tag, attributes, ...children) =>
  filled(document.createElementNS(SVG, tag), attributes, children);

/* ---- Numbers: as the report in the terminal writes them. */

const NONE = "–";

function significant(value, digits = 3) {
  const rounded = Number(value.toPrecision(digits));
  const size = Math.abs(rounded);
  if (size !== 0 && (size < 1e-4 || size >= 10 ** digits)) {
    const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
    const power = `${exponent[0]}${exponent.slice(1).padStart(2, "0")}`;
    return `${Number(mantissa)}e${power}`;
  }
  return String(rounded);
}

function scaled(value, units) {
  if (!Number.isFinite(value)) return NONE;
  let left = value;
  for (const unit of units.slice(0, -1)) {
    if (Math.abs(left) < 999.5) return `${significant(left)} ${unit}`;
    left /= 1000;
  }
  const last = units.at(-1);
  return Math.abs(left) < 1000 ? `${significant(left)} ${last}` : `${left.toFixed(0)} ${last}`;
}

const formatBytes = (count) => scaled(count, ["B", "kB", "MB", "GB", "TB"]);
const formatTime = (us) => scaled(us, ["us", "ms", "s"]);
const formatFlops = (flops) => scaled(flops, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"]);
const formatRate = (rate) => scaled(rate, ["FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s"]);
const formatCount = (value) =>
  Number.isFinite(value) ? Math.round(value).toLocaleString("en-US") : NONE;
const formatShare = (share) => (Number.isFinite(share) ? `${(share * 100).toFixed(0)}%` : NONE);
const formatRatio = (ratio) => (Number.isFinite(ratio) ? `${ratio.toFixed(2)}x` : NONE);

function formatNumber(value) {
  if (typeof value !== "number") return value === null ? NONE : shown(value);
  return Number.isInteger(value) ? String(value) : significant(value);
}

/** Any JSON value in one line. */
function shown(value) {
  if (value === null || value === undefined) return NONE;
  if (Array.isArray(value)) return value.map(shown).join(", ");
  if (typeof value !== "object") return String(value);
  return Object.entries(value)
    .map(([key, item]) => `${key} ${formatNumber(item)}`)
    .join(", ");
}

/** Numbers without a unit, for people: 0.125, 12.5, 1,250. */
const formatPlain = (value) => (Math.abs(value) >= 100 ? formatCount(value) : significant(value));

const plural = (count, one, many = `${one}s`) =>
  `${formatCount(count)} ${count === 1 ? one : many}`;
const sum = (values) => values.reduce((total, value) => total + value, 0);

/* ---- Measures of text, for boxes that are drawn around it. */

const FAMILY = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif';
const FONTS = {
  title: `600 13px ${FAMILY}`,
  small: `11px ${FAMILY}`,
};
const pen = document.createElement("canvas").getContext("2d");

function widthOf(text, font) {
  pen.font = FONTS[font];
  return pen.measureText(text).width;
}

/** The text, or as much of it as the width allows: of a name its beginning and end. */
function fitted(text, font, width) {
  if (widthOf(text, font) <= width) return text;
  let [low, high] = [1, text.length];
  const cut = (kept) => {
    const head = text.includes(": ") ? kept : Math.ceil(kept * 0.6);
    return `${text.slice(0, head)}…${text.slice(text.length - (kept - head))}`;
  };
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (widthOf(cut(middle), font) <= width) low = middle;
    else high = middle - 1;
  }
  return cut(low);
}
