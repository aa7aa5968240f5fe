// Light or dark: as the system has it, or as chosen here.

export const THEMES = [["auto", "Auto"], ["light", "Light"], ["dark", "Dark"]];

const KEY = "rolloutmq-theme";
const listeners = [];

/** Return the chosen theme. */
export function currentTheme() {
  const chosen = document.documentElement.dataset.theme;
  return chosen === "light" || chosen === "dark" ? chosen : "auto";
}

/** Choose a theme, and keep it for the next page. */
export function setTheme(theme) {
  apply(theme);
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // Without storage, for this page only.
  }
}

/** Call `draw` whenever the colours have changed: a canvas does not follow by itself. */
export function onColours(draw) {
  listeners.push(draw);
}

function apply(theme) {
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  for (const draw of listeners) draw();
}

let kept = "auto";
try {
  kept = localStorage.getItem(KEY) ?? "auto";
} catch {
  // A page from a file may have no storage.
}
apply(kept);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => listeners.forEach((draw) => draw()));

const probe = document.createElement("span");

/** Return a colour of the style sheet, by the name of its property, as a canvas takes it. */
export function colour(name) {
  if (!probe.isConnected) {
    probe.hidden = true;
    document.body.append(probe);
  }
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}
