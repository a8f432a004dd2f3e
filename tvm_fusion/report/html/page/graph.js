/* The graph before and after fusion, in parts; each is laid out when it comes near the screen. */

const VIEWS = { both: "Both", before: "Before fusion", after: "After fusion" };

class GraphView {
  /** `open(index)` shows a group's panel. */
  constructor(model, open) {
    this.model = model;
    this.open = open;
    this.opened = new Set();
    this.selected = null;
    this.seen = new IntersectionObserver(
      (entries) =>
        entries
          .filter((e) => e.isIntersecting)
          .forEach((e) => this.render(this.parts[e.target.dataset.part])),
      { rootMargin: "400px" },
    );
    this.body = el("div", { class: "parts" });
    this.choice = matchMedia("(min-width: 1000px)").matches && model.hasGraph ? "both" : "after";
    this.element = el(
      "section",
      { id: "graph", "aria-labelledby": "graph-title" },
      this.head(),
      this.body,
    );
    this.element.addEventListener("keydown", (event) => this.arrow(event));
    for (const kind of ["focusin", "pointerover"]) {
      this.element.addEventListener(kind, (event) => this.trace(event.target.closest(".node")));
    }
    this.fill();
  }

  head() {
    const choices = Object.entries(VIEWS).map(([value, text]) => [
      el("input", {
        type: "radio",
        name: "view",
        id: `view-${value}`,
        checked: value === this.choice,
        onchange: () => this.choose(value),
      }),
      el("label", { for: `view-${value}` }, text),
    ]);
    return el(
      "header",
      { class: "section-head" },
      el("h2", { id: "graph-title" }, "Graph"),
      this.model.hasGraph
        ? el(
            "fieldset",
            { class: "choices" },
            el("legend", { class: "hidden" }, "What is drawn"),
            choices,
          )
        : null,
      el("div", { class: "legend" }, this.legend()),
    );
  }

  legend() {
    const families = this.model.families.map((family) =>
      el(
        "span",
        { class: "key", style: `--colour: ${colourOf(this.model, family)}` },
        el("i"),
        family,
      ),
    );
    const edges = [
      el("span", { class: "key line" }, el("i"), "bytes through memory"),
      this.model.hasGraph
        ? el("span", { class: "key line kept" }, el("i"), "kept inside a kernel")
        : null,
    ];
    return [...families, ...edges];
  }

  choose(view) {
    this.choice = view;
    this.fill();
  }

  toggle(repeat) {
    if (!this.opened.delete(repeat.first)) this.opened.add(repeat.first);
    this.fill();
    const title = this.body.querySelector(`[data-repeat="${repeat.first}"] button`);
    title?.focus();
  }

  fill() {
    this.seen.disconnect();
    Object.assign(this, partsOf(this.model, this.opened));
    this.sections = this.parts.map((part) => this.section(part));
    this.element.dataset.show = this.choice;
    this.body.replaceChildren(...this.sections);
    this.render(this.parts[0]);
    this.sections.forEach((section) => this.seen.observe(section));
  }

  section(part) {
    const { model } = this;
    const ops = this.choice === "after" ? 0 : part.ops.length * 62;
    const section = el(
      "section",
      {
        class: part.repeat ? "part repeat" : "part",
        "data-repeat": part.repeat?.first,
        style: `min-height: ${Math.min(6000, Math.max(ops, part.groups.length * 120))}px`,
      },
      this.title(part),
      el("div", { class: "canvases" }),
    );
    section.dataset.part = part.index;
    section.setAttribute("aria-label", partTitle(model, part, this.opened.has(part.repeat?.first)));
    return section;
  }

  title(part) {
    const open = this.opened.has(part.repeat?.first);
    const groups = part.groups.map((index) => this.model.groups[index]);
    const copies = part.repeat && !open ? part.repeat.count : 1;
    const time = sum(groups.map((group) => timeOf(group) ?? 0)) * copies;
    const clock = groups.every(isMeasured) ? "measured" : "predicted";
    const words = [plural(groups.length, "kernel"), `${formatTime(time)} ${clock}`];
    if (copies > 1) words.push("all together");
    const act = open ? `Collapse ${part.repeat?.count}` : `Show all ${part.repeat?.count}`;
    return el(
      "header",
      { class: "part-head" },
      el("h3", {}, partTitle(this.model, part, open)),
      copies > 1 ? el("span", { class: "times" }, `x${copies}`) : null,
      el("span", { class: "quiet" }, words.join(" · ")),
      part.repeat && !part.continued && (!open || part.copy === 0)
        ? el(
            "button",
            {
              type: "button",
              "aria-expanded": String(open),
              onclick: () => this.toggle(part.repeat),
            },
            act,
          )
        : null,
    );
  }

  render(part) {
    const section = part && this.sections[part.index];
    if (!section || section.drawn) return;
    section.drawn = true;
    this.seen.unobserve(section);
    section.style.minHeight = "";
    const views = this.choice === "both" ? ["before", "after"] : [this.choice];
    section.lastChild.replaceChildren(...views.map((view) => this.canvas(part, view)));
    for (const frame of section.querySelectorAll(".frame")) fitFrame(frame);
    this.select(this.selected);
  }

  canvas(part, view) {
    const words = VIEWS[view];
    const drawn = drawGraph(contents(this.model, part, view === "before"), {
      gap: view === "before" ? 17 : 25,
      label: `${words}: ${partTitle(this.model, part, true)}. Arrows follow the edges.`,
      onopen: (index) => this.open(index),
      onport: (index) => this.goTo(`g${index}`),
    });
    return el(
      "div",
      { class: `canvas ${view}` },
      el("h4", {}, words),
      el("div", { class: "frame" }, drawn),
    );
  }

  /** Focus a box, its part drawn if it is not yet; a collapsed copy's box is that of the first. */
  goTo(key) {
    const group = this.groupOf(key);
    if (group === undefined) return;
    const part = this.parts[this.place.get(this.shownGroup(group))];
    this.render(part);
    this.render(this.parts[part.index + 1]);
    const section = this.sections[part.index];
    const wanted = key.startsWith("o") ? key : `g${this.shownGroup(group)}`;
    const box =
      section.querySelector(`[data-key="${wanted}"]`) ??
      section.querySelector(`.node[data-group="${this.shownGroup(group)}"]:not(.port)`);
    box?.focus({ preventScroll: true });
    box?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  groupOf(key) {
    const index = Number(key.slice(1));
    return key.startsWith("o") ? this.model.ops[index].home : index;
  }

  shownGroup(index) {
    return this.place.has(index) ? index : representative(this.model, index).index;
  }

  arrow(event) {
    const key = event.target.closest?.(".node:not(.port)")?.dataset.key;
    const turns = { ArrowDown: "to", ArrowUp: "from", ArrowLeft: -1, ArrowRight: 1 };
    const turn = turns[event.key];
    if (!key || turn === undefined) return;
    event.preventDefault();
    const next = typeof turn === "number" ? this.beside(key, turn) : this.along(key, turn);
    if (next !== undefined) this.goTo(next);
  }

  /** The box at the other end of the first edge that leaves a box (`to`) or enters it (`from`). */
  along(key, end) {
    const edges = key.startsWith("o") ? this.model.opEdges : this.model.groupEdges;
    const start = end === "to" ? "from" : "to";
    const found = edges.find(
      (edge) => nodeKey(edge[start]) === key && edge[end].tensor === undefined,
    );
    return found && nodeKey(found[end]);
  }

  /** The box before or behind in the order in which they run. */
  beside(key, step) {
    const index = Number(key.slice(1));
    if (key.startsWith("o")) return this.model.ops[index + step] && `o${index + step}`;
    const drawn = [...this.place.keys()];
    const next = drawn[drawn.indexOf(index) + step];
    return next === undefined ? undefined : `g${next}`;
  }

  /** Mark the edges of a box, and have the parts around it drawn, for the tab key to go on. */
  trace(node) {
    if (node === this.traced) return;
    this.traced = node;
    this.element.querySelectorAll(".near").forEach((edge) => edge.classList.remove("near"));
    if (!node) return;
    const graph = node.closest("svg");
    graph
      .querySelectorAll(`[data-edge~="${node.dataset.key}"]`)
      .forEach((edge) => edge.classList.add("near"));
    const part = Number(node.closest(".part").dataset.part);
    this.render(this.parts[part + 1]);
    this.render(this.parts[part - 1]);
  }

  select(index) {
    this.selected = index;
    this.element.querySelectorAll(".selected").forEach((node) => node.classList.remove("selected"));
    if (index === null) return;
    const shown = this.shownGroup(index);
    const nodes = this.element.querySelectorAll(`.node[data-group="${shown}"]:not(.port)`);
    nodes.forEach((node) => node.classList.add("selected"));
  }

  fit() {
    this.element.querySelectorAll(".frame").forEach(fitFrame);
  }
}

/** Shrink a drawing to its frame as long as it stays legible; what is wider can be scrolled. */
function fitFrame(frame) {
  const drawing = frame.firstChild;
  const [width, height] = drawing.getAttribute("viewBox").split(" ").slice(2).map(Number);
  const scale = Math.min(1, Math.max(0.8, frame.clientWidth / width));
  drawing.setAttribute("width", width * scale);
  drawing.setAttribute("height", height * scale);
  frame.scrollLeft = (width * scale - frame.clientWidth) / 2;
  frame.parentNode.classList.toggle("short", height * scale < innerHeight * 0.8);
}
