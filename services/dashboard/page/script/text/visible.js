// Text of others made harmless to look at: what would act on the terminal, the line or the eye becomes a mark.
//
// A page that shows completions shows bytes that a policy chose. Markup does nothing in a text node; the rest is done
// here: control characters, the marks that reverse the order of a line, characters without width, and lone surrogates
// are shown by their names, and each text is isolated from the direction of its neighbours.

const NAMES = ["NUL", "SOH", "STX", "ETX", "EOT", "ENQ", "ACK", "BEL", "BS", "TAB", "LF", "VT", "FF", "CR", "SO", "SI",
  "DLE", "DC1", "DC2", "DC3", "DC4", "NAK", "SYN", "ETB", "CAN", "EM", "SUB", "ESC", "FS", "GS", "RS", "US"];

// C0 and C1 controls, soft hyphen, Arabic letter mark, fillers, zero widths and direction marks, separators of lines,
// variation selectors beyond the common ones, interlinear marks, tags, and surrogates without a partner. Terminal and
// pictures show the same ones as escapes: `HIDDEN` of schemas/printable.py.
const HIDDEN = new RegExp(
  "[\\u0000-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f\\u200b-\\u200f" +
  "\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufeff\\uffa0\\ufff0-\\ufffb\\u{e0000}-\\u{e0fff}\\ud800-\\udfff]", "gu");

// More marks than this on one character are cut: a stack of them covers the lines above.
const STACKED = /(\p{M}{4})\p{M}+/gu;

/** Return the name of a hidden character, as in `ESC` or `U+202E`. */
function nameOf(char) {
  const code = char.codePointAt(0);
  if (code < 32) return NAMES[code];
  if (code === 127) return "DEL";
  return `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

function pieces(text, keepsLines) {
  const found = [];
  let from = 0;
  for (const match of text.matchAll(HIDDEN)) {
    const isLine = keepsLines && (match[0] === "\n" || match[0] === "\t");
    if (isLine) continue;
    if (match.index > from) found.push({ text: text.slice(from, match.index) });
    found.push({ hidden: match[0] });
    from = match.index + match[0].length;
  }
  if (from < text.length) found.push({ text: text.slice(from) });
  return found;
}

/** Return text for a place that holds no elements, such as an attribute: hidden characters become `⟨ESC⟩`. */
export function plain(value, limit = 200) {
  const text = cut(String(value ?? ""), limit).replace(STACKED, "$1");
  return pieces(text, false).map((piece) => piece.text ?? `⟨${nameOf(piece.hidden)}⟩`).join("");
}

/** Return the first `limit` units of a text, never half of a surrogate pair; an ellipsis stands for the rest. */
function cut(text, limit) {
  return text.length <= limit ? text : `${head(text, limit)}…`;
}

/** Return the first `limit` units of a text, never half of a surrogate pair. */
export function head(text, limit) {
  const last = text.charCodeAt(limit - 1);
  return text.slice(0, last >= 0xd800 && last <= 0xdbff ? limit - 1 : limit);
}

/** Return an element with the text, its hidden characters as marks. `lines` keeps line breaks and tabs. */
export function visible(value, { lines = false, tag = "bdi" } = {}) {
  const node = document.createElement(tag);
  for (const piece of pieces(String(value ?? "").replace(STACKED, "$1"), lines)) {
    if (piece.text !== undefined) {
      node.append(piece.text);
    } else {
      const mark = document.createElement("span");
      mark.className = "hidden-char";
      mark.textContent = nameOf(piece.hidden);
      node.append(mark);
    }
  }
  return node;
}
