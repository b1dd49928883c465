// Pictures of a recorded episode, fetched as they come and painted at an env step; those that nobody has drawn yet are
// drawn meanwhile.
const FRAME_HEAD = 8, NOTE_STEP = 2 ** 32 - 1, DRAW_POLL_MS = 120;

// The JSON answer of a route on episodes; an Error with what it complains of.
async function answer(base, path, query, options = {}) {
  const reply = await fetch(`${base}/api/${path}?${new URLSearchParams(query)}`, { cache: "no-store", ...options });
  const found = await reply.json();
  if (found.error) throw new Error(found.error);
  return found;
}

class Film {
  // canvas: where to paint. onPaint: told of each picture.
  constructor(canvas, { base, run }, onPaint) {
    this.canvas = canvas; this.base = base; this.run = run; this.onPaint = onPaint;
    this.clear();
  }

  clear() { this.frames = []; this.painted = undefined; this.note = ""; this.coming = false; this.at = 0; }

  // The last env step that can be shown: pictures that are being drawn lead.
  get end() { return this.coming ? (this.frames.at(-1)?.step ?? 0) : Infinity; }

  // Fetches all pictures of an episode, `told` of how far they are; returns the module whose code would have to be
  // trusted, if there is one. Errors have a sentence.
  async load(episode, signal, told, trust) {
    const query = { run: this.run, evaluation: episode.id, kind: episode.frames };
    this.coming = true;
    try {
      if (!episode.drawn) {
        if (!episode.drawable) throw new Error(episode.note || "this environment does not repeat, and they were not drawn while it was played");
        const { state, module } = await answer(this.base, "episode/draw", trust ? { ...query, trust } : query, { method: "POST", signal });
        if (state === "untrusted") return module;
        told("drawing ...");
      }
      let from = 0, idle = 0, rest = new Uint8Array(0), ahead = false;
      while (!signal.aborted) {
        const reply = await fetch(`${this.base}/api/episode/frames?${new URLSearchParams({ ...query, from })}`, { signal, cache: "no-store" });
        if (!reply.ok) throw new Error(await reply.text());
        const bytes = new Uint8Array(await reply.arrayBuffer());
        from += bytes.length;
        const all = new Uint8Array(rest.length + bytes.length);
        all.set(rest); all.set(bytes, rest.length);
        rest = this.cut(all);
        if (!ahead && this.frames.length) {  // the next episode is drawn by a process that has loaded all by then
          ahead = true;
          answer(this.base, "episode/warm", { run: this.run }, { method: "POST", signal }).catch(() => {});
        }
        if (reply.headers.get("X-Done") === "1") break;
        idle = bytes.length || reply.headers.get("X-Drawing") === "1" ? 0 : idle + 1;
        if (idle > 8) throw new Error("the process that draws ended early");
        if (!this.note) told(this.frames.length ? `drawing: ${Math.round((100 * this.frames.at(-1).step) / episode.length)} %` : "drawing ...");
        if (bytes.length < 900000) await new Promise((done) => setTimeout(done, DRAW_POLL_MS));
      }
      told(this.note);
    } finally { if (!signal.aborted) this.coming = false; }
  }

  // Takes the whole records of some bytes; returns what is left.
  cut(bytes) {
    const view = new DataView(bytes.buffer);
    let start = 0;
    while (start + FRAME_HEAD <= bytes.length) {
      const step = view.getUint32(start, true), end = start + FRAME_HEAD + view.getUint32(start + 4, true);
      if (end > bytes.length) break;
      const data = bytes.subarray(start + FRAME_HEAD, end);
      if (step === NOTE_STEP) this.note = new TextDecoder().decode(data); else this.frames.push({ step, blob: new Blob([data], { type: "image/jpeg" }) });
      start = end;
    }
    this.paint(this.at);
    return bytes.slice(start);
  }

  // Paints the newest picture at an env step, one at a time.
  async paint(at) {
    this.at = at;
    if (this.painting || !this.frames.length) return;
    let low = 0, high = this.frames.length;
    while (low < high) { const middle = (low + high) >> 1; if (this.frames[middle].step <= at) low = middle + 1; else high = middle; }
    const frame = this.frames[Math.max(0, low - 1)];
    if (frame === this.painted) return;
    this.painting = true;
    try {
      const bitmap = await createImageBitmap(frame.blob);
      if (this.frames.includes(frame)) { paintBitmap(this.canvas, bitmap); this.onPaint(frame.step); } else bitmap.close();
    } catch { /* a damaged picture: the next one may be whole */ } finally { this.painted = frame; this.painting = false; }
    if (this.at !== at) this.paint(this.at);
  }
}

// A bitmap is freed at once when closed; decoded <img> elements would stay in memory, 0.3 MB a frame.
function paintBitmap(canvas, bitmap) {
  if (canvas.width !== bitmap.width || canvas.height !== bitmap.height) { canvas.width = bitmap.width; canvas.height = bitmap.height; }
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
  bitmap.close();
}
