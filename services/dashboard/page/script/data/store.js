// What the page knows of the run: the sections of its state, its history, and how the connection is.
//
// Whoever draws subscribes to names and is told once per change of any of them, in the next frame in which the page is
// visible. Names are those of the sections of the state, `history`, and `link`.

/** State of the connection, by name: what the page says about the age of its numbers. */
export const LINK = Object.freeze({
  CONNECTING: "connecting",
  LIVE: "live",
  STALE: "stale",
  LOST: "lost",
  OVER: "over",
  SIGNED_OUT: "signed out",
  STORED: "stored",
});

export class Store {
  constructor() {
    this.state = {};
    this.series = new Map();
    this.link = { kind: LINK.CONNECTING, text: "", since: Date.now() / 1000 };
    this.ended = "";
    this.heardAt = 0;
    this._dirty = new Set();
    this._subscribers = [];
    this._isPlanned = false;
  }

  /** Call `draw` in a coming frame whenever one of `names` has changed. */
  subscribe(names, draw) {
    this._subscribers.push({ names: new Set(names), draw });
  }

  /** Return a section of the state, or `fallback` if nothing is known. */
  get(name, fallback = null) {
    return this.state[name] ?? fallback;
  }

  /** Return a section that is a list. */
  list(name) {
    const found = this.state[name];
    return Array.isArray(found) ? found : [];
  }

  /** Take sections of the state; `full` replaces those that are not among them. */
  takeState(sections, full) {
    const before = this.state;
    this.state = full ? { ...sections } : { ...before, ...sections };
    for (const name of Object.keys(full ? { ...before, ...sections } : sections)) this._dirty.add(name);
    this._plan();
  }

  /** Take an increment of the history; see `/api/history`. */
  takeHistory({ reset, series }) {
    if (reset) this.series.clear();
    for (const one of series ?? []) {
      const id = `${one.name}\n${one.key}`;
      const known = this.series.get(id) ?? { name: one.name, key: one.key, columns: {} };
      known.width = one.width_s;
      for (const [name, added] of Object.entries(one.columns)) {
        const kept = (known.columns[name] ?? []).slice(0, one.from);
        while (kept.length < one.from) kept.push(null);
        known.columns[name] = kept.concat(added);
      }
      this.series.set(id, known);
    }
    this._dirty.add("history");
    this._plan();
  }

  /** Return the series of a name as `[key, columns]`, by key. */
  history(name) {
    const found = [];
    for (const one of this.series.values()) if (one.name === name && one.columns.t?.length) found.push([one.key, one.columns]);
    return found.sort(([left], [right]) => (left < right ? -1 : left > right ? 1 : 0));
  }

  /** Return the columns of the only series of a name, or null. */
  only(name) {
    return this.history(name)[0]?.[1] ?? null;
  }

  setLink(kind, text = "") {
    if (this.link.kind === kind && this.link.text === text) return;
    const since = this.link.kind === kind ? this.link.since : Date.now() / 1000;
    this.link = { kind, text, since };
    this._dirty.add("link");
    this._plan();
  }

  setEnded(text) {
    this.ended = text;
    this._dirty.add("link");
    this._plan();
  }

  /** Ask for a drawing of whoever subscribed to `name`. */
  touch(name) {
    this._dirty.add(name);
    this._plan();
  }

  _plan() {
    if (this._isPlanned) return;
    this._isPlanned = true;
    requestAnimationFrame(() => {
      this._isPlanned = false;
      const dirty = this._dirty;
      this._dirty = new Set();
      for (const { names, draw } of this._subscribers) {
        if ([...names].some((name) => dirty.has(name))) draw(dirty);
      }
    });
  }
}
