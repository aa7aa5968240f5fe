// A run that was written into the page itself: a report. Nothing changes, and nothing can be asked of it.

import { LINK } from "./store.js";

const NATURAL = new Intl.Collator("en", { numeric: true });

export class StoredRun {
  constructor(store, data) {
    this.store = store;
    this.data = data;
    this.isLive = false;
  }

  async start() {
    this.store.takeState(this.data.state ?? {}, true);
    this.store.takeHistory({ reset: true, series: this.data.history?.series ?? [] });
    this.store.setLink(LINK.STORED, this.data.written ?? "");
  }

  async workers({ sort, order, filter, offset, limit }) {
    const all = this.data.workers ?? [];
    const wanted = filter.toLowerCase();
    const matching = all.filter((row) =>
      [row.worker, row.env, row.state, row.reason].some((text) => String(text ?? "").toLowerCase().includes(wanted)));
    const direction = order === "desc" ? -1 : 1;
    matching.sort((left, right) => {
      const [a, b] = [left[sort], right[sort]];
      if (a === b) return NATURAL.compare(left.worker, right.worker);
      if (a === null || a === undefined) return 1;
      if (b === null || b === undefined) return -1;
      return direction * (typeof a === "number" ? a - b : NATURAL.compare(String(a), String(b)));
    });
    return { version: 0, total: all.length, matching: matching.length, offset, rows: matching.slice(offset, offset + limit) };
  }

  async latencies({ by, filter }) {
    const found = this.data.latencies?.[by] ?? { by, total: 0, matching: 0, rows: [] };
    const wanted = filter.toLowerCase();
    const rows = found.rows.filter((row) => row.name.toLowerCase().includes(wanted));
    return { ...found, rows, matching: wanted ? rows.length : found.matching };
  }

  async deadList(offset, limit) {
    const all = this.data.dead ?? [];
    return { total: Math.max(all.length, this.data.state?.dead?.count ?? 0), offset, rows: all.slice(offset, offset + limit) };
  }

  async deadGroup({ group_id: id }, sequence) {
    const found = this.data.dead_groups?.[id];
    if (!found) throw new Error("the report holds no contents of this group; `rolloutmq dead show` prints them");
    return { ...found, sequences: found.sequences.filter((one) => one.index >= sequence) };
  }

  async act() {
    throw new Error("a report takes no actions");
  }
}
