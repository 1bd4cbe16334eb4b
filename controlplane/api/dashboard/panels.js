// The class cards, the charts and the calibration panel, drawn from the samples of the feed.

import { Chart, classColor, color, faded, ownerColor } from "./charts.js";
import { OWNERS, bytes, count, duration, el, objectives, percent } from "./format.js";

const OWNER_NAMES = ["llm", "embedding"];
const PREDICTORS = {
  ttft: ["First token", (error) => duration(error * 1000)],
  length: ["Output length", (error) => `${Math.round(error)} tokens`],
  embedding_load: ["Embedding load", null],
  step_time: ["Engine step", percent],
  pass_time: ["Embedding pass", percent],
};

// More points than this say no more on a screen; beyond it samples are drawn in groups.
const POINTS = 300;
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const largest = (values) => Math.max(...values);
const DECADES = [1, 10, 100, 1000, 10000, 100000, 1000000];
const decade = (ms) => (ms < 1000 ? `${ms} ms` : `${ms / 1000} s`);

export class Panels {
  constructor(feed, view) {
    this.feed = feed;
    this.view = view;
    const marks = () => this.marks;
    const options = (more) => ({ height: 190, marks, range: (plot, low, high) => [0, Math.max(high * 1.05, 1e-9)], ...more });
    this.memory = new Chart(
      "memory", "Memory map",
      "The pool: the LLM's leases from below, the embeddings' from above, each within its quota (solid line). Dashed: the quotas before lending.",
      options({ height: 300, unit: bytes, span: 2, range: () => [0, this.pool], splits: () => [0, 0.25, 0.5, 0.75, 1].map((part) => part * this.pool) }),
    );
    this.device = new Chart(
      "device", "Device time by owner",
      "Share of each second in engine steps and embedding passes, each as long as it takes alone.",
      options({ height: 300, unit: (value) => percent(value), range: () => [0, 1] }),
    );
    this.queue = new Chart("queue", "Waiting at the gate", "Requests in the waiting queue, by class.", options({
      unit: (value) => count(Math.round(value * 10) / 10), range: (plot, low, high) => [0, Math.max(4, high * 1.1)],
    }));
    this.ttft = new Chart("ttft", "First token: predicted and actual", "Means over the first tokens of each second. Dashed and in brackets: predicted at dispatch.", options({
      unit: duration, tick: decade, isLog: true, splits: (plot) => DECADES.filter((at) => at >= plot.scales.y.min && at <= plot.scales.y.max), range: (plot, low, high) => [low < 10 ? 1 : 10, Math.max(1000, (high || 10) * 1.3)],
    }));
    this.attainment = new Chart("attainment", "Attainment over 5 minutes", "Share of ended requests that met every objective; a rejection is a miss. Dashed: the target.", options({
      unit: (value) => percent(value), range: (plot, low) => [Math.max(0, Math.min(0.8, (low ?? 1) - 0.05)), 1.02],
    }));
    this.calibration = el("div.calibration");
    document.getElementById("charts").replaceChildren(
      this.memory.element, this.device.element, this.ttft.element, this.queue.element, this.attainment.element,
      el("article.panel", { id: "chart-calibration", "data-span": 3 }, el("h2", {}, "Calibration of the predictors"),
        el("p.note", {}, "Share of outcomes within the forecast 0.9 quantile: 90 % is calibrated, and the bar ends at 100 %. Steps and passes: time over forecast time, 100 % in the middle."),
        this.calibration),
    );
  }

  /** The samples within the time window; marks are those of the same window. */
  update() {
    const { records, last } = this.feed;
    if (!last) return;
    const end = this.view.frozenAt ?? last.time, start = end - this.view.seconds;
    this.samples = records.sample.filter((one) => one.owners && one.time >= start - 2 && one.time <= end);
    if (!this.samples.length) return;
    this.window = [start, end];
    this.pool = last.pool_bytes;
    this.classes = Object.keys(this.feed.about.classes).filter((name) => last.classes[name]);
    // A new version of the configuration may lack the class, and with it the card that would show all again.
    if (!this.classes.includes(this.view.focus)) this.view.focus = null;
    this.shown = this.classes.filter((name) => !this.view.focus || this.view.focus === name);
    this.marks = [
      ...records.config.filter((one) => one.version > 1).map((one) => ({
        time: one.time, label: `v${one.version}${one.guard ? ` ${one.guard.replace("_", " ")}` : ""}`, isBad: ["rolled_back", "failed"].includes(one.guard),
      })),
      ...records.restart.map((one) => ({ time: one.time, label: `${one.part} ${one.state}`, isBad: ["down", "failed"].includes(one.state) })),
    ];
    // Groups keep their samples while the window moves, so that the lines do not flicker.
    const size = Math.max(1, Math.ceil(this.view.seconds / POINTS));
    const byTime = new Map();
    for (const one of this.samples) {
      const key = Math.floor(one.at / size);
      byTime.set(key, [...(byTime.get(key) ?? []), one]);
    }
    this.groups = [...byTime.values()];
    this.times = this.groups.map((group) => group.at(-1).time);
    this.drawCards(last);
    this.drawMemory();
    this.drawDevice();
    this.drawQueue();
    this.drawTtft();
    this.drawAttainment();
    this.drawCalibration(last.calibration);
  }

  /** One value for each group of samples: `combine` of those at `path`, or null without one. */
  column(combine, ...path) {
    return this.groups.map((group) => {
      const values = group.map((sample) => path.reduce((at, name) => at?.[name], sample)).filter((value) => value != null);
      return values.length ? combine(values) : null;
    });
  }

  /** The mean of `key` over the first tokens of a class in each group of samples, or null without one. */
  ofFirstTokens(name, key) {
    return this.groups.map((group) => {
      const found = group.map((sample) => sample.classes?.[name]).filter((one) => one?.[key] != null);
      const tokens = found.reduce((sum, one) => sum + one.first_tokens, 0);
      return tokens ? found.reduce((sum, one) => sum + one.first_tokens * one[key], 0) / tokens : null;
    });
  }

  numbers(...path) { return this.column(mean, ...path).map((value) => value ?? 0); }

  colorOf(name) { return classColor(this.classes.indexOf(name)); }

  drawCards(last) {
    const cards = this.classes.map((name) => {
      const now = last.classes[name], about = this.feed.about.classes[name];
      const burn = (key, label) => {
        const found = now[key]?.burn;
        const level = found == null ? "none" : found >= 5 ? "bad" : found > 1 ? "warn" : "good";
        return el("div.burn", { "data-level": level, title: `${count(now[key]?.ended ?? 0)} requests ended in ${label}; burn 1 uses the allowed misses up exactly` },
          el("span", {}, `burn ${label}`), el("i", { size: (found ?? 0) / 10 }), el("b", {}, found == null ? "–" : found.toFixed(1)));
      };
      const five = now["5m"], share = five?.ended ? five.met / five.ended : null;
      const level = share === null ? "none" : share >= this.feed.about.target ? "good" : share >= 0.7 ? "warn" : "bad";
      return el("button.card", {
        type: "button", color: this.colorOf(name), "aria-pressed": String(this.view.focus === name), "data-class": name,
        title: "Show only this class in the charts",
        onclick: () => this.view.setFocus(this.view.focus === name ? null : name),
      },
      el("span.name", {}, name), el("span.goal", {}, objectives(about.objectives_ms)),
      el("span.share", { "data-level": level }, percent(share, 1)),
      el("span.caption", {}, share === null ? "no request in 5 min" : `of ${count(five.ended)} in 5 min`),
      burn("5m", "5 min"), burn("1h", "1 h"),
      el("span.live", {}, el("b", {}, count(now.running)), " running ", el("b", {}, count(now.waiting)), " waiting"));
    });
    const holder = document.getElementById("classes");
    const focused = document.activeElement?.dataset?.class;
    holder.replaceChildren(...cards);
    if (focused) holder.querySelector(`[data-class="${CSS.escape(focused)}"]`)?.focus();
  }

  drawMemory() {
    const { samples, groups, pool } = this;
    const columns = [this.times], series = [], bands = [];
    const add = (values, one) => (columns.push(values), series.push(one), series.length);
    const owner = (name, key) => this.numbers("owners", name, key);
    // Stacks each class on the ones before; for the embeddings downwards from the top of the pool.
    for (const side of OWNER_NAMES) {
      const isTop = side === "embedding";
      let edge = groups.map(() => (isTop ? pool : 0));
      let previous = add(edge, { name: side, isHidden: true, color: "transparent", width: 0 });
      const names = this.classes.filter((name) => samples.some((one) => one.owners[side].held_by_class[name]));
      for (const name of names) {
        const held = this.numbers("owners", side, "held_by_class", name);
        edge = edge.map((at, index) => at + (isTop ? -held[index] : held[index]));
        const ink = this.colorOf(name), isDim = this.view.focus && this.view.focus !== name;
        const at = add(edge, { name: isTop ? `${name} (embeddings)` : name, color: ink, width: 0, value: (index) => held[index] });
        bands.push({ series: isTop ? [previous, at] : [at, previous], fill: faded(ink, isDim ? 0.1 : 0.72) });
        previous = at;
      }
    }
    const shared = owner("llm", "shared_prefix_bytes");
    if (shared.some(Boolean)) {
      add(shared, { name: "shared prefixes", color: color("ink"), width: 1, dash: [2, 3] });
    }
    const llm = owner("llm", "quota_bytes"), embedding = owner("embedding", "quota_bytes");
    const upper = add(embedding.map((size) => pool - size), { name: "embedding quota", color: ownerColor("embedding"), width: 1, value: (index) => embedding[index] });
    const lower = add(llm, { name: "LLM quota", color: color("ink"), width: 1.75 });
    bands.push({ series: [upper, lower], fill: faded(color("bad"), 0.12) });
    const owned = owner("llm", "owned_bytes");
    add(owned, { name: "before lending", color: color("muted"), dash: [5, 4], width: 1 });
    const lent = OWNER_NAMES.map((name) => owner(name, "lent_bytes"));
    add(groups.map(() => null), { name: "lent", color: color("muted"), width: 0, value: (index) => lent[0][index] + lent[1][index] });
    const withheld = this.numbers("withheld_bytes");
    add(groups.map(() => null), { name: "withheld", color: color("bad"), width: 0, value: (index) => withheld[index] });
    this.memory.draw(columns, series, { bands, window: this.window, key: `${this.pool}` });
  }

  drawDevice() {
    const values = OWNER_NAMES.map((name) => this.numbers("device", name));
    const total = values[0].map((value, index) => value + values[1][index]);
    const series = [
      { name: OWNERS.embedding, color: ownerColor("embedding"), fill: faded(ownerColor("embedding"), 0.35), value: (index) => values[1][index], width: 1 },
      { name: OWNERS.llm, color: ownerColor("llm"), fill: faded(ownerColor("llm"), 0.5), width: 1 },
    ];
    this.device.draw([this.times, total, values[0]], series, { window: this.window });
  }

  drawQueue() {
    // The last class is drawn first, so that the stack reads like the cards, first class at the bottom.
    let sum = this.groups.map(() => 0);
    const stacked = this.shown.map((name) => {
      const values = this.column(largest, "classes", name, "waiting").map((value) => value ?? 0);
      sum = sum.map((at, index) => at + values[index]);
      return { values, sum, one: { name, color: this.colorOf(name), fill: faded(this.colorOf(name), 0.45), width: 1, value: (index) => values[index] } };
    }).reverse();
    this.queue.draw([this.times, ...stacked.map(({ sum: top }) => top)], stacked.map(({ one }) => one), { window: this.window });
  }

  drawTtft() {
    const columns = [this.times], series = [];
    for (const name of this.shown) {
      const ink = this.colorOf(name);
      const latest = (values) => (index) => { for (let at = index; at >= 0; at -= 1) if (values[at] != null) return values[at]; };
      const positive = (key) => this.ofFirstTokens(name, key).map((value) => (value == null ? null : Math.max(1, value)));
      const actual = positive("ttft_ms"), predicted = positive("predicted_ttft_ms");
      if (!actual.some((value) => value !== null)) continue;
      columns.push(actual, predicted);
      const both = (index) => [latest(actual)(index), latest(predicted)(index)];
      series.push({ name, color: ink, spanGaps: true, width: 1.75, value: both, unit: ([was, said]) => `${duration(was)} (${duration(said)})` });
      series.push({ name: "predicted", isHidden: true, color: ink, stroke: faded(ink, 0.8), dash: [4, 4], spanGaps: true, width: 1 });
    }
    if (series.length === 0) { columns.push(this.groups.map(() => null)); series.push({ name: "no first token yet", color: color("muted") }); }
    this.ttft.draw(columns, series, { window: this.window });
  }

  drawAttainment() {
    const columns = [this.times], series = [];
    for (const name of this.shown) {
      columns.push(this.groups.map((group) => { const five = group.at(-1).classes[name]?.["5m"]; return five?.ended ? five.met / five.ended : null; }));
      series.push({ name, color: this.colorOf(name), spanGaps: true, width: 2 });
    }
    columns.push(this.groups.map(() => this.feed.about.target));
    series.push({ name: "target", color: color("muted"), dash: [5, 4], width: 1 });
    this.attainment.draw(columns, series, { window: this.window });
  }

  drawCalibration(found) {
    const rows = Object.entries(PREDICTORS).filter(([key]) => found?.[key]).map(([key, [title, errorText]]) => {
      const { coverage: shares, ratio: times, error: errors } = found[key];
      const entries = Object.entries(shares ?? times);
      const place = { "data-device": times && "yes" };
      if (!entries.length) return el("section", place, el("h3", {}, title), el("p.note", {}, "No outcome yet."));
      return el("section", place, el("h3", {}, title), ...entries.map(([name, value]) => {
        const isLevel = key === "embedding_load", end = times ? 2 : 1, wanted = isLevel ? Number(name) : times ? 1 : 0.9;
        const error = errors?.[name];
        return el("div.row", {},
          el("span", { title: name, color: shares && this.classes.includes(name) ? this.colorOf(name) : null }, isLevel ? `quantile ${name}` : name),
          el("i.scale", { size: value / end, at: wanted / end, "data-level": Math.abs(value - wanted) <= 0.1 ? "good" : "warn" }),
          el("b", {}, percent(value)), el("small", {}, error == null ? "" : `error ${errorText(error)}`));
      }));
    });
    // The device's models share a column, so that all fit into one row.
    const others = rows.filter((row) => !row.dataset.device);
    this.calibration.replaceChildren(...others, el("div", {}, ...rows.filter((row) => row.dataset.device)));
  }
}
