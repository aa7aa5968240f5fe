// The span of time that all charts show: the last minutes, the whole run, or what was selected in one of them.

export const SPANS = [["all", "Whole run"], ["21600", "Last 6 h"], ["3600", "Last hour"], ["600", "Last 10 min"], ["120", "Last 2 min"]];

class View {
  constructor() {
    this.span = "all";
    this.zoom = null;
    this._listeners = [];
  }

  listen(draw) {
    this._listeners.push(draw);
  }

  setSpan(span) {
    this.span = span;
    this.zoom = null;
    this._tell();
  }

  /** Show from `zoom[0]` to `zoom[1]`, in seconds of the wall clock; null is the span again. */
  setZoom(zoom) {
    this.zoom = zoom;
    this._tell();
  }

  /** Return the limits of the time axis for data from `low` to `high`. */
  limits(low, high) {
    if (this.zoom !== null) return this.zoom;
    if (low === null || high === null || low === undefined || high === undefined) return [0, 1];
    const from = this.span === "all" ? low : Math.max(low, high - Number(this.span));
    return high > from ? [from, high] : [from - 1, high + 1];
  }

  _tell() {
    for (const draw of this._listeners) draw();
  }
}

export const view = new View();
