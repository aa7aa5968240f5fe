// Numbers as text, each with its unit. A missing number is a dash.

export const NONE = "–";

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** Return a count with separators: `12,345`. */
export function count(value) {
  return isNumber(value) ? WHOLE.format(value) : NONE;
}

/** Return a number with about `digits` significant digits: `0.00123`, `0.123`, `12.3`, `1,234`. */
export function figure(value, digits = 3) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-4 || size >= 1e9) return value.toExponential(Math.max(0, digits - 1));
  const decimals = Math.max(0, Math.min(8, digits - 1 - Math.floor(Math.log10(size))));
  return new Intl.NumberFormat("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals }).format(value);
}

/** Return a number with fixed decimals. */
export function fixed(value, decimals = 2) {
  return isNumber(value) ? value.toFixed(decimals) : NONE;
}

/** Return a rate: `12.3/s`. */
export function rate(value, unit = "") {
  return isNumber(value) ? `${value >= 100 ? count(value) : figure(value, 2)}${unit ? ` ${unit}` : ""}/s` : NONE;
}

/** Return a part of one as percent. */
export function percent(part, decimals = 0) {
  return isNumber(part) ? `${(100 * part).toFixed(decimals)} %` : NONE;
}

/** Return an amount of bytes: `1.5 MB`, in powers of a thousand. */
export function bytes(value) {
  if (!isNumber(value)) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let at = 0;
  let left = value;
  while (left >= 1000 && at < units.length - 1) {
    left /= 1000;
    at += 1;
  }
  return `${at === 0 ? left : left.toPrecision(3)} ${units[at]}`;
}

/** Return a short duration with its unit: `12 µs`, `3.4 ms`, `1.20 s`, `2 min 5 s`. */
export function seconds(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${figure(value * 1e6, 3)} µs`;
  if (size < 1) return `${figure(value * 1e3, 3)} ms`;
  if (size < 100) return `${figure(value, 3)} s`;
  return clock(value);
}

/** Return a long duration: `45 s`, `12 min 05 s`, `3 h 07 min`, `2 d 4 h`. */
export function clock(value) {
  if (!isNumber(value)) return NONE;
  const whole = Math.max(0, Math.round(value));
  const two = (number) => String(number).padStart(2, "0");
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** Return a long duration for a narrow place: `6:52`, `3:07:12`, `2d 04:10`. */
export function stopwatch(value) {
  if (!isNumber(value)) return NONE;
  const whole = Math.max(0, Math.round(value));
  const two = (number) => String(number).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60)];
  if (hours >= 24) return `${Math.floor(hours / 24)}d ${two(hours % 24)}:${two(minutes)}`;
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

/** Return the time of day of a wall clock's seconds, with the date if it is another day. */
export function moment(at, now = Date.now() / 1000) {
  if (!isNumber(at) || at <= 0) return NONE;
  const date = new Date(at * 1000);
  const two = (number) => String(number).padStart(2, "0");
  const time = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  if (new Date(now * 1000).toDateString() === date.toDateString()) return time;
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${time}`;
}

/** Return `1 worker` or `3 workers`. */
export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}
