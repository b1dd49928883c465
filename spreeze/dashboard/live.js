// One component for the whole Live page: built once, then fed each second. Streamlit calls the default
// function again, without the earlier cleanup, when data or theme change: the instance on the root decides.
const NS = (window.__spreeze ??= { made: 0, disposed: 0, live: 0, updates: 0, errors: [], frames: 0, ms: 0 });
const MAX_POINTS = 1000;
const PICTURE_MS = 125;
let plotlyPromise = null;

function loadPlotly(url) {
  plotlyPromise ??= new Promise((done, fail) => {
    const script = document.createElement("script");
    script.src = url;
    script.onload = () => done(window.Plotly);
    script.onerror = () => { plotlyPromise = null; script.remove(); fail(new Error("plotly.js did not load")); };
    document.head.appendChild(script);
  });
  return plotlyPromise;
}

const make = (parent, tag, cls, text) => {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  if (text !== undefined) node.textContent = text;
  parent.appendChild(node);
  return node;
};

export default function ({ parentElement: root, data }) {
  if (root.__live) { root.__live.update(data); return root.__live.dispose; }
  const host = root.querySelector(".sz-live");
  const page = new LivePage(host, data);
  const dispose = () => { page.dispose(); delete root.__live; };
  root.__live = { update: (next) => page.recolour(next), dispose };
  page.start();
  return dispose;
}

class LivePage {
  constructor(host, data) {
    this.host = host; this.data = data; this.dead = false; this.timers = {};
    this.epoch = ""; this.since = 0; this.seen = 0; this.charts = new Map(); this.unit = { name: "s", by: 1 };
    this.abort = new AbortController();
    NS.made += 1; NS.live += 1;
    this.build();
  }

  // ---- building -------------------------------------------------------------------------------
  build() {
    this.host.replaceChildren();
    const tiles = make(this.host, "div", "sz-tiles");
    this.text = new Map();
    for (const tile of this.data.tiles) {
      const box = make(tiles, "div", "sz-tile");
      box.title = tile.help; box.tabIndex = 0;
      make(box, "div", "sz-label", tile.label);
      const line = make(box, "div", "sz-value");
      this.remember(tile.id, make(line, "span", "", "-"));
      if (tile.unit) make(line, "span", "sz-unit", tile.unit);
    }
    this.note = make(this.host, "div", "sz-note", "Connecting ...");
    this.pipeline(make(this.host, "div", "sz-pipe"));
    const top = make(this.host, "div", "sz-top");
    this.returnCard = this.card(top, { key: "return", title: "Return of greedy episodes", unit: "return", help: this.data.return_help });
    this.axisMenu(this.returnCard);
    const picture = make(top, "div", "sz-card sz-picture");
    make(picture, "div", "sz-title", "The agent now");
    this.image = make(picture, "img", "");
    this.image.alt = "the newest picture of the agent";
    const age = make(picture, "div", "sz-caption");
    make(age, "span", "", "picture ");
    this.remember("picture", make(age, "span", "", "-"));
    make(age, "span", "", " old (min:s)");
    const grid = { };
    for (const chart of this.data.charts) {
      if (!grid[chart.group]) {
        const box = make(this.host, "div", "sz-group");
        make(box, "div", "sz-group-title", chart.group);
        if (chart.group === "Machine") this.cores = make(box, "div", "sz-cores");
        grid[chart.group] = make(box, "div", "sz-grid");
      }
      this.card(grid[chart.group], chart);
    }
    const log = make(this.host, "div", "sz-card");
    make(log, "div", "sz-title", "Events");
    this.events = make(log, "div", "sz-events");
  }

  remember(id, node) { this.text.set(id, [...(this.text.get(id) ?? []), node]); }

  pipeline(box) {
    for (const stage of this.data.pipeline) {
      const cell = make(box, "div", "sz-stage");
      make(cell, "div", "sz-title", stage.title);
      for (const item of stage.items) {
        const line = make(cell, "div", "sz-item");
        line.title = item.help;
        make(line, "span", "sz-label", item.label);
        const value = make(line, "span", "sz-strong");
        this.remember(item.id, make(value, "span", "", "-"));
        if (item.unit) make(value, "span", "sz-unit", item.unit);
      }
      if (stage.split) { stage.bar = make(cell, "div", "sz-bar"); stage.key = make(cell, "div", "sz-keys"); }
    }
  }

  axisMenu(chart) {
    const menu = make(chart.head, "select", "sz-select");
    menu.title = "what the horizontal axis counts";
    for (const [value, label] of [["t", "wall time"], ["s", "env steps"], ["u", "updates"]]) {
      const option = make(menu, "option", "", label);
      option.value = value;
    }
    this.axis = "t";
    menu.onchange = () => { this.axis = menu.value; this.redrawReturn(true); };
  }

  card(parent, spec) {
    const box = make(parent, "div", "sz-card sz-chart");
    const head = make(box, "div", "sz-head");
    const title = make(head, "div", "sz-title", spec.title);
    make(title, "span", "sz-unit", `[${spec.unit}]`);
    title.title = spec.help; title.tabIndex = 0;
    const div = make(box, "div", "sz-plot");
    div.dataset.chart = spec.key;
    const chart = { spec, box, head, div, names: [], pending: new Map(), visible: false, points: 0 };
    if (spec.key !== "return") box.style.display = "none";
    this.charts.set(spec.key, chart);
    return chart;
  }

  // ---- life -----------------------------------------------------------------------------------
  async start() {
    try { this.Plotly = await loadPlotly(this.data.plotly); } catch (error) { return this.fail(error); }
    if (this.dead) return;
    this.sizes = new ResizeObserver((entries) => {
      for (const { target } of entries) if (target.clientWidth > 0 && target._fullLayout) this.Plotly.Plots.resize(target);
    });
    this.sights = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        const chart = this.charts.get(target.dataset.chart);
        chart.visible = isIntersecting;
        if (isIntersecting) this.flush(chart);
      }
    }, { rootMargin: "100px" });
    const chart = this.returnCard;
    this.Plotly.newPlot(chart.div, this.returnTraces(), this.layout(chart.spec), this.config());
    this.watch(chart);
    this.tick();
    this.picture();
  }

  watch(chart) { chart.ready = true; this.sizes.observe(chart.div); this.sights.observe(chart.div); }

  fail(error) { NS.errors.push(String(error)); this.note.textContent = `Charts cannot be drawn: ${error.message}`; }

  dispose() {
    if (this.dead) return;
    this.dead = true;
    clearTimeout(this.timers.tick); clearTimeout(this.timers.picture);
    this.abort.abort();
    this.sizes?.disconnect(); this.sights?.disconnect();
    this.image.onload = this.image.onerror = null;
    this.image.removeAttribute("src");
    for (const chart of this.charts.values()) if (chart.ready) this.Plotly.purge(chart.div);
    NS.disposed += 1; NS.live -= 1;
  }

  // ---- each second ----------------------------------------------------------------------------
  async tick() {
    if (this.dead) return;
    let pause = this.data.period_ms;
    if (!document.hidden) {
      try {
        const query = new URLSearchParams({ run: this.data.run, since: this.since, evals: this.seen, epoch: this.epoch });
        const reply = await fetch(`${this.data.base}/api/live?${query}`, { signal: this.abort.signal, cache: "no-store" });
        const news = await reply.json();
        if (this.dead) return;
        if (news.error) { this.note.textContent = news.error; pause *= 3; }
        else { this.apply(news); if (!news.live) pause *= 5; }
      } catch (error) {
        if (this.dead || error.name === "AbortError") return;
        this.note.textContent = "The dashboard's server does not answer; the run itself goes on.";
        if (!(error instanceof TypeError)) NS.errors.push(String(error));
      }
    }
    this.timers.tick = setTimeout(() => this.tick(), pause);
  }

  apply(news) {
    const begun = performance.now();
    if (news.epoch !== this.epoch) { this.clear(news); this.epoch = news.epoch; }
    this.live = news.live;
    this.addEvaluations(news.evals);
    for (const [name, points] of Object.entries(news.series)) this.add(name, points);
    this.since = news.next; this.seen = news.evals_next;
    for (const chart of this.charts.values()) if (chart.visible || !chart.ready) this.flush(chart);
    for (const [id, value] of Object.entries(news.text)) for (const node of this.text.get(id) ?? []) if (node.textContent !== value) node.textContent = value;
    this.note.textContent = news.note;
    this.bars(news.shares);
    this.coreStrip(news.cores);
    this.eventList(news.events);
    NS.updates += 1; NS.ms = performance.now() - begun;
    if ([...this.charts.values()].some((chart) => chart.points > MAX_POINTS)) this.reload();
  }

  // Everything again, thinned by the server: a trace never holds more than MAX_POINTS for long.
  reload() { this.epoch = ""; this.since = 0; this.seen = 0; }

  clear(news) {
    const end = news.next;
    const unit = end > 10800 ? { name: "h", by: 3600 } : end > 600 ? { name: "min", by: 60 } : { name: "s", by: 1 };
    const changed = unit.name !== this.unit.name;
    this.unit = unit;
    this.evals = { t: [], s: [], u: [], y: [], lo: [], hi: [] };
    this.episodes = { t: [], s: [], y: [] };
    for (const chart of this.charts.values()) {
      chart.pending.clear(); chart.points = 0; chart.empty = true;
      if (chart.ready && changed) this.Plotly.relayout(chart.div, { "xaxis.title.text": this.axisTitle(chart), "xaxis.autorange": true });
    }
  }

  add(name, points) {
    if (name === "episode_return") {
      for (const key of ["t", "s", "y"]) this.episodes[key].push(...points[key]);
      this.noisyDirty = true;
      return;
    }
    for (const chart of this.charts.values()) {
      const hit = (chart.spec.series ?? []).some((entry) => entry === name || (entry.endsWith("*") && name.startsWith(entry.slice(0, -1))));
      if (!hit) continue;
      const kept = chart.pending.get(name) ?? { x: [], y: [] };
      const scale = chart.spec.scale;
      kept.x.push(...points.t.map((t) => t / this.unit.by));
      kept.y.push(...points.y.map((y) => y * scale));
      if (kept.x.length > MAX_POINTS) chart.points = MAX_POINTS + 1;
      chart.pending.set(name, kept);
    }
  }

  addEvaluations(news) {
    if (!news || !news.t.length) return;
    for (const key of Object.keys(this.evals)) this.evals[key].push(...news[key]);
    this.returnDirty = true;
  }

  flush(chart) {
    if (chart.spec.key === "return") { 
      // The samplers' line alone is drawn every fifth time: it is the dearest chart and changes each second.
      if (chart.ready && (this.returnDirty || (this.noisyDirty && NS.updates % 5 === 0))) this.redrawReturn(false);
      return;
    }
    if (!chart.pending.size) return;
    const fresh = [...chart.pending.keys()].filter((name) => !chart.names.includes(name));
    if (!chart.ready) {
      chart.box.style.display = "";
      chart.names = fresh;
      this.Plotly.newPlot(chart.div, fresh.map((name, i) => this.trace(chart, name, i)), this.layout(chart.spec), this.config());
      this.watch(chart);
    } else {
      if (fresh.length) { chart.names.push(...fresh); this.Plotly.addTraces(chart.div, fresh.map((name) => this.trace(chart, name, chart.names.indexOf(name), true))); }
      const names = [...chart.pending.keys()];
      const rows = names.map((name) => chart.pending.get(name));
      const index = names.map((name) => chart.names.indexOf(name));
      const change = { x: rows.map((row) => row.x), y: rows.map((row) => row.y) };
      if (chart.empty) this.Plotly.restyle(chart.div, change, index);
      else this.Plotly.extendTraces(chart.div, change, index);
    }
    chart.empty = false;
    chart.pending.clear();
    chart.points = Math.max(...chart.div.data.map((trace) => trace.x.length));
  }

  trace(chart, name, index, bare) {
    const kept = chart.pending.get(name);
    const part = name.split("/")[1];
    const label = part === undefined ? name.replaceAll("_", " ") : `${chart.spec.title} ${part}`;
    const colour = this.data.colours[index % this.data.colours.length];
    return { x: bare ? [] : kept.x, y: bare ? [] : kept.y, name: label, mode: "lines", line: { width: 1.6, color: colour } };
  }

  // ---- the return chart -----------------------------------------------------------------------
  returnTraces() {
    const [blue, orange] = this.data.colours;
    const line = { width: 0, color: blue };
    const traces = [
      { name: "95 % interval, upper", mode: "lines", line, showlegend: false, hoverinfo: "skip" },
      { name: "95 % interval of the mean", mode: "lines", line, fill: "tonexty", fillcolor: "rgba(0,114,178,0.22)", hoverinfo: "skip" },
      { name: "greedy episodes, mean", mode: "lines+markers", line: { width: 2.2, color: blue }, marker: { size: 4 } },
      { name: "samplers' episodes (noisy)", mode: "lines", line: { width: 1, color: orange }, opacity: 0.75 },
    ];
    if (this.data.reference !== null) traces.push({ name: this.data.reference_label, mode: "lines", line: { width: 1.2, dash: "dash", color: "#888888" } });
    return traces.map((trace) => ({ ...trace, x: [], y: [] }));
  }

  redrawReturn(axisChanged) {
    const chart = this.returnCard;
    if (!chart.ready || !this.evals) return;
    const by = this.axis === "t" ? this.unit.by : 1;
    const x = this.evals[this.axis].map((value) => value / by);
    const noisy = this.axis === "u" ? { x: [], y: [] } : { x: this.episodes[this.axis].map((value) => value / by), y: this.episodes.y };
    const xs = [x, x, x, noisy.x], ys = [this.evals.hi, this.evals.lo, this.evals.y, noisy.y];
    if (this.data.reference !== null) {
      const all = [...x, ...noisy.x];
      xs.push(all.length ? [Math.min(...all), Math.max(...all)] : []); ys.push(all.length ? [this.data.reference, this.data.reference] : []);
    }
    this.Plotly.restyle(chart.div, { x: xs, y: ys }, xs.map((_, i) => i));
    if (axisChanged) this.Plotly.relayout(chart.div, { "xaxis.title.text": this.axisTitle(chart), "xaxis.autorange": true, "yaxis.autorange": true });
    this.returnDirty = this.noisyDirty = false;
    chart.points = Math.max(x.length, noisy.x.length);
  }

  axisTitle(chart) {
    if (chart.spec.key === "return" && this.axis !== "t") return this.axis === "s" ? "env steps" : "updates";
    return `wall time [${this.unit.name}]`;
  }

  // ---- small parts ----------------------------------------------------------------------------
  bars(shares) {
    for (const stage of this.data.pipeline) {
      if (!stage.split) continue;
      const parts = shares[stage.split] ?? [];
      const names = parts.map((part) => part[0]).join();
      if (stage.names !== names) {
        stage.names = names;
        stage.bar.replaceChildren(); stage.key.replaceChildren();
        stage.cells = parts.map(([name], i) => {
          const cell = make(stage.bar, "div", "");
          const colour = name === "wait" ? "#9AA3AC" : this.data.colours[i % this.data.colours.length];
          cell.style.background = colour;
          const key = make(stage.key, "span", "");
          make(key, "i", "").style.background = colour;
          return { cell, label: make(key, "span", "") };
        });
      }
      parts.forEach(([name, share], i) => {
        const { cell, label } = stage.cells[i];
        cell.style.width = `${Math.min(100, 100 * share)}%`;
        label.textContent = `${name} ${Math.round(100 * share)} %`;
        cell.title = label.textContent + " of its time";
      });
    }
  }

  coreStrip(cores) {
    if (!this.cores) return;
    if (this.cores.childElementCount !== cores.length) {
      this.cores.replaceChildren();
      cores.forEach(() => make(make(this.cores, "div", "sz-core"), "div", ""));
    }
    cores.forEach((use, i) => {
      const cell = this.cores.children[i];
      cell.title = `core ${i}: ${Math.round(100 * use)} % busy`;
      cell.firstChild.style.height = `${100 * use}%`;
    });
  }

  eventList(events) {
    const key = JSON.stringify(events);
    if (key === this.eventKey) return;
    this.eventKey = key;
    this.events.replaceChildren();
    if (!events.length) make(this.events, "div", "sz-caption", "nothing has happened yet");
    for (const [at, level, source, text] of events.toReversed()) {
      const line = make(this.events, "div", `sz-event sz-${level}`);
      make(line, "span", "sz-caption", at);
      make(line, "b", "", level === "info" ? source : `${level}: ${source}`);
      make(line, "span", "", text);
    }
  }

  picture() {
    if (this.dead) return;
    const again = (ms) => { if (!this.dead) this.timers.picture = setTimeout(() => this.picture(), ms); };
    if (document.hidden) return again(1000);
    const begun = performance.now();
    this.image.onload = () => { this.image.style.visibility = "visible"; NS.frames += 1; again(this.live ? Math.max(20, PICTURE_MS - (performance.now() - begun)) : 5000); };
    this.image.onerror = () => { this.image.style.visibility = "hidden"; again(2000); };
    this.image.src = `${this.data.base}/live.jpg?${new URLSearchParams({ run: this.data.run, n: Math.round(begun) })}`;
  }

  // ---- looks ----------------------------------------------------------------------------------
  colours() {
    const style = getComputedStyle(this.host);
    const read = (name, other) => style.getPropertyValue(name).trim() || other;
    return { text: read("--st-text-color", "#333"), line: read("--st-border-color", "#ddd"), back: read("--st-secondary-background-color", "#fff"), font: read("--st-font", "sans-serif") };
  }

  layout(spec) {
    const look = this.colours();
    const axis = { gridcolor: look.line, linecolor: look.line, zerolinecolor: look.line, automargin: true };
    const many = spec.key === "return" || (spec.series ?? []).length > 1 || (spec.series ?? []).some((name) => name.endsWith("*"));
    return {
      autosize: true, height: spec.key === "return" ? 340 : 190, margin: { l: 48, r: 10, t: 6, b: 34 }, uirevision: "keep",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: look.text, family: look.font, size: 11 },
      hovermode: "x unified", hoverlabel: { bgcolor: look.back, bordercolor: look.line, font: { color: look.text } },
      showlegend: many, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 10 } },
      xaxis: { ...axis, title: { text: this.axisTitle({ spec }), standoff: 4 } }, yaxis: { ...axis, ...(spec.unit === "%" ? { range: [0, 101] } : {}) },
    };
  }

  config() { return { displayModeBar: false, displaylogo: false, showTips: false, showSendToCloud: false, plotlyServerURL: "", responsive: false }; }

  recolour(data) {
    this.data = { ...this.data, period_ms: data.period_ms };
    if (!this.Plotly || this.dead) return;
    const look = this.colours();
    const change = { "font.color": look.text, "hoverlabel.bgcolor": look.back, "hoverlabel.bordercolor": look.line, "hoverlabel.font.color": look.text };
    for (const axis of ["xaxis", "yaxis"]) for (const part of ["gridcolor", "linecolor", "zerolinecolor"]) change[`${axis}.${part}`] = look.line;
    for (const chart of this.charts.values()) if (chart.ready) this.Plotly.relayout(chart.div, change);
  }
}
