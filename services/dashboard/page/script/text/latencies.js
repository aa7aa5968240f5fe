// Latencies as columns of a table.

import { NONE, seconds } from "./format.js";
import { plain } from "./visible.js";

export const TITLES = { rollout: "Rollout", send: "Send", queue: "Queue", train: "Train", commit: "Commit", call: "Call", http: "HTTP" };

/** Return a duration of a row: a hop between two clocks is no better known than they agree. */
export function duration(row, value) {
  if (value === null || value === undefined) return NONE;
  return row.clock_error_s > 0 && value < row.clock_error_s ? `< ${seconds(row.clock_error_s)}` : seconds(value);
}

export const PERCENTILES = [
  { title: "p50", number: true, value: (row) => duration(row, row.p50_s) },
  { title: "p95", number: true, wide: true, value: (row) => duration(row, row.p95_s) },
  { title: "p99", number: true, value: (row) => duration(row, row.p99_s) },
  { title: "p99.9", number: true, wider: true, value: (row) => duration(row, row.p999_s) },
];

export const SLOWEST = [
  { title: "Slowest", number: true, wide: true, value: (row) => duration(row, row.slowest_s) },
  { title: "Its group", wide: true, mono: true, class: "id-cell", value: (row) => plain(row.slowest_id ?? "", 48) },
];
