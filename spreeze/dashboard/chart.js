// A line chart on a canvas, redrawn in less than a millisecond, where an SVG library takes tens. Drag to zoom (across,
// or a box), double-click to see all, hover to read values; nothing is drawn while out of sight.
const MARGIN = { left: 52, right: 10, top: 8, bottom: 34 };
const FONT_PX = 11;

const make = (parent, tag, cls, text) => {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  if (text !== undefined) node.textContent = text;
  parent.appendChild(node);
  if (/^sz-(group-)?title$/.test(cls)) {  // the page's title is the first level, a group's cards are the third
    node.setAttribute("role", "heading");
    node.setAttribute("aria-level", cls === "sz-title" && parent.closest(".sz-group") ? 3 : 2);
  }
  return node;
};

// Colours and font of the theme that a node is in. The first colour of lines is the theme's own: dark blue cannot be seen
// on a dark page.
function lookOf(host, first) {
  const style = getComputedStyle(host);
  const read = (name, other) => style.getPropertyValue(name).trim() || other;
  const primary = read("--st-primary-color", first);
  return { text: read("--st-text-color", "#333"), line: read("--st-border-color", "#ddd"), font: read("--st-font", "sans-serif"), paint: (colour) => (colour === first ? primary : colour) };
}

// About `count` tick positions, 1, 2 or 5 times a power of ten apart.
function ticksOf(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  if (!(raw > 0) || !Number.isFinite(raw)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => (first + i) * step);
}

// Short text of a number: four digits, thousands as k, M, G.
function shortText(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "-";
  const size = Math.abs(value);
  if (size >= 1e13 || (size > 0 && size < 1e-3)) return value.toExponential(1);
  for (const [limit, letter] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) if (size >= limit) return `${+(value / (letter === "k" ? 1e3 : limit)).toPrecision(4)}${letter}`;
  return String(+value.toPrecision(4));
}

// What `number` and `duration` of formatting.py give: an evaluation reads alike wherever it stands.
function numberText(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "-";
  const text = (x) => x.toFixed([[100, 0], [10, 1], [0.1, 2], [0, 4]].find(([least]) => Math.abs(x) >= least)[1]);
  for (const [limit, by, letter] of [[1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]]) if (Math.abs(value) >= limit) return `${text(value / by)} ${letter}`;
  return Number.isInteger(value) ? value.toLocaleString("en-US") : text(value);
}

function durationText(seconds) {
  const all = Math.max(0, Math.round(seconds)), hours = Math.floor(all / 3600), two = (count) => String(count).padStart(2, "0");
  const minutes = Math.floor(all / 60) % 60;
  if (hours >= 24) return `${Math.floor(hours / 24)} d ${two(hours % 24)}:${two(minutes)}`;
  return hours ? `${hours}:${two(minutes)}:${two(all % 60)}` : `${minutes}:${two(all % 60)}`;
}

// First index whose x is at least `value`; xs is ascending.
function indexAt(xs, value) {
  let low = 0, high = xs.length;
  while (low < high) { const middle = (low + high) >> 1; if (xs[middle] < value) low = middle + 1; else high = middle; }
  return low;
}

// The points that count, x ascending: a resumed run's counters go back to its checkpoint, and the later session holds.
function counting(trace) {
  const kept = [];
  let least = Infinity;
  for (let i = trace.x.length - 1; i >= 0; i--) if (trace.x[i] < least) { least = trace.x[i]; kept.push(i); }
  if (kept.length === trace.x.length) return trace;
  kept.reverse();
  const columns = ["x", "y", "low", "high"].filter((name) => trace[name]);
  return { ...trace, ...Object.fromEntries(columns.map((name) => [name, kept.map((i) => trace[name][i])])) };
}

// Exponential moving average with weight `keep` on the past, corrected for its start; gaps stay gaps.
function smoothed(ys, keep) {
  let sum = 0, weight = 0;
  return ys.map((y) => {
    if (y === null || !Number.isFinite(y)) return null;
    sum = keep * sum + (1 - keep) * y; weight = keep * weight + (1 - keep);
    return sum / weight;
  });
}

const OUTLIERS = 0.02;  // share of the values on each side that may lie outside of a robust range
const NEWEST = 3;  // values at a line's end that always lie inside
const NEAR_PX = 5;  // a mark so near to the pointer is told
const MARKS = { error: "#D55E00", warning: "#E69F00", best: "#009E73" };
const BOX_PX = 25;  // height of a drag from which it also zooms the vertical axis

// A horizontal axis that charts share: where they are read, and the range that they show.
class Axis {
  constructor() { this.at = null; this.zoom = null; this.charts = new Set(); }
  read(at) { if (at !== this.at) { this.at = at; this.touch(); } }
  touch() { for (const chart of this.charts) chart.touch(); }
}

class Chart {
  // div: where to draw. options: {height, bottom, xTitle, xText, yText: (value) as a tooltip has it, yRange, colours: () => {text, line, font, paint},
  // view: () => {smooth, log, robust}, marks: () => [{x, level, text}] of what happened, axis: shared with other charts,
  // onPick: (x) of a click, onRead: (rows, x) in place of a box with the values}.
  constructor(div, options) {
    this.div = div; this.options = options; this.traces = []; this.zoomY = null; this.visible = false;
    this.dirty = true; this.drag = null; this.draws = 0;
    this.follow(options.axis ?? new Axis());
    div.style.position = "relative"; div.style.height = `${options.height}px`;
    this.canvas = div.appendChild(document.createElement("canvas"));
    this.canvas.style.cssText = "position:absolute;left:0;top:0;width:100%;height:100%;touch-action:pan-y;cursor:crosshair";
    this.box = div.appendChild(document.createElement("div"));
    this.box.className = "sz-hover"; this.box.style.display = "none";
    this.sizes = new ResizeObserver(() => this.touch());
    this.sizes.observe(div);
    this.sights = new IntersectionObserver((entries) => { this.visible = entries.at(-1).isIntersecting; if (this.visible) this.schedule(); }, { rootMargin: "60px" });
    this.sights.observe(div);
    if (!options.onRead) {  // those of the episode player are read by its slider
      for (const [name, value] of [["role", "slider"], ["tabindex", 0], ["aria-valuenow", 0]]) div.setAttribute(name, value);
      div.onkeydown = (event) => this.keydown(event);
      div.onfocus = () => { this.focused = true; this.touch(); };
      div.onblur = () => { this.focused = false; this.axis.read(null); };
    }
    for (const name of ["pointerdown", "pointermove", "pointerup", "pointercancel", "pointerleave", "dblclick"]) this.canvas.addEventListener(name, (event) => this[name](event));
    div.__chart = this;
  }

  dispose() {
    this.dead = true;
    cancelAnimationFrame(this.frame);
    this.sizes.disconnect(); this.sights.disconnect();
    this.div.replaceChildren();
    this.axis.charts.delete(this);
    delete this.div.__chart;
  }

  // Shares an axis with the charts that are on it.
  follow(axis) { this.axis?.charts.delete(this); this.axis = axis; axis.charts.add(this); }

  get zoom() { return this.axis.zoom; }
  set zoom(range) { this.axis.zoom = range; this.axis.touch(); }

  // traces: [{name, colour, x, y, low?, high?, heat?, width?, dash?, dots?, faint?}]; null in y is a gap.
  show(traces) { this.traces = traces; this.touch(); }

  touch() { this.dirty = true; if (this.visible) this.schedule(); }

  schedule() {
    if (this.frame || this.dead || !this.dirty) return;
    this.frame = requestAnimationFrame(() => { this.frame = 0; if (!this.dead && this.visible && this.div.clientWidth > 0) this.draw(); });
  }

  get points() { return Math.max(0, ...this.traces.map((trace) => trace.x.length)); }

  // ---- ranges ---------------------------------------------------------------------------------
  xRange() {
    if (this.zoom) return this.zoom;
    let low = Infinity, high = -Infinity;
    for (const { x } of this.traces) if (x.length) { low = Math.min(low, x[0]); high = Math.max(high, x[x.length - 1]); }
    if (!(low <= high)) return [0, 1];
    return low === high ? [low - 0.5, high + 0.5] : [low, high];
  }

  yRange(from, to) {
    this.log = false;
    if (this.zoomY) return this.zoomY;
    const heat = this.traces.find((trace) => trace.heat)?.heat;
    if (heat) return [heat.low, heat.low + heat.step * heat.shares[0].length];
    const { log = false, robust = false } = this.options.view?.() ?? {};
    let low = Infinity, high = -Infinity, least = Infinity, most = -Infinity;  // the last two: values that no range leaves out
    const middle = [];
    const see = (value) => { if (value !== null && Number.isFinite(value)) { if (value < low) low = value; if (value > high) high = value; } };
    for (const { x, y, low: lows, high: highs, dash, whole } of this.traces) {
      const end = Math.min(x.length, indexAt(x, to) + 1);
      for (let i = Math.max(0, indexAt(x, from) - 1); i < end; i++) {
        see(y[i]); if ((whole || i >= x.length - NEWEST) && Number.isFinite(y[i])) { least = Math.min(least, y[i]); most = Math.max(most, y[i]); }
        if (lows) { see(lows[i]); see(highs[i]); }
        if (robust && !dash && y[i] !== null && Number.isFinite(y[i])) middle.push(y[i]);
      }
    }
    if (!(low <= high)) return this.options.yRange ?? [0, 1];
    if (log && low > 0) { this.log = true; return [Math.log10(low), Math.log10(high === low ? 10 * low : high)]; }
    if (middle.length >= 20) {  // a few values far out would flatten all others
      middle.sort((a, b) => a - b);
      const at = (share) => middle[Math.round(share * (middle.length - 1))], room = 0.5 * (at(1 - OUTLIERS) - at(OUTLIERS));
      if (room > 0) { low = Math.min(least, Math.max(low, at(OUTLIERS) - room)); high = Math.max(most, Math.min(high, at(1 - OUTLIERS) + room)); }
    }
    if (this.options.yRange) return [Math.min(low, this.options.yRange[0]), Math.max(high, this.options.yRange[1])];
    const pad = (high - low || Math.abs(high) || 1) * 0.06;
    return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
  }

  // ---- drawing --------------------------------------------------------------------------------
  draw() {
    this.dirty = false; this.draws += 1;
    const width = this.div.clientWidth, height = this.div.clientHeight, ratio = window.devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio); this.canvas.height = Math.round(height * ratio);
    }
    const pen = this.canvas.getContext("2d"), look = (this.look = this.options.colours());
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const [x0, x1] = this.xRange(), [y0, y1] = this.yRange(x0, x1);
    const left = MARGIN.left, right = width - MARGIN.right, top = MARGIN.top, bottom = height - (this.options.bottom ?? MARGIN.bottom);
    this.area = { left, right, top, bottom, x0, x1, y0, y1 };
    const atX = (x) => left + ((x - x0) / (x1 - x0)) * (right - left);
    const onAxis = this.log ? (y) => (y > 0 ? Math.log10(y) : -1e9) : (y) => y;
    const atY = (y) => bottom - ((onAxis(y) - y0) / (y1 - y0 || 1)) * (bottom - top);
    this.axes(pen, look, atX, atY);
    pen.save();
    pen.beginPath(); pen.rect(left, top - 2, right - left, bottom - top + 4); pen.clip();
    this.marks(pen, look, atX);
    for (const trace of this.traces) if (trace.heat) this.heat(pen, trace, atX, atY); else if (trace.low) this.band(pen, trace, atX, atY);
    const keep = this.options.view?.().smooth ?? 0;
    for (const trace of this.traces) {
      if (!keep || trace.dash || trace.x.length < 3) { this.line(pen, trace, atX, atY); continue; }
      this.line(pen, { ...trace, dots: false, width: 1, faint: 0.25 }, atX, atY);
      this.line(pen, { ...trace, dots: false, faint: false, y: smoothed(trace.y, keep) }, atX, atY);
    }
    pen.restore();
    if (this.drag?.moved) {
      const box = this.drag.tall, from = box ? Math.min(this.drag.y, this.drag.toY) : top, rise = box ? Math.abs(this.drag.toY - this.drag.y) : bottom - top;
      pen.fillStyle = "rgba(127,127,127,0.25)"; pen.fillRect(Math.min(this.drag.from, this.drag.to), from, Math.abs(this.drag.to - this.drag.from), rise);
    }
    this.hover(pen, look, atX, atY);
  }

  axes(pen, look, atX, atY) {
    const { left, right, top, bottom, x0, x1, y0, y1 } = this.area;
    pen.font = `${FONT_PX}px ${look.font}`; pen.fillStyle = look.text; pen.strokeStyle = look.line; pen.lineWidth = 1;
    pen.textBaseline = "middle"; pen.textAlign = "right";
    pen.beginPath();
    for (const tick of ticksOf(y0, y1, (bottom - top) / 42)) {
      const value = this.log ? 10 ** tick : tick, y = Math.round(atY(value)) + 0.5;
      pen.moveTo(left, y); pen.lineTo(right, y);
      pen.fillText(shortText(value), left - 6, y);
    }
    pen.textAlign = "center"; pen.textBaseline = "top";
    for (const value of ticksOf(x0, x1, (right - left) / 45)) {
      const x = Math.round(atX(value)) + 0.5;
      pen.moveTo(x, top); pen.lineTo(x, bottom);
      pen.fillText(shortText(value), Math.min(x, right - 10), bottom + 5);
    }
    pen.stroke();
    pen.globalAlpha = 0.72;
    pen.fillText(this.options.xTitle(), (left + right) / 2, bottom + 20);
    pen.globalAlpha = 1;
  }

  // What happened: a triangle at the axis, and a dotted line where it matters.
  marks(pen, look, atX) {
    const { top, bottom, x0, x1 } = this.area;
    pen.lineWidth = 1; pen.setLineDash([2, 3]);
    this.marked = (this.options.marks?.() ?? []).filter((mark) => mark.x >= x0 && mark.x <= x1);
    for (const { x: at, level } of this.marked) {
      const x = Math.round(atX(at)) + 0.5;
      pen.strokeStyle = pen.fillStyle = MARKS[level] ?? look.text;
      pen.globalAlpha = level === "info" ? 0.35 : 0.7; pen.beginPath();
      if (level !== "info") { pen.moveTo(x, top); pen.lineTo(x, bottom); pen.stroke(); }
      pen.beginPath(); pen.moveTo(x - 4, bottom + 1); pen.lineTo(x + 4, bottom + 1); pen.lineTo(x, bottom - 6); pen.fill();
    }
    pen.setLineDash([]); pen.globalAlpha = 1;
  }

  // A histogram at each x: the darker a cell, the more of the numbers are in it.
  heat(pen, { x, heat, colour }, atX, atY) {
    const { low, step, shares } = heat, most = Math.max(...shares.flat());
    pen.fillStyle = this.look.paint(colour);
    const ends = x.slice(1).map((end, i) => (x[i] + end) / 2), side = x.length > 1 ? (x.at(-1) - x.at(-2)) / 2 : 0.5;
    ends.unshift(x[0] - (x.length > 1 ? (x[1] - x[0]) / 2 : 0.5)); ends.push(x.at(-1) + side);
    shares.forEach((column, i) => column.forEach((share, k) => {
      if (!share) return;
      pen.globalAlpha = 0.1 + 0.6 * Math.sqrt(share / most);
      pen.fillRect(atX(ends[i]), atY(low + (k + 1) * step), atX(ends[i + 1]) - atX(ends[i]) + 0.5, atY(low) - atY(low + step));
    }));
    pen.globalAlpha = 1;
  }

  // Where the interval is unknown the band has no width.
  band(pen, { x, y, low, high, colour }, atX, atY) {
    pen.beginPath();
    for (let i = 0; i < x.length; i++) if (y[i] !== null) pen.lineTo(atX(x[i]), atY(high[i] ?? y[i]));
    for (let i = x.length - 1; i >= 0; i--) if (y[i] !== null) pen.lineTo(atX(x[i]), atY(low[i] ?? y[i]));
    pen.fillStyle = this.look.paint(colour); pen.globalAlpha = 0.22; pen.fill(); pen.globalAlpha = 1;
  }

  line(pen, { x, y, colour, width = 1.6, dash = [], dots = false, faint = false }, atX, atY) {
    pen.beginPath(); pen.strokeStyle = pen.fillStyle = this.look.paint(colour); pen.lineWidth = width; pen.lineJoin = "round"; pen.setLineDash(dash);
    pen.globalAlpha = faint === true ? 0.75 : faint || 1;
    let joined = false;
    for (let i = 0; i < x.length; i++) {
      if (y[i] === null) { joined = false; continue; }
      if (joined) pen.lineTo(atX(x[i]), atY(y[i])); else pen.moveTo(atX(x[i]), atY(y[i]));
      joined = true;
    }
    pen.stroke();
    pen.setLineDash([]);
    if (dots || x.length === 1) {
      pen.beginPath();
      for (let i = 0; i < x.length; i++) if (y[i] !== null) { pen.moveTo(atX(x[i]) + 2.2, atY(y[i])); pen.arc(atX(x[i]), atY(y[i]), 2.2, 0, 6.3); }
      pen.fill();
    }
    pen.globalAlpha = 1;
  }

  // ---- reading and zooming --------------------------------------------------------------------
  hover(pen, look, atX, atY) {
    const { left, right, top, bottom, x0, x1 } = this.area, wanted = this.axis.at;
    if (wanted === null || this.drag?.moved || wanted < x0 || wanted > x1) { this.box.style.display = "none"; this.options.onRead?.([]); return; }
    let nearest = null;
    const rows = [];
    for (const trace of this.traces) {
      if (!trace.x.length) continue;
      let i = Math.min(indexAt(trace.x, wanted), trace.x.length - 1);
      if (i > 0 && wanted - trace.x[i - 1] < trace.x[i] - wanted) i -= 1;
      rows.push([trace, i]);
      if (nearest === null || Math.abs(trace.x[i] - wanted) < Math.abs(nearest - wanted)) nearest = trace.x[i];
    }
    if (nearest === null) { this.box.style.display = "none"; return; }
    const x = Math.round(atX(nearest)) + 0.5;
    pen.strokeStyle = look.text; pen.globalAlpha = 0.5; pen.beginPath(); pen.moveTo(x, top); pen.lineTo(x, bottom); pen.stroke(); pen.globalAlpha = 1;
    const { xText = shortText, yText = shortText } = this.options, lines = [this.options.xText?.(nearest) ?? `${shortText(nearest)} ${this.options.xTitle()}`];
    this.options.onRead?.(rows);
    for (const [trace, i] of rows) {
      const between = trace.low && trace.low[i] !== null && trace.low[i] !== trace.high[i] ? ` (${yText(trace.low[i])} .. ${yText(trace.high[i])})` : "";
      const elsewhere = Math.abs(trace.x[i] - nearest) > 0.005 * (x1 - x0) ? `, at ${xText(trace.x[i])}` : "";
      lines.push(`${trace.name}: ${yText(trace.y[i])}${between}${elsewhere}`);
      if (trace.y[i] !== null) { pen.fillStyle = look.paint(trace.colour); pen.beginPath(); pen.arc(atX(trace.x[i]), atY(trace.y[i]), 3.2, 0, 6.3); pen.fill(); }
    }
    if (this.under || this.focused) for (const mark of this.marked ?? []) if (mark.text && Math.abs(atX(mark.x) - atX(wanted)) < NEAR_PX) lines.push(mark.text.replace(/(.{60}[^ ]*) /g, "$1\n   "));
    const text = lines.join("\n");
    if (this.options.onRead) return;
    if (this.focused) this.div.setAttribute("aria-valuetext", text.replaceAll("\n", ", "));
    if (this.box.textContent !== text) this.box.textContent = text;
    this.box.style.display = "";
    if (x > (left + right) / 2) { this.box.style.left = ""; this.box.style.right = `${this.div.clientWidth - x + 10}px`; } else { this.box.style.right = ""; this.box.style.left = `${x + 10}px`; }
  }

  // Arrows read point by point, Enter picks as a click does, + zooms in where is read, - or Escape shows all.
  keydown(event) {
    if (!this.area || event.ctrlKey || event.altKey || event.metaKey) return;
    const { x } = this.traces.reduce((most, trace) => (trace.x.length > most.x.length ? trace : most), { x: [] });
    const [low, high] = this.xRange(), last = indexAt(x, high), first = indexAt(x, low), end = x[last] === high ? last : last - 1;
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key] * (event.shiftKey ? 10 : 1), { at } = this.axis;
    if (by) {
      const now = at === null ? (by > 0 ? first - 1 : end + 1) : indexAt(x, at), next = Math.max(first, Math.min(end, now + by));
      this.div.setAttribute("aria-valuemax", x.length - 1); this.div.setAttribute("aria-valuenow", next);
      this.axis.read(x[next] ?? null);
    } else if (event.key === "Enter" && at !== null) this.options.onPick?.(at, this);
    else if (event.key === "+") this.zoom = [-0.25, 0.25].map((share) => (at ?? (low + high) / 2) + share * (high - low));
    else if (event.key === "-" || event.key === "Escape") this.dblclick();
    else return;
    event.preventDefault();
  }

  place(event) { const frame = this.canvas.getBoundingClientRect(); return event.clientX - frame.left; }
  height(event) { const frame = this.canvas.getBoundingClientRect(); return Math.min(this.area.bottom, Math.max(this.area.top, event.clientY - frame.top)); }
  inside(x) { return Math.min(this.area.right, Math.max(this.area.left, x)); }

  pointerdown(event) {
    if (event.button !== 0 || !this.area) return;
    const at = this.inside(this.place(event));
    const y = this.height(event);
    this.drag = { from: at, to: at, y, toY: y, moved: false, tall: false };
    this.canvas.setPointerCapture(event.pointerId);
  }

  back(x) { const { left, right, x0, x1 } = this.area; return x0 + ((x - left) / (right - left)) * (x1 - x0); }

  pointermove(event) {
    if (!this.area) return;
    const at = this.place(event);
    this.under = true;
    if (!this.options.onRead || this.drag) this.axis.read(at < this.area.left || at > this.area.right ? null : this.back(at));
    if (this.drag) {
      this.drag.to = this.inside(at); this.drag.toY = this.height(event);
      this.drag.moved ||= Math.abs(this.drag.to - this.drag.from) > 5;
      this.drag.tall = Math.abs(this.drag.toY - this.drag.y) > BOX_PX;
    }
    this.touch();
  }

  pointerup() {
    const { drag, area } = this;
    this.drag = null;
    if (drag && !drag.moved) this.options.onPick?.(this.back(drag.from), this);
    if (drag?.moved) {
      this.zoom = [this.back(Math.min(drag.from, drag.to)), this.back(Math.max(drag.from, drag.to))];
      const rise = (y) => area.y0 + ((area.bottom - y) / (area.bottom - area.top)) * (area.y1 - area.y0);
      if (drag.tall && !this.log) this.zoomY = [rise(Math.max(drag.y, drag.toY)), rise(Math.min(drag.y, drag.toY))];
    }
    this.touch();
  }

  pointercancel() { this.drag = null; this.touch(); }
  pointerleave() { this.under = false; if (!this.drag && !this.options.onRead) this.axis.read(null); }
  dblclick() { this.zoom = this.zoomY = null; this.touch(); }
}
