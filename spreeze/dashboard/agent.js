// The agent on the Live page: its live picture, or the newest recorded episode while there is none and after the run.
const PICTURE_MS = 100, REPLAY_MS = 60000, REST_MS = 1000;

class AgentCard {
  // parent: where the card is built. remember: (id, node) of texts that the server writes.
  constructor(parent, { base, run, signal, remember }) {
    this.base = base; this.run = run; this.signal = signal; this.live = true; this.dead = this.seen = false;
    this.tag = "0"; this.replayAfter = 0; this.shows = "";
    const box = make(parent, "div", "sz-card sz-picture"), head = make(box, "div", "sz-head");
    make(head, "div", "sz-title", "Agent");
    this.toggle = make(head, "button", "sz-button", "Pause");
    this.toggle.hidden = true;
    this.toggle.onclick = () => { this.paused = !this.paused; this.toggle.textContent = this.paused ? "Play" : "Pause"; this.runFilm(); };
    this.canvas = make(box, "canvas", "");
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", "latest picture of the agent");
    remember("no_picture", (this.none = make(box, "div", "sz-caption")));
    remember("picture", (this.age = make(box, "div", "sz-caption")));
    this.told = make(box, "div", "sz-caption");
    this.film = new Film(this.canvas, { base, run }, () => { this.show("film"); this.told.textContent = this.told.textContent.replace(/^next: /, ""); NS.frames += 1; });
    this.paused = matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.toggle.textContent = this.paused ? "Play" : "Pause";
    this.show("");
    this.sights = new IntersectionObserver((entries) => {
      this.seen = entries.at(-1).isIntersecting;
      if (this.seen) this.wake();
    });
    this.sights.observe(box);
  }

  dispose() { this.dead = true; clearTimeout(this.timer); this.stop(); this.sights.disconnect(); }

  // What the card shows: nothing yet, the live picture or a film of a recorded episode.
  show(what) {
    if (this.shows === what && this.canvas.className) return;
    this.shows = what;
    this.canvas.className = what ? "sz-painted" : "";
    this.none.style.display = what ? "none" : "";
    this.age.style.display = what === "live" ? "" : "none";
    this.toggle.hidden = what !== "film";
  }

  // News of the run each second. `evaluations` says how many there were.
  news(live, evaluations) {
    if (this.live !== live) this.replayAfter = 0;  // it has ended: its last episode
    this.live = live;
    if (evaluations && this.seen && this.asked && !(live && this.shows === "live") && performance.now() >= this.replayAfter) this.replay();
  }

  wake() { if (!this.busy && !this.dead) { clearTimeout(this.timer); this.picture(); } this.runFilm(); }

  // ---- live -----------------------------------------------------------------------------------
  // The server answers as soon as there is a newer picture, or after a second without one.
  async picture() {
    if (this.dead || document.hidden || !this.seen) return;  // woken when it is seen again
    const begun = performance.now();
    let pause = 2000;
    this.busy = true;
    try {
      const query = new URLSearchParams({ run: this.run, after: this.tag });
      NS.requests += 1;
      const reply = await fetch(`${this.base}/live.jpg?${query}`, { signal: this.signal, cache: "no-store" });
      this.asked = true;
      if (reply.status === 200) {
        this.tag = reply.headers.get("X-Picture") ?? "0";
        const bitmap = await createImageBitmap(await reply.blob());
        if (this.dead || (!this.live && this.shows === "film")) bitmap.close();
        else { this.stop(); paintBitmap(this.canvas, bitmap); this.show("live"); NS.frames += 1; }
      }
      if (this.live) pause = Math.max(10, PICTURE_MS - (performance.now() - begun));
    } catch (error) {
      if (this.dead || error.name === "AbortError") return;
    } finally { this.busy = false; }
    this.timer = setTimeout(() => this.picture(), pause);
  }

  // ---- recorded -------------------------------------------------------------------------------
  stop() { this.abort?.abort(); this.abort = null; this.film.clear(); this.episode = null; this.told.textContent = ""; cancelAnimationFrame(this.ticking); clearTimeout(this.resting); }

  // Shows the median episode of the newest recorded evaluation, over and over; without a live picture a newer one each minute.
  async replay() {
    this.replayAfter = performance.now() + (this.live ? REPLAY_MS : Infinity);
    try {
      const { id, t } = await answer(this.base, "episodes", { run: this.run }, { signal: this.signal });
      if (!id.length) { if (this.live) this.replayAfter = performance.now() + 2000; return; }  // the evaluation is there before its episodes
      const episode = await answer(this.base, "episode", { run: this.run, evaluation: id.at(-1), kind: "median" }, { signal: this.signal });
      if (this.dead || (this.live && this.shows === "live")) return;
      this.stop();
      this.abort = new AbortController(); this.episode = episode; this.at = 0;
      const of = episode.kinds.find((each) => each.kind === episode.kind)?.return;
      const told = `recorded at ${durationText(t.at(-1))}: median episode, return ${numberText(of)}`;
      this.runFilm();
      const needed = await this.film.load(episode, this.abort.signal, (text) => { this.told.textContent = (this.shows === "film" ? "" : "next: ") + (text ? `${told} (${text})` : told); });
      if (!needed) return;
      this.episode = null;
      this.told.textContent = `Recorded episodes are drawn once you trust ${needed}; a click on the return shows their numbers.`;
    } catch (error) {
      if (this.dead || error.name === "AbortError") return;
      this.episode = null;
      this.told.textContent = this.shows === "live" ? "" : `No pictures of the recorded episode: ${error.message}`;
    }
  }

  runFilm() {
    cancelAnimationFrame(this.ticking); clearTimeout(this.resting);
    if (!this.episode || this.paused || this.dead) return;
    let before = performance.now();
    const tick = (now) => {
      const { episode } = this;
      if (!episode || this.paused || !this.seen || this.dead) return;
      if (this.at >= episode.length) { this.resting = setTimeout(() => { this.at = 0; this.runFilm(); }, REST_MS); return; }
      this.at = Math.min(this.film.end, episode.length, this.at + (Math.min(250, now - before) / 1000) * episode.fps);
      before = now;
      this.film.paint(this.at);
      this.ticking = requestAnimationFrame(tick);
    };
    this.ticking = requestAnimationFrame(tick);
  }
}
