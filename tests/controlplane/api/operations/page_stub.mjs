// Stands in for the browser, so that the dashboard's modules run in Node: document, storage, fetch and uPlot.
// `page.answer(url, request)` gives the body of each answer, as a text or parsed; one with `status` is a failure.

const matches = (one, selector) => {
  const [, tag, name, value] = selector.match(/^(\w*)(?:\[([\w-]+)(?:="(.*)")?\])?$/);
  return (!tag || one.tag === tag) && (!name || (value === undefined ? name in one.attributes : one.attributes[name] === value));
};

class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], attributes: {}, listeners: {}, dataset: {}, hidden: false, value: "" });
    this.style = { setProperty() {} };
  }

  get textContent() { return this.children.map((child) => child.textContent ?? child).join(""); }
  set textContent(text) { this.children = [text]; }
  get href() { return this.attributes.href; }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  focus() { document.activeElement = this; }
  click() { return this.listeners.click({ target: this }); }
  contains(other) { return other === this || this.querySelectorAll("").includes(other); }
  querySelector(selector) { return this.querySelectorAll(selector)[0] ?? null; }

  setAttribute(name, value) {
    this.attributes[name] = `${value}`;
    if (name.startsWith("data-")) this.dataset[name.slice(5)] = `${value}`;
    if (name === "value") this.value = `${value}`;
  }

  querySelectorAll(selector) {
    const below = this.children.filter((child) => child instanceof Element);
    return below.flatMap((child) => [...(matches(child, selector) ? [child] : []), ...child.querySelectorAll(selector)]);
  }
}

const parts = new Map(), storage = new Map();
const document = {
  baseURI: "http://tandem.test/dashboard/", hidden: false, documentElement: new Element("html"), activeElement: new Element("body"),
  createElement: (tag) => new Element(tag),
  querySelectorAll: (selector) => [...parts.values()].flatMap((one) => one.querySelectorAll(selector)),
  querySelector: (selector) => document.querySelectorAll(selector)[0] ?? null,
  addEventListener() {},
  getElementById(id) {
    if (!parts.has(id)) parts.set(id, new Element("div"));
    return parts.get(id);
  },
};
const page = { answer: () => ({}), asked: [], part: document.getElementById };
const kept = { getItem: (key) => storage.get(key) ?? null, setItem: (key, value) => storage.set(key, `${value}`), removeItem: (key) => storage.delete(key) };
const globals = {
  page, document, sessionStorage: kept, localStorage: kept, location: { hash: "" }, CSS: { escape: (text) => text }, devicePixelRatio: 1,
  addEventListener() {},
  matchMedia: () => ({ addEventListener() {} }),
  getComputedStyle: () => ({ getPropertyValue: () => "#102030" }),
  ResizeObserver: class { observe() {} },
  uPlot: class {
    static sync = () => ({ key: "one" });
    cursor = { idx: null };
    setData() {}
    setScale() {}
    setSize() {}
    destroy() {}
  },
  async fetch(url, request) {
    page.asked.push(`${url}`);
    const body = await page.answer(`${url}`, request);
    return { ok: body.status === undefined, status: body.status ?? 200, json: async () => (typeof body === "string" ? JSON.parse(body) : body) };
  },
};
for (const [name, value] of Object.entries(globals)) Object.defineProperty(globalThis, name, { value, writable: true, configurable: true });
