// One component for the whole Live page, built once, then updated each second. When data or theme change,
// Streamlit calls the default function again without the earlier cleanup; the instance stored on the root is reused.
// A hidden page makes no requests; charts and the picture are not drawn while out of sight.
const NS = (window.__spreeze ??= { made: 0, disposed: 0, live: 0, updates: 0, errors: [], frames: 0, ms: 0, requests: 0, shown_s: 0 });
const MAX_POINTS = 1000;
const PHASES = { step: "#0072B2", update: "#E69F00", wait: "rgba(128, 128, 128, 0.35)", publish: "#009E73", checkpoint: "#CC79A7", evaluate: "#56B4E9", render: "#D55E00", other: "#999999" };

// Minimum and maximum of a thinned series; a series that was never thinned has no band.
const bandOf = (kept) => (kept.banded ? { low: kept.low, high: kept.high } : {});

// A tooltip that the keyboard reaches, too.
function tip(node, text) { node.title = text; node.tabIndex = 0; }

const noPoints = () => ({ t: [], s: [], x: [], y: [], low: [], high: [] });

export default function ({ parentElement: root, data, setTriggerValue }) {
  if (root.__live?.run === data.run) { root.__live.update(data); return root.__live.dispose; }
  root.__live?.dispose();  // another run: Streamlit may keep the node
  const host = root.querySelector(".sz-live");
  const page = new LivePage(host, data, (value) => setTriggerValue("changed", value));
  const dispose = () => { page.dispose(); if (root.__live?.dispose === dispose) delete root.__live; };
  root.__live = { run: data.run, update: (next) => page.recolour(next), dispose };
  page.start();
  return dispose;
}

class LivePage {
  constructor(host, data, changed) {
    this.host = host; this.data = data; this.dead = false; this.timers = {}; this.changed = changed; this.changedAt = 0;
    this.epoch = ""; this.since = 0; this.seen = 0; this.scores = ""; this.charts = new Map(); this.unit = { name: "s", by: 1 };
    this.time = new Axis(); this.store = new Map();
    this.abort = new AbortController();
    NS.made += 1; NS.live += 1; NS.run = data.run;
    this.build();
  }

  // ---- building -------------------------------------------------------------------------------
  build() {
    this.host.replaceChildren();
    this.said = make(this.host, "div", "sz-said");
    this.said.setAttribute("role", "status");
    this.progress = make(this.host, "pre", "sz-progress");
    this.progress.style.display = "none";
    const large = make(this.host, "div", "sz-hero"), tiles = make(this.host, "div", "sz-tiles");
    this.text = new Map();
    for (const tile of this.data.tiles) this.tile(tile.more ? large : tiles, tile);
    this.note = make(this.host, "div", "sz-note", "Connecting ...");
    this.alert = make(this.host, "div", "sz-alert");
    this.health = make(this.host, "div", "sz-health");
    this.reasons = make(this.host, "details", "sz-reasons");
    this.firstReason = make(this.reasons, "summary", "");
    this.moreReasons = make(this.reasons, "ul", "");
    this.chips = new Map();
    const tools = make(this.host, "div", "sz-tools");
    this.tools(tools);
    const top = make(this.host, "div", "sz-top");
    this.returnCard = this.card(top, { key: "return", title: "Evaluation return", unit: "return", help: this.data.return_help });
    this.axisMenu(this.returnCard);
    const trend = make(this.returnCard.box, "div", "sz-caption");
    tip(trend, "A line through the returns of the last third of the training time, or of its last 30 seconds if that is more, with the 95 % interval of its slope.");
    this.remember("trend", trend);
    this.agent = new AgentCard(top, { base: this.data.base, run: this.data.run, signal: this.abort.signal, remember: (id, node) => this.remember(id, node) });
    this.pipeline(make(this.host, "div", "sz-pipe"));
    this.learners = make(this.host, "div", "sz-card");
    make(this.learners, "div", "sz-title", "Learners");
    this.learnerLines = make(this.learners, "table", "sz-table");
    this.learners.hidden = true;
    this.timeline = make(this.host, "div", "sz-card sz-timeline");
    this.timeline.style.display = "none";
    this.board = new ChartBoard(this.host);
    for (const chart of this.data.charts) {
      const machine = chart.group === "Machine" ? (box) => this.machine(box) : null;
      this.board.add(this.card(this.board.grid(chart.group, machine), chart));
    }
    this.board.tools(tools);
    const log = make(this.host, "div", "sz-card");
    make(log, "div", "sz-title", "Events");
    this.events = make(log, "div", "sz-events");
    const tail = make(this.host, "div", "sz-card");
    this.logTitle = make(tail, "div", "sz-title", "Latest log");
    this.log = make(tail, "pre", "sz-log", "nothing in the logs of its workers");
  }

  // A number with its label; a large one has smaller numbers below it.
  tile(parent, tile) {
    const box = make(parent, "div", tile.more ? "sz-tile sz-large" : "sz-tile");
    tip(box, tile.help);
    make(box, "div", "sz-label", tile.label);
    const line = make(box, "div", "sz-value");
    if (tile.id === "state") this.dot = make(line, "i", "sz-dot");
    this.remember(tile.id, make(line, "span", "", "-"));
    if (tile.unit) make(line, "span", "sz-unit", tile.unit);
    const below = tile.more && make(box, "div", "sz-more");
    for (const item of tile.more ?? []) {
      const part = make(below, "span", "");
      tip(part, item.help);
      make(part, "span", "sz-label", `${item.label} `);
      this.remember(item.id, make(part, "span", "", "-"));
    }
  }

  // Tells a screen reader what has changed; numbers that change each second are none of it.
  say(text) { if (this.said.textContent !== text) this.said.textContent = text; }

  // One chip for each judgement on the learning; a click shows its chart. Below stand the sentences of amber ones: one
  // until the others are opened, so that the charts stay on the first screen.
  healthChips(found) {
    const key = JSON.stringify(found);
    if (key === this.healthKey) return;
    this.healthKey = key;
    const labels = found.map(([label]) => label);
    for (const [label, { chip }] of this.chips) chip.hidden = !labels.includes(label);
    for (const [label, value, level, sentence, chart] of found) {
      if (!this.chips.has(label)) {
        const chip = make(this.health, "button", ""), sign = make(chip, "i", "");
        sign.setAttribute("aria-hidden", "true");
        make(chip, "span", "sz-label", label); make(chip, "span", "", " ");
        this.chips.set(label, { chip, sign, value: make(chip, "span", "sz-strong", ""), level: make(chip, "span", "sz-said", "") });
      }
      const one = this.chips.get(label);
      one.chip.className = `sz-chip sz-${level}`; one.chip.title = sentence;
      one.chip.onclick = () => this.showChart(chart);
      const open = level === "unknown" && value !== "-"; // a number whose meaning depends on the task
      one.sign.textContent = { good: "\u2713", amber: "!" }[level] ?? (open ? "\u00b7" : "?");
      one.value.textContent = value; one.level.textContent = `, ${open ? "not judged" : level}`;
    }
    const [first, ...more] = found.filter(([, , level]) => level === "amber").map(([label, , , sentence]) => `${label}: ${sentence}`);
    this.reasons.className = `sz-reasons${first ? "" : " sz-none"}${more.length ? " sz-several" : ""}`;
    this.firstReason.textContent = (first ?? "") + (more.length ? ` (${more.length} more)` : "");
    this.moreReasons.replaceChildren();
    for (const text of more) make(this.moreReasons, "li", "", text);
  }

  // Brings a chart into view, if it has been drawn; it may have been hidden.
  showChart(key) {
    const card = this.charts.get(key);
    if (!card?.chart) return;
    if (this.board.kept.hidden.includes(key)) this.board.keep("hidden", toggled(this.board.kept.hidden, key));
    card.box.scrollIntoView({ block: "center" });
    card.div.focus({ preventScroll: true });
    card.box.classList.remove("sz-found"); void card.box.offsetWidth; card.box.classList.add("sz-found");
  }

  // How all charts are drawn; kept for this browser tab.
  tools(box) {
    this.view = { smooth: 0, log: false, robust: true, notify: false };
    try { Object.assign(this.view, JSON.parse(sessionStorage.getItem("spreeze-view") ?? "{}")); } catch { /* no storage here */ }
    const redraw = () => {
      try { sessionStorage.setItem("spreeze-view", JSON.stringify(this.view)); } catch { /* no storage here */ }
      for (const card of this.charts.values()) card.chart?.touch();
    };
    const field = (label, type, key, help) => {
      const line = make(box, "label", "", ""), input = document.createElement("input");
      line.title = help;
      if (type === "range") { make(line, "span", "", label); line.appendChild(input); } else { line.appendChild(input); make(line, "span", "", label); }
      input.type = type; input.name = key;
      if (type === "range") { input.min = 0; input.max = 0.99; input.step = 0.01; input.value = this.view[key]; input.oninput = () => { this.view[key] = Number(input.value); redraw(); }; }
      else { input.checked = this.view[key]; input.onchange = () => { this.view[key] = input.checked; redraw(); }; }
      return input;
    };
    field("Smoothing", "range", "smooth", "weight of earlier values in a moving average; raw values stay visible");
    field("log scale", "checkbox", "log", "logarithmic vertical axis, if all values are positive");
    field("ignore outliers", "checkbox", "robust", "the vertical axis omits the outermost 2 % on each side");
    const notify = field("notify at the end", "checkbox", "notify", "a notification of the browser when the run ends or fails");
    notify.addEventListener("change", () => { if (notify.checked) globalThis.Notification?.requestPermission(); });
    const keys = make(box, "span", "sz-caption", "click the return for its episode; drag to zoom");
    tip(keys, "Double-click: the whole chart again. By keys on a focused chart: arrows read it, + and - zoom, Enter opens the episode.");
  }

  // A notification of the browser when a run that was watched alive has ended.
  announce(news) {
    if (!this.live || news.live || !this.view.notify || globalThis.Notification?.permission !== "granted") return;
    new Notification(`${this.data.run}: ${news.state}`, { body: news.note });
  }

  // A page that nobody sees asks for nothing, unless it is to notify of the end of its run.
  rests() { return document.hidden && !(this.live && this.view.notify); }

  // The browser's tab tells the newest return of a live run, so that it is seen from another one.
  tabTitle(value) {
    this.titled ??= document.title.split(" \u00b7 ").at(-1);
    const title = this.live && value !== "-" ? `${value} \u00b7 ${this.titled}` : this.titled;
    if (document.title !== title) document.title = title;
  }

  remember(id, node) { this.text.set(id, [...(this.text.get(id) ?? []), node]); }

  pipeline(box) {
    for (const stage of this.data.pipeline) {
      const cell = make(box, "div", "sz-stage");
      make(cell, "div", "sz-title", stage.title);
      for (const item of stage.items) {
        const line = make(cell, "div", "sz-item");
        tip(line, item.help);
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
    menu.title = "horizontal axis"; menu.setAttribute("aria-label", menu.title);
    for (const [value, label] of [["t", "wall time"], ["s", "env steps"], ["u", "updates"]]) {
      const option = make(menu, "option", "", label);
      option.value = value;
    }
    this.axis = "t";
    menu.onchange = () => this.switchAxis(menu.value);
  }

  card(parent, spec) {
    const box = make(parent, "div", "sz-card sz-chart");
    const head = make(box, "div", "sz-head");
    const title = make(head, "div", "sz-title", spec.title);
    make(title, "span", "sz-unit", `[${spec.unit}]`);
    tip(title, spec.help);
    const now = make(head, "span", "sz-now", "");
    const full = make(head, "button", "sz-act", "\u2922");
    full.title = "full screen; Escape to go back";
    full.setAttribute("aria-label", `${spec.title}: full screen`);
    full.onclick = () => (document.fullscreenElement ? document.exitFullscreen() : box.requestFullscreen?.());
    const div = make(box, "div", "sz-plot");
    div.dataset.chart = spec.key;
    div.setAttribute("role", "img");
    div.setAttribute("aria-label", `${spec.title} [${spec.unit}] over time`);
    const card = { spec, box, head, div, now, names: [], chart: null };
    this.charts.set(spec.key, card);
    return card;
  }

  // The chart of a card, made when its first number arrives.
  chartOf(card) {
    if (card.chart) return card.chart;
    card.chart = new Chart(card.div, {
      height: card.spec.key === "return" ? 330 : 170, xTitle: () => this.axisTitle(card),
      xText: (x) => this.axisText(card, x), yText: card === this.returnCard ? numberText : shortText,
      yRange: card.spec.unit === "%" ? [0, 100] : null, colours: () => this.look, view: () => this.view,
      axis: this.time, onPick: card === this.returnCard ? (x) => this.openEpisode(x) : undefined,
      marks: () => (card === this.returnCard && this.axis !== "t" ? [] : (this.marks ?? []).map(([t, level, text]) => ({ x: t / this.unit.by, level, text }))),
    });
    this.board.arrange();
    return card.chart;
  }

  // ---- life -----------------------------------------------------------------------------------
  start() {
    this.look = lookOf(this.host, this.data.colours[0]);
    this.chartOf(this.returnCard);
    this.returnCard.div.addEventListener("pointerenter", () => this.warmUp(), { signal: this.abort.signal });
    document.addEventListener("visibilitychange", () => { if (!document.hidden) { this.wake(); this.agent.wake(); } }, { signal: this.abort.signal });
    this.wake();
  }

  dispose() {
    if (this.dead) return;
    this.dead = true;
    clearTimeout(this.timers.tick);
    if (document.title.endsWith(` \u00b7 ${this.titled}`)) document.title = this.titled;
    this.abort.abort();
    this.agent.dispose();
    for (const card of this.charts.values()) card.chart?.dispose();
    this.player?.dispose();
    NS.disposed += 1; NS.live -= 1;
  }

  // ---- each second ----------------------------------------------------------------------------
  wake() {
    if (this.busy || this.dead) return;
    clearTimeout(this.timers.tick);
    this.tick();
  }

  async tick() {
    if (this.dead || this.rests()) return;  // woken when the page is seen again
    const begun = performance.now();
    let pause = document.hidden ? 10 * this.data.period_ms : this.data.period_ms;
    this.busy = true;
    try {
      const query = new URLSearchParams({ run: this.data.run, since: this.since, evals: this.seen, scores: this.scores, epoch: this.epoch });
      NS.requests += 1;
      let news = null;
      try {
        const reply = await fetch(`${this.data.base}/api/live?${query}`, { signal: this.abort.signal, cache: "no-store" });
        news = await reply.json();
      } catch (error) {
        if (this.dead || error.name === "AbortError") return;
        this.note.textContent = "No connection to the dashboard server; the run continues.";
        this.say(this.note.textContent);
      }
      if (this.dead || !news) return;
      this.pageNews(news.page);
      if (news.error) { this.note.textContent = news.error; pause *= 3; }
      else { this.apply(news); if (!news.live && !news.page?.key) pause *= 5; }
    } catch (error) {
      NS.errors.push(String(error.stack ?? error));
      this.note.textContent = `This page could not be updated (${error}); reload it. The run continues.`;
    } finally {
      this.busy = false;
      if (!this.dead) this.timers.tick = setTimeout(() => this.tick(), Math.max(200, pause - (performance.now() - begun)));
    }
  }

  // Progress of a start or stop; when the state changes, a rerun draws the right buttons.
  pageNews(page) {
    if (!page) return;
    const text = page.lines.join("\n");
    if (this.progress.textContent !== text) this.progress.textContent = text;
    this.progress.style.display = text ? "" : "none";
    if (page.key !== this.data.page && performance.now() - this.changedAt > 2000) {
      this.changedAt = performance.now();
      this.changed(page.key);
    }
  }

  apply(news) {
    const begun = performance.now();
    if (news.epoch !== this.epoch) { this.clear(news); this.epoch = news.epoch; }
    this.announce(news);
    this.live = news.live;
    for (const key of Object.keys(this.evals)) this.evals[key].push(...news.evals[key]);
    const changed = new Set(news.evals.t.length ? [this.returnCard] : []);
    for (const name of news.whole) this.store.set(name, noPoints());
    for (const [name, points] of Object.entries(news.series)) this.add(name, points, changed);
    this.since = news.next; this.seen = news.evals_next; this.scores = news.scores;
    for (const card of changed) if (card === this.returnCard) this.showReturn(); else this.showSeries(card);
    for (const [id, value] of Object.entries(news.text)) for (const node of this.text.get(id) ?? []) if (node.textContent !== value) node.textContent = value;
    this.histograms(news.evals_next);
    this.agent.news(news.live, news.evals_next);
    this.tabTitle(news.text.eval_return);
    if (this.note.textContent !== news.note) this.note.textContent = news.note;
    this.note.classList.toggle("sz-problem", news.problem);
    const told = `${news.state} ${news.problem}`;
    if (told !== this.told) { this.told = told; this.say(news.problem ? `${news.state}: ${news.note}` : news.state); }
    this.healthChips(news.health);
    this.dot.className = `sz-dot sz-state-${news.state}`;
    if (news.marks && JSON.stringify(news.marks) !== JSON.stringify(this.marks)) { this.marks = news.marks; this.time?.touch(); }
    if (!this.live) for (const { now } of this.charts.values()) if (now?.textContent) now.textContent = "";
    this.bars(news.shares);
    this.coreStrip(news.cores);
    this.gpuRows(news.gpus);
    this.tableRows(this.learners, this.learnerLines, news.learners);
    if (news.timeline) this.timelineRows(news.timeline);
    this.processRows(news.processes);
    this.tableRows(this.hostCard, this.hosts, [["host", "env steps", "lag [updates]", "chunks", "lost", "clock"], ...news.hosts]);
    this.eventList(news.events);
    this.warn(news.alert);
    this.logTail(...news.log);
    NS.shown_s = news.next; NS.updates += 1; NS.ms = performance.now() - begun;
    if ([...this.store.values()].some((kept) => kept.t.length > MAX_POINTS) || this.evals.t.length > MAX_POINTS) this.reload();
  }

  // Requests everything again, thinned by the server, so that no trace stays longer than MAX_POINTS.
  reload() { this.epoch = ""; this.since = 0; this.seen = 0; }

  clear(news) {
    const end = news.next;
    const unit = end > 10800 ? { name: "h", by: 3600 } : end > 600 ? { name: "min", by: 60 } : { name: "s", by: 1 };
    const factor = this.unit.by / unit.by;
    if (this.time?.zoom) this.time.zoom = this.time.zoom.map((x) => x * factor);
    this.unit = unit;
    this.evals = { t: [], s: [], u: [], y: [], lo: [], hi: [] };
    this.store.clear();
    this.spread = this.spreadAfter = 0;
  }

  // How values, actions and advantages of kept episodes spread; asked for after an evaluation, at most every ten seconds.
  async histograms(count) {
    if (!count || count === this.spread || performance.now() < (this.spreadAfter ?? 0)) return;
    this.spreadAfter = performance.now() + 10000;
    const query = new URLSearchParams({ run: this.data.run });
    const found = await fetch(`${this.data.base}/api/episode/histograms?${query}`, { signal: this.abort.signal }).then((reply) => reply.json()).catch(() => null);
    if (this.dead || !found || found.error) return;
    this.spread = count;
    for (const [key, { t, y, lo, hi, ...heat }] of Object.entries(found)) {
      const trace = { name: "median (5 % .. 95 %)", colour: this.data.colours[0], x: t.map((at) => at / this.unit.by), y, low: lo, high: hi, heat };
      this.chartOf(this.charts.get(key)).show([trace]);
    }
  }

  add(name, points, changed) {
    const kept = this.store.get(name) ?? noPoints();
    this.store.set(name, kept);
    kept.t.push(...points.t); kept.s.push(...points.s);
    kept.x.push(...points.t.map((t) => t / this.unit.by));
    const push = (scale) => {
      kept.banded ||= !!points.lo;
      kept.y.push(...points.y.map((y) => y * scale));
      for (const [side, values] of [[kept.low, points.lo], [kept.high, points.hi]]) side.push(...points.y.map((_, i) => (values ? values[i] * scale : null)));
    };
    if (["episode_return", "eval_return"].includes(name.split("/")[0])) { push(1); changed.add(this.returnCard); return; }
    for (const card of [...this.charts.values()]) {
      const hit = (card.spec.series ?? []).some((entry) => entry === name || (entry.endsWith("*") && name.startsWith(entry.slice(0, -1))));
      if (!hit) continue;
      if (card.spec.split) {  // a card of its own for each series, made when its first number arrives
        if (!this.charts.has(name)) this.card(card.box.parentElement, { ...card.spec, key: name, title: name.slice(name.indexOf("/") + 1), series: [name], split: false });
        const own = this.charts.get(name);
        push(1); changed.add(own);
        if (!own.names.includes(name)) own.names.push(name);
        break;
      }
      push(card.spec.scale);
      if (!card.names.includes(name)) card.names.push(name);
      changed.add(card);
    }
  }

  // One line per series; with several learners, one of the whole run and one of each group.
  showSeries(card) {
    const names = card.names.filter((name) => this.store.has(name)), several = names.some((name) => name.includes("/"));
    const metrics = new Set(names.map((name) => name.split("/")[0]));
    const traces = names.map((name, i) => {
      const [metric, part] = name.split("/"), kept = this.store.get(name), words = metric.replaceAll("_", " ");
      const whose = part !== undefined ? `${card.spec.part} ${part}` : several ? "whole run" : "";
      const label = metrics.size > 1 || !whose ? `${words}${whose && `, ${whose}`}` : whose;
      return { name: label, colour: this.data.colours[i % this.data.colours.length], x: kept.x, y: kept.y, ...bandOf(kept) };
    });
    this.chartOf(card).show(traces);
    if (traces.length > 1) this.legend(card, traces);
    const whole = traces.filter((_, i) => !names[i].includes("/"));
    // Of a run that has ended the tiles show means over all of it: the last value beside them would contradict.
    const now = this.live ? (whole.length ? whole : traces).map((trace) => shortText(trace.y.at(-1))).join(" / ") : "";
    if (card.now.textContent !== now) card.now.textContent = now;
  }

  // ---- the return chart -----------------------------------------------------------------------
  showReturn() {
    const [blue, orange] = this.data.colours, by = this.axis === "t" ? this.unit.by : 1;
    const x = this.evals[this.axis].map((value) => value / by);
    let traces = [];
    const noisy = this.axis === "u" ? [] : [...this.store].filter(([name]) => name.split("/")[0] === "episode_return");
    const groups = [...this.store].filter(([name]) => name.startsWith("eval_return/"));
    if (this.axis !== "u") groups.forEach(([name, kept], i) => traces.push({ name: `group ${name.split("/")[1]}: greedy episodes`, colour: this.data.colours[2 + (i % (this.data.colours.length - 2))], width: 1.4, x: this.axis === "t" ? kept.x : kept.s, y: kept.y }));
    noisy.forEach(([name, kept], i) => {
      const part = name.split("/")[1], base = { width: 1, faint: true, x: this.axis === "t" ? kept.x : kept.s, y: kept.y };
      if (part === undefined) traces.push({ name: "samplers' episodes (noisy)", colour: orange, ...base, ...bandOf(kept) });
      else traces.push({ name: `group ${part}: episodes (noisy)`, colour: this.data.colours[2 + (i % (this.data.colours.length - 2))], ...base });
    });
    traces.push({ name: "greedy episodes, mean (95 % interval)", colour: blue, width: 2.2, dots: x.length < 200, whole: true, x, y: this.evals.y, low: this.evals.lo, high: this.evals.hi });
    traces = traces.map(counting);
    const all = traces.flatMap((trace) => (trace.x.length ? [trace.x[0], trace.x.at(-1)] : []));
    const reference = this.data.references?.[0];
    if (reference && all.length) {
      const known = [...this.evals.y].filter(Number.isFinite), least = known.reduce((a, b) => Math.min(a, b), Infinity), most = known.reduce((a, b) => Math.max(a, b), -Infinity);
      const off = known.length > 0 && Math.max(reference.value - most, least - reference.value) > Math.max(most - least, 1e-9 * Math.abs(most));
      const line = off ? { x: [], y: [] } : { x: [Math.min(...all), Math.max(...all)], y: [reference.value, reference.value] };  // far away it would flatten the curve
      traces.push({ name: off ? `${reference.label} (outside the chart)` : reference.label, colour: "#8A8F98", width: 1.3, dash: [6, 4], whole: true, ...line });
    }
    this.chartOf(this.returnCard).show(traces);
    this.legend(this.returnCard, traces.toReversed());
  }

  // Whoever points at the curve may click: loading what draws an episode takes seconds.
  warmUp() {
    if (performance.now() < (this.warmUntil ?? 0)) return;
    this.warmUntil = performance.now() + 60000;
    fetch(`${this.data.base}/api/episode/warm?${new URLSearchParams({ run: this.data.run })}`, { method: "POST", signal: this.abort.signal }).catch(() => {});
  }

  // What the agent did at a point of the return curve.
  openEpisode(x) {
    this.player ??= new EpisodePlayer(this.host, { base: this.data.base, run: this.data.run, colours: this.data.colours, look: () => this.look });
    this.warmUntil = 0;  // the process that was started ahead draws this episode
    this.player.open(this.axis, this.axis === "t" ? x * this.unit.by : x);
  }

  legend(card, traces) {
    const key = traces.map((trace) => trace.name).join();
    if (key === card.legendKey) return;
    card.legendKey = key;
    const blue = this.data.colours[0];
    card.legendBox ??= card.box.insertBefore(document.createElement("div"), card.div);
    card.legendBox.className = "sz-keys";
    card.legendBox.replaceChildren();
    for (const trace of traces) {
      const item = make(card.legendBox, "span", "");
      make(item, "i", trace.dash ? "sz-dash" : "").style.background = trace.colour === blue ? `var(--st-primary-color, ${blue})` : trace.colour;
      make(item, "span", "", trace.name);
      if (trace.dash) item.title = this.data.references[0].source;
    }
  }

  switchAxis(axis) {
    this.axis = axis;
    const { chart } = this.returnCard;
    if (chart) { chart.follow(axis === "t" ? this.time : new Axis()); chart.zoomY = null; }
    if (this.evals) this.showReturn();
  }

  axisTitle(card) {
    if (card.spec.key === "return" && this.axis !== "t") return this.axis === "s" ? "env steps" : "updates";
    return `wall time [${this.unit.name}]`;
  }

  // A place on the axis as events have it.
  axisText(card, x) {
    if (card === this.returnCard && this.axis !== "t") return `${numberText(x)} ${this.axisTitle(card)}`;
    return `wall time ${durationText(x * this.unit.by)}`;
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

  machine(box) {
    const both = make(box, "div", "sz-machine");
    const left = make(both, "div", "sz-card"), right = make(both, "div", "sz-card");
    make(left, "div", "sz-title", "Cores");
    this.cores = make(left, "div", "sz-rows"); this.gpus = make(left, "div", "sz-gpus");
    make(right, "div", "sz-title", "Processes: % of one core, memory");
    this.processes = make(right, "div", "sz-rows");
    this.hostCard = make(both, "div", "sz-card");
    make(this.hostCard, "div", "sz-title", "Other hosts");
    this.hosts = make(this.hostCard, "table", "sz-table");
    this.hostCard.hidden = true;
  }

  coreStrip(cores) { this.rows(this.cores, cores.map((use, i) => [`core ${i}`, use, `${Math.round(100 * use)} %`])); }

  processRows(processes) { this.rows(this.processes, processes.map(([name, use, memory]) => [name, use, `${Math.round(100 * use)} %`, memory])); }

  // A table whose first line has the heads; its card is hidden while there is no other line.
  tableRows(card, table, lines) {
    const key = JSON.stringify(lines);
    if (table.key === key) return;
    table.key = key;
    card.hidden = lines.length < 2;
    table.replaceChildren();
    lines.forEach((cells, i) => { const line = make(table, "tr", ""); for (const text of cells) make(line, i ? "td" : "th", "", text); });
  }

  // Lines of a label, a bar and texts; built anew only when the labels change.
  rows(box, lines) {
    const key = lines.map(([label]) => label).join();
    box.closest(".sz-card").hidden = !this.live && !lines.length;  // of a run that has ended nothing will come
    if (box.key !== key) {
      box.key = key;
      box.replaceChildren();
      box.cells = lines.map(([label, , ...texts]) => {
        const line = make(box, "div", "sz-row");
        make(line, "span", "sz-label", label);
        return { bar: make(make(line, "div", "sz-use"), "div", ""), texts: texts.map(() => make(line, "span", "sz-strong", "")) };
      });
    }
    lines.forEach(([, use, ...texts], i) => {
      const { bar, texts: nodes } = box.cells[i];
      bar.style.width = `${Math.min(100, 100 * use)}%`;
      texts.forEach((text, k) => { if (nodes[k] && nodes[k].textContent !== text) nodes[k].textContent = text; });
    });
  }

  gpuRows(rows) {
    const text = rows.join("\n");
    if (this.gpus.textContent !== text) this.gpus.textContent = text;
  }

  // One row a worker; a bar for each stretch of one activity.
  timelineRows(found) {
    const key = JSON.stringify(found);
    if (key === this.timelineKey) return;
    this.timelineKey = key;
    this.timeline.style.display = "";
    this.timeline.replaceChildren();
    make(this.timeline, "div", "sz-title", `Worker phases during ${found.length_ms.toFixed(0)} ms, ${found.wall} after the start`).title =
      "Recorded 10 s after the first update, and with the Timeline button";
    const legend = make(this.timeline, "div", "sz-legend"), rows = make(this.timeline, "div", "sz-lanes"), seen = new Set();
    for (const worker of found.workers) {
      make(rows, "span", "sz-label", worker.name);
      const lane = make(rows, "div", "sz-lane");
      for (const [start, end, phase] of worker.parts) {
        const bar = make(lane, "i", "");
        bar.style.left = `${(100 * start) / found.length_ms}%`;
        bar.style.width = `${Math.max((100 * (end - start)) / found.length_ms, 0.05)}%`;
        bar.style.background = PHASES[phase] ?? PHASES.other;
        bar.title = `${phase}, ${start.toFixed(1)} to ${end.toFixed(1)} ms`;
        seen.add(PHASES[phase] ? phase : "other");
      }
    }
    for (const phase of Object.keys(PHASES).filter((name) => seen.has(name))) {
      const one = make(legend, "span", "sz-caption");
      make(one, "i", "").style.background = PHASES[phase];
      make(one, "span", "", phase);
    }
  }

  // A warning or error stands above the charts until it is over or dismissed; all of them are in the list of events.
  warn(found) {
    const key = JSON.stringify(found ?? "");
    if (key === this.alertKey) return;
    this.alertKey = key;
    this.alert.replaceChildren();
    const place = `spreeze-seen-${this.data.run}`;
    let seen = "";
    try { seen = sessionStorage.getItem(place); } catch { /* no storage here */ }
    if (!found || key === seen) return;
    const [at, level, source, text] = found;
    make(this.alert, "span", `sz-${level}`, `${at} ${level}: ${source}: ${text} `);
    const dismiss = make(this.alert, "button", "sz-link", "dismiss");
    dismiss.onclick = () => {
      this.alert.replaceChildren();
      try { sessionStorage.setItem(place, key); } catch { /* no storage here */ }
    };
  }

  eventList(events) {
    const key = JSON.stringify(events);
    if (key === this.eventKey) return;
    this.eventKey = key;
    this.events.replaceChildren();
    if (!events.length) make(this.events, "div", "sz-caption", this.live ? "no events yet" : "no events");
    for (const [at, level, source, text] of events.toReversed()) {
      const line = make(this.events, "div", `sz-event sz-${level}`);
      make(line, "span", "sz-caption", at);
      make(line, "b", "", level === "info" ? source : `${level}: ${source}`);
      make(line, "span", "", text);
    }
  }

  logTail(file, lines) {
    if (!lines.length) return;
    const title = `Latest log: ${file}`, text = lines.join("\n");
    if (this.logTitle.textContent !== title) this.logTitle.textContent = title;
    if (this.log.textContent !== text) this.log.textContent = text;
  }

  // ---- looks ----------------------------------------------------------------------------------
  recolour(data) {
    const other = data.page !== this.data.page;
    this.data = { ...this.data, period_ms: data.period_ms, page: data.page };
    if (this.dead) return;
    this.look = lookOf(this.host, this.data.colours[0]);
    for (const card of this.charts.values()) card.chart?.touch();
    this.player?.recolour();
    if (other) this.wake();
  }
}
