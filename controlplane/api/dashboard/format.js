// Numbers, times and reasons in the words of the page, and elements without HTML strings.

export const REASONS = {
  no_memory: "no memory now",
  no_slot: "no free slot",
  tpot_guard: "would slow running requests past their TPOT",
  behind_others: "behind others in the queue",
  never_fits: "larger than its quota can ever be",
  slo_unattainable: "objective cannot be met now",
  device_time: "generations need the device's time more",
  queue_full: "queue is full",
  queue_timeout: "waited too long",
  rate_limited: "tenant's rate limit",
  engine_down: "engine is down",
  shutting_down: "server is shutting down",
};
export const OWNERS = { llm: "LLM", embedding: "Embedding" };
export const OBJECTIVES = { ttft: "first token", tpot: "per token", e2e: "end to end", gap: "longest gap" };

export const bytes = (value) => {
  if (value == null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = Math.abs(value), unit = 0;
  while (size >= 1024 && unit < units.length - 1) { size /= 1024; unit += 1; }
  const digits = size >= 100 || unit === 0 ? 0 : size >= 10 ? 1 : 2;
  return `${value < 0 ? "−" : ""}${size.toFixed(digits)} ${units[unit]}`;
};

export const duration = (ms) => {
  if (ms == null) return "–";
  if (ms < 1) return "<1 ms";
  if (ms < 1000) return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
  if (ms < 60000) return `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
  return `${(ms / 60000).toFixed(1)} min`;
};

export const count = (value) => (value == null ? "–" : value.toLocaleString("en-US"));
export const percent = (share, digits = 0) => (share == null ? "–" : `${(share * 100).toFixed(digits)} %`);
export const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");

/** An element: `el("p.note", {title: "x"}, "text", child)`. */
export function el(name, attributes = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) {
    if (value === false || value == null) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "color") element.style.setProperty("--color", value);
    else if (key === "size") element.style.setProperty("--size", `${(Math.min(1, Math.max(0, value)) * 100).toFixed(2)}%`);
    else if (key === "at") element.style.setProperty("--at", `${(Math.min(1, Math.max(0, value)) * 100).toFixed(2)}%`);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child != null && child !== false));
  return element;
}

export const objectives = (values) => {
  const stated = Object.entries(values ?? {}).map(([name, ms]) => `${OBJECTIVES[name]} ${duration(ms)}`);
  return stated.length ? stated.join(" · ") : "no objective";
};
