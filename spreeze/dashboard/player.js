// The episode player: pictures of one recorded episode beside its numbers, all read at one env step. A click on a curve
// opens it.
const STRIP_PX = 104;

class EpisodePlayer {
  // host: whose look it shares. base: address of the server. colours: lines. look: () => colours of charts.
  constructor(host, { base, run, colours, look }) {
    this.host = host; this.base = base; this.run = run; this.colours = colours; this.look = look;
    this.axis = new Axis(); this.strips = []; this.kind = "worst"; this.dead = false; this.asked = 0;
    this.build();
  }

  // ---- building -------------------------------------------------------------------------------
  build() {
    const box = (this.box = make(this.host, "dialog", "sz-player"));
    box.setAttribute("aria-label", "recorded episode");
    const head = make(box, "div", "sz-player-head");
    this.title = make(head, "div", "sz-title", "Episode");
    this.button(head, "\u2039", "earlier evaluation", () => this.turn(-1));
    this.button(head, "\u203a", "later evaluation", () => this.turn(1));
    this.kinds = {};
    const kinds = make(head, "div", "sz-player-kinds");
    for (const kind of ["best", "median", "worst"]) this.kinds[kind] = this.button(kinds, kind, `the ${kind} episode of this evaluation`, () => { this.kind = kind; this.show(this.id); });
    this.button(head, "\u00d7", "close", () => box.close());
    this.change = make(box, "details", "sz-player-change"); this.change.open = true;
    const body = make(box, "div", "sz-player-body");
    const left = make(body, "div", "sz-player-left");
    this.picture = make(left, "canvas", "sz-player-picture");
    this.picture.setAttribute("role", "img");
    this.film = new Film(this.picture, this, (step) => this.shown(step));
    this.caption = make(left, "div", "sz-caption");
    this.caption.setAttribute("aria-live", "polite");
    this.allow = make(left, "button", "sz-button"); this.allow.hidden = true;
    const bar = make(left, "div", "sz-player-bar");
    this.toggle = this.button(bar, "Play", "play or pause (space)", () => this.play(!this.playing));
    this.slider = make(bar, "input", "");
    this.slider.type = "range"; this.slider.min = 0; this.slider.step = 1; this.slider.setAttribute("aria-label", "env step");
    this.slider.oninput = () => this.go(Number(this.slider.value));
    this.speed = make(bar, "select", "sz-select");
    this.speed.title = "speed"; this.speed.setAttribute("aria-label", "speed");
    for (const speed of [0.25, 0.5, 1, 2, 4]) { const option = make(this.speed, "option", "", `${speed}\u00d7`); option.value = speed; }
    this.speed.value = 1;
    this.step = make(left, "div", "sz-strong", "");
    this.marks = make(left, "div", "sz-player-marks");
    this.right = make(body, "div", "");
    box.addEventListener("keydown", (event) => this.key(event));
    box.addEventListener("close", () => this.leave());
    box.addEventListener("click", (event) => { if (event.target === box) box.close(); });
  }

  button(parent, text, title, act) {
    const node = make(parent, "button", "sz-button", text);
    node.type = "button"; node.title = title; node.onclick = act;
    if (!/\w/.test(text)) node.setAttribute("aria-label", title);  // words are a name themselves
    return node;
  }

  key(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.target.tagName === "SELECT") return;
    if (event.key === " " && event.target.tagName !== "BUTTON") this.play(!this.playing);
    else if (steps !== undefined) { this.play(false); this.go(this.at + steps * (event.shiftKey ? 10 : 1)); }
    else if (event.key === "PageUp") this.turn(-1);
    else if (event.key === "PageDown") this.turn(1);
    else return;
    event.preventDefault();
  }

  // ---- which episode --------------------------------------------------------------------------
  ask(path, query, options = {}) { return answer(this.base, path, { run: this.run, ...query }, { signal: this.abort?.signal, ...options }); }

  // Opens the recorded evaluation nearest to x of `axis`: t, s or u (wall time, env steps or updates).
  async open(axis, x, group) {
    this.opened = performance.now(); this.group = group;
    this.abort ??= new AbortController();
    if (!this.box.open) this.box.showModal();
    this.clear("Loading ..."); this.title.textContent = "";
    try {
      this.list = await this.ask("episodes", {});
      const rows = this.list.id.map((_, i) => i).filter((i) => group === undefined || this.list.group[i] === group);
      if (!rows.length) { this.title.textContent = "No recorded episodes"; this.caption.textContent = this.list.why || "This learner has none yet."; return; }
      const nearest = rows.reduce((best, i) => (Math.abs(this.list[axis][i] - x) < Math.abs(this.list[axis][best] - x) ? i : best), rows[0]);
      await this.show(this.list.id[nearest]);
    } catch (error) { this.failed(error); }
  }

  turn(by) {
    const found = this.list?.id.indexOf(this.id) ?? -1;
    const next = found < 0 ? undefined : this.list.id[found + by];
    if (next) this.show(next);
  }

  async show(id) {
    const asked = ++this.asked;
    this.id = id;
    this.abort.abort(); this.abort = new AbortController();
    try {
      const found = await this.ask("episode", { evaluation: id, kind: this.kind });
      if (asked !== this.asked || this.dead) return;
      this.take(found);
      this.draw(asked);
    } catch (error) { this.failed(error); }
  }

  failed(error) {
    if (this.dead || error.name === "AbortError") return;
    this.clear(error.message);
  }

  clear(text) {
    this.film.clear(); this.episode = null; this.play(false);
    this.picture.style.display = "none"; this.caption.textContent = text; this.allow.hidden = true;
    this.marks.replaceChildren(); this.step.textContent = ""; this.change.hidden = true;
  }

  // ---- numbers --------------------------------------------------------------------------------
  take(found) {
    this.clear("");
    this.episode = found;
    this.title.textContent = `Evaluation at ${durationText(found.wall_s)}, ${numberText(found.updates)} updates: mean return ${numberText(found.return_mean)} of ${found.played} episodes`;
    for (const [kind, node] of Object.entries(this.kinds)) {
      const one = found.kinds.find((each) => each.kind === kind);
      node.textContent = one ? `${kind} ${numberText(one.return)}` : kind;
      node.disabled = !one;
      node.setAttribute("aria-pressed", String(kind === found.kind));
    }
    this.slider.max = found.length;
    for (const mark of found.marks) {
      const line = make(this.marks, mark.step === null ? "div" : "button", mark.step === null ? "" : "sz-link", mark.text);
      if (mark.step !== null) line.onclick = () => { this.play(false); this.go(mark.step); };
    }
    this.change.hidden = !found.change;
    if (found.change) {
      this.change.replaceChildren();
      make(this.change, "summary", "sz-strong", found.change.title);
      for (const text of found.change.sentences) make(this.change, "div", "", text);
    }
    this.axis.zoom = null;
    found.strips.forEach((strip, i) => this.strip(strip, i, i === found.strips.length - 1));
    for (const extra of this.strips.splice(found.strips.length)) { extra.chart.dispose(); extra.box.remove(); }
    this.go(0);
    this.play(true);
    window.__episode = { id: this.id, kind: found.kind, numbers_ms: performance.now() - this.opened };
  }

  // A chart of some of a strip's lines; the values at the cursor stand beside their names.
  strip(found, place, last) {
    let strip = this.strips[place];
    if (!strip) {
      const box = make(this.right, "div", "sz-player-strip");
      strip = this.strips[place] = { box, head: make(box, "div", "sz-head"), keys: make(box, "div", "sz-keys"), from: 0 };
      strip.name = make(strip.head, "div", "sz-title");
      strip.note = make(strip.head, "div", "sz-caption");
      strip.menu = make(strip.head, "select", "sz-select");
      const div = make(box, "div", "sz-plot");
      strip.chart = new Chart(div, {
        height: STRIP_PX, bottom: 18, xTitle: () => "", yRange: null, colours: this.look, axis: this.axis, marks: () => this.episode?.marks.filter((mark) => mark.step > 0).map((mark) => ({ x: mark.step, level: "info" })) ?? [],
        onPick: (x) => { this.play(false); this.go(Math.round(x)); }, onRead: (rows) => this.read(strip, rows),
      });
      strip.menu.onchange = () => { strip.from = Number(strip.menu.value); this.lines(strip); };
    }
    strip.found = found;
    strip.name.textContent = found.title; strip.note.textContent = found.note ?? "";
    strip.menu.setAttribute("aria-label", `lines of ${found.title}`);
    const pages = Math.ceil(found.lines.length / found.most);
    if (strip.menu.length !== pages) {
      strip.menu.replaceChildren(); strip.from = 0;
      for (let page = 0; page < pages; page++) make(strip.menu, "option", "", `${page * found.most} to ${Math.min(found.lines.length, (page + 1) * found.most) - 1}`).value = page * found.most;
    }
    strip.menu.hidden = pages < 2;
    strip.chart.options.bottom = last ? 34 : 18; strip.chart.options.xTitle = () => (last ? "env step" : "");
    strip.chart.div.style.height = `${STRIP_PX + (last ? 16 : 0)}px`;
    this.lines(strip);
  }

  lines(strip) {
    const { lines, first, most } = strip.found, chosen = lines.slice(strip.from, strip.from + most);
    strip.keys.replaceChildren();
    strip.values = new Map();
    const many = [...this.colours, "#999999", "#F0E442"];
    const traces = chosen.map((line, i) => {
      const item = make(strip.keys, "span", ""), colour = many[i % many.length];
      make(item, "i", "").style.background = this.look().paint(colour);
      make(item, "span", "", `${line.name} `);
      const y = first ? [null, ...line.y] : line.y;  // step 0 is the reset
      const trace = { name: line.name, colour, width: 1.3, x: y.map((_, k) => k), y };
      strip.values.set(trace.name, make(item, "span", "sz-strong", ""));
      return trace;
    });
    strip.chart.show(traces);
  }

  read(strip, rows) {
    for (const [trace, i] of rows) {
      const node = strip.values?.get(trace.name), text = shortText(trace.y[i]);
      if (node && node.textContent !== text) node.textContent = text;
    }
  }

  // ---- time -----------------------------------------------------------------------------------
  go(step) {
    const last = this.episode?.length ?? 0;
    this.at = Math.max(0, Math.min(last, step));
    const whole = Math.floor(this.at);
    this.axis.read(whole);
    if (Number(this.slider.value) !== whole) this.slider.value = whole;
    const text = this.episode ? `step ${whole} of ${last}` : "";
    if (this.step.textContent !== text) this.step.textContent = text;
    this.film.paint(this.at);
  }

  play(on) {
    this.playing = on && !!this.episode;
    this.toggle.textContent = this.playing ? "Pause" : "Play";
    cancelAnimationFrame(this.ticking);
    if (!this.playing) return;
    if (this.at >= this.episode.length) this.go(0);
    let before = performance.now();
    const tick = (now) => {
      if (!this.playing || this.dead) return;
      const next = Math.min(this.film.end, this.at + (Math.min(250, now - before) / 1000) * this.episode.fps * Number(this.speed.value));
      before = now;
      if (next > this.at) this.go(next);
      if (this.at >= this.episode.length) { this.play(false); return; }
      this.ticking = requestAnimationFrame(tick);
    };
    this.ticking = requestAnimationFrame(tick);
  }

  // ---- pictures -------------------------------------------------------------------------------
  async draw(asked, trust) {
    try {
      const module = await this.film.load(this.episode, this.abort.signal, (text) => { if (asked === this.asked) this.caption.textContent = text; }, trust);
      if (module && asked === this.asked) this.untrusted(asked, module);
    } catch (error) {
      if (asked === this.asked && error.name !== "AbortError") this.caption.textContent = `No pictures: ${error.message}`;
    }
  }

  // The code of a run's own module runs only if whoever looks wants that.
  untrusted(asked, module) {
    this.caption.textContent = `Pictures need the module ${module}, whose code would run on this machine.`;
    this.allow.textContent = `Trust ${module} and draw`;
    this.allow.hidden = false;
    this.allow.onclick = () => { this.allow.hidden = true; this.draw(asked, module); };
  }

  shown(step) {
    this.picture.style.display = "";
    this.picture.setAttribute("aria-label", `the agent after ${step} env steps`);
    const seen = window.__episode;
    if (!seen) return;
    seen.shown_step = step; seen.pictures = (seen.pictures ?? 0) + 1;
    if (seen.pictures === 2) seen.moving_ms = performance.now() - this.opened;
  }

  recolour() { for (const { chart, found } of this.strips) if (found) chart.touch(); }

  leave() { this.play(false); this.asked += 1; this.abort?.abort(); this.abort = null; }

  dispose() { this.dead = true; this.leave(); this.film.clear(); for (const { chart } of this.strips) chart.dispose(); this.box.remove(); }
}
