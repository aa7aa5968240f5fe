// Elements, made without markup: text is only ever text.

/** Return an element. `options` are attributes, besides `class`, `text`, `on` (listeners) and `data`. */
export function el(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") node.className = value;
    else if (name === "text") node.textContent = value;
    else if (name === "on") for (const [type, listen] of Object.entries(value)) node.addEventListener(type, listen);
    else if (name === "data") Object.assign(node.dataset, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

/** Return an element of a drawing. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Set a text, if it differs: an unchanged node costs no layout and is not announced again. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Set or remove an attribute, if it differs. */
export function setAttribute(node, name, value) {
  if (value === null || value === undefined || value === false) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
  } else if (node.getAttribute(name) !== String(value)) {
    node.setAttribute(name, String(value));
  }
}

/** Show or hide a node. */
export function show(node, isShown) {
  if (node.hidden === isShown) node.hidden = !isShown;
}

/** Make the children of a node those of `items`: kept by key, made by `make(item)`, renewed by `renew(node, item)`. */
export function reconcile(parent, items, keyOf, make, renew) {
  const old = new Map();
  for (const child of [...parent.children]) old.set(child.reconcileKey, child);
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let node = old.get(key);
    if (node === undefined) {
      node = make(item);
      node.reconcileKey = key;
    } else {
      old.delete(key);
    }
    renew(node, item);
    if (node === place) place = place.nextElementSibling;
    else parent.insertBefore(node, place);
  }
  for (const node of old.values()) node.remove();
}
