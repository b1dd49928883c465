// Which charts of the Live page are shown, and where: pinned ones first; hidden ones, and those that a search does not
// match, not at all. What is pinned and hidden is kept in this browser.
const BOARD = "spreeze-charts";

class ChartBoard {
  constructor(host) {
    this.host = host; this.cards = []; this.groups = new Map(); this.wanted = ""; this.kept = { pinned: [], hidden: [] };
    try { Object.assign(this.kept, JSON.parse(localStorage.getItem(BOARD) ?? "{}")); } catch { /* no storage here */ }
    this.grid("Pinned");
  }

  // The grid of a group of charts, made at first; the group is shown with its first chart.
  grid(name, machine) {
    if (!this.groups.has(name)) {
      const box = make(this.host, "div", "sz-group");
      box.style.display = "none";
      make(box, "div", "sz-group-title", name);
      machine?.(box);
      this.groups.set(name, { box, grid: make(box, "div", "sz-grid") });
    }
    return this.groups.get(name).grid;
  }

  // The search, and the button that shows hidden charts again.
  tools(box) {
    const search = make(box, "input", "sz-search");
    search.type = "search"; search.placeholder = "find a chart";
    search.setAttribute("aria-label", "find a chart by its title or group");
    search.oninput = () => { this.wanted = search.value.trim().toLowerCase(); this.arrange(); };
    this.restore = make(box, "button", "sz-link");
    this.restore.onclick = () => this.keep("hidden", []);
    this.arrange();
  }

  // Adds a card with its buttons.
  add(card) {
    this.cards.push(card);
    const { key, title } = card.spec, button = (sign, text, act) => {
      const made = make(card.head, "button", "sz-act", sign);
      made.title = text;
      made.setAttribute("aria-label", `${title}: ${text}`);
      made.onclick = act;
      return made;
    };
    card.pin = button("\u2605", "pin above all others", () => this.keep("pinned", toggled(this.kept.pinned, key)));
    button("\u2715", "hide", () => this.keep("hidden", [...this.kept.hidden, key]));
  }

  keep(list, keys) {
    this.kept[list] = keys;
    try { localStorage.setItem(BOARD, JSON.stringify(this.kept)); } catch { /* no storage here */ }
    const focused = document.activeElement;
    this.arrange(true);
    focused?.focus?.({ preventScroll: true });
  }

  // Called when a choice changes, with all charts then in their order, and when a chart gets its first number.
  arrange(anew = false) {
    const { pinned, hidden } = this.kept, filled = new Set();
    for (const { spec, box, chart, pin } of this.cards) {
      const name = pinned.includes(spec.key) ? "Pinned" : spec.group, grid = this.grid(name);
      if (anew || box.parentElement !== grid) grid.appendChild(box);
      pin.setAttribute("aria-pressed", String(name === "Pinned"));
      const shown = chart && !hidden.includes(spec.key) && `${spec.title} ${spec.group}`.toLowerCase().includes(this.wanted);
      box.style.display = shown ? "" : "none";
      if (shown) filled.add(name);
    }
    for (const [name, { box }] of this.groups) box.style.display = filled.has(name) ? "" : "none";
    if (this.restore) this.restore.textContent = hidden.length ? `show ${hidden.length} hidden` : "";
  }
}

const toggled = (keys, key) => (keys.includes(key) ? keys.filter((each) => each !== key) : [...keys, key]);
