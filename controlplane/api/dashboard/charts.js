// Time charts on uPlot: shared cursor, marks of configuration versions and restarts, a legend with values.

import { clock, el } from "./format.js";

const sync = uPlot.sync("tandem");
const all = new Set();
let theme = {};

const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function readTheme() {
  theme = {
    text: variable("--muted"), grid: variable("--grid"), mark: variable("--mark"), bad: variable("--bad"),
    ink: variable("--ink"), panel: variable("--panel"),
  };
}

export const classColor = (index) => variable(`--c${(index % 8) + 1}`);
export const ownerColor = (owner) => variable(`--${owner}`);
export const color = (name) => variable(`--${name}`);
export const faded = (hex, alpha) => `${hex}${Math.round(alpha * 255).toString(16).padStart(2, "0")}`;

/** Vertical marks at configuration versions and at deaths and restarts of engines and workers. */
function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.font = `600 ${10 * ratio}px system-ui, sans-serif`;
  ctx.textBaseline = "top";
  ctx.textAlign = "left";
  // A label that would cover an earlier one goes into the next row.
  const rows = [];
  for (const { x, labels, isBad } of joined(plot, marks())) {
    ctx.strokeStyle = ctx.fillStyle = isBad ? theme.bad : theme.mark;
    ctx.setLineDash([3 * ratio, 3 * ratio]);
    ctx.lineWidth = ratio;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    const measure = (text) => ctx.measureText(text).width + 8 * ratio;
    const all = labels.join(", "), label = measure(all) > bbox.width ? `${labels.length} marks` : all, width = measure(label);
    const left = Math.min(x, bbox.left + bbox.width - width);
    let row = rows.findIndex((right) => right < left);
    if (row < 0) row = rows.length;
    rows[row] = left + width;
    const top = bbox.top + row * 16 * ratio;
    ctx.fillRect(left, top, width, 14 * ratio);
    ctx.fillStyle = theme.panel;
    ctx.fillText(label, left + 4 * ratio, top + 2.5 * ratio);
  }
  ctx.restore();
}

/** The marks inside the chart by their pixel; those at nearly the same one are one line with one label. */
function joined(plot, marks) {
  const { bbox } = plot, found = [];
  for (const mark of [...marks].sort((a, b) => a.time - b.time)) {
    const x = Math.round(plot.valToPos(mark.time, "x", true)) + 0.5, last = found.at(-1);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    if (last && x - last.x <= 3 * devicePixelRatio) {
      last.labels.push(mark.label);
      last.isBad ||= mark.isBad;
    } else found.push({ x, labels: [mark.label], isBad: mark.isBad });
  }
  return found;
}

/** One chart. `options`: height, unit (value to text), tick (the same for the axis), series, bands, range, isLog, marks. */
export class Chart {
  constructor(name, title, note, options) {
    this.options = options;
    this.legend = el("div.legend");
    this.canvas = el("div.canvas", { "data-chart": name, role: "img", "aria-label": title });
    this.element = el(
      "article.panel", { id: `chart-${name}`, "data-span": options.span ?? 1 },
      el("h2", {}, title), el("p.note", {}, note), this.legend, this.canvas,
    );
    this.key = "";
    all.add(this);
    new ResizeObserver(() => this.resize()).observe(this.canvas);
  }

  resize() {
    const width = this.canvas.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: this.options.height });
  }

  /** Draws `columns` (x first) for `series`: name, color, fill, dash, show (of the legend), value. */
  draw(columns, series, { bands = [], window, key = "" }) {
    const wanted = JSON.stringify([series.map(({ name, color, dash }) => [name, color, dash]), bands, key, theme]);
    this.window = window;
    this.series = series;
    this.columns = columns;
    if (wanted !== this.key) this.rebuild(series, bands);
    this.key = wanted;
    if (!this.plot) return;
    const marks = this.options.marks().filter(({ time }) => time >= window[0] && time <= window[1]);
    this.canvas.dataset.marks = marks.map(({ label }) => label).join(", ");
    this.plot.setData(columns, false);
    this.plot.setScale("x", { min: window[0], max: window[1] });
    this.write(this.plot.cursor.idx);
  }

  rebuild(series, bands) {
    this.plot?.destroy();
    this.plot = null;
    this.canvas.replaceChildren();
    this.legend.replaceChildren();
    const { height, unit, tick = unit, range, isLog, marks, splits } = this.options;
    const axis = { stroke: theme.text, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    this.values = series.map((one) => {
      if (one.isHidden) return null;
      const value = el("b", {}, "–");
      this.legend.append(el(`span.key${one.dash ? ".dash" : ""}`, { color: one.color }, one.name, value));
      return value;
    });
    const options = {
      width: this.canvas.clientWidth || 400, height, padding: [8, 24, 0, 0], legend: { show: false },
      cursor: {
        sync: { key: sync.key, setSeries: false }, drag: { x: false, y: false },
        points: { size: 6 }, y: false,
      },
      scales: { x: { time: true, auto: false }, y: { range, distr: isLog ? 3 : 1 } },
      axes: [
        { ...axis, grid: { show: false }, size: 24, space: 66, values: (plot, splits) => splits.map((at) => clock(at)) },
        {
          ...axis, size: 66, gap: 6, space: isLog ? 18 : 34, ...(splits ? { splits } : {}), grid: { stroke: theme.grid, width: 1 },
          values: (plot, splits) => splits.map((at) => (at == null ? "" : tick(at))),
        },
      ],
      series: [
        {},
        ...series.map((one) => ({
          label: one.name, stroke: one.stroke ?? one.color, fill: one.fill, width: one.width ?? 1.5, dash: one.dash,
          spanGaps: one.spanGaps ?? false, points: { show: one.points ?? false, size: 4, fill: one.color },
        })),
      ],
      bands,
      hooks: {
        draw: [(plot) => drawMarks(plot, marks)],
        setCursor: [(plot) => this.write(plot.cursor.idx)],
      },
    };
    this.plot = new uPlot(options, this.columns, this.canvas);
  }

  /** Writes the values at the cursor, or the newest ones. */
  write(index) {
    const at = index ?? this.columns[0].length - 1;
    this.series.forEach((one, number) => {
      const value = this.values[number];
      if (value === null) return;
      const found = one.value ? one.value(at) : this.columns[number + 1]?.[at];
      const text = found == null ? "–" : (one.unit ?? this.options.unit)(found);
      if (value.textContent !== text) value.textContent = text;
    });
  }
}

export function redrawAll() {
  readTheme();
  for (const chart of all) chart.key = "";
}
