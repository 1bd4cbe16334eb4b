// The page over the boxes of a fleet: the last load report of each, read once a second.

import { adminKey, polled } from "./feed.js";
import { OWNERS, bytes, count, duration, el, percent } from "./format.js";

const PERIOD_MS = 1000;
const HIDDEN_PERIOD_MS = 10000;
const ROWS = 100;
const TARGET = 0.9;
const part = (id) => document.getElementById(id);
let boxes = [], order = "use", timer, lastAnswer = 0;

const met = (box) => Math.min(1, ...Object.values(box.report?.met ?? {}));
// The first two begin with boxes that do not answer.
const ORDERS = {
  use: (a, b) => (b.report?.use ?? 2) - (a.report?.use ?? 2),
  met: (a, b) => (a.report ? met(a) : -1) - (b.report ? met(b) : -1),
  name: (a, b) => a.name.localeCompare(b.name),
};
const levelOfUse = (use) => (use >= 0.95 ? "bad" : use >= 0.8 ? "warn" : "good");
const levelOfMet = (share) => (share == null ? "none" : share >= TARGET ? "good" : share >= TARGET - 0.1 ? "warn" : "bad");
const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
const names = (key) => [...new Set(boxes.flatMap((box) => Object.keys(box.report?.[key] ?? {})))].sort();
const plural = (number, name) => `${count(number)} ${name}${number === 1 ? "" : name.endsWith("x") ? "es" : "s"}`;

function card(name, goal, share, level, caption, live) {
  return el("article.card", { "data-level": level }, el("span.name", {}, name), el("span.goal", {}, goal),
    el("span.share", {}, share), el("span.caption", {}, caption), el("span.live", {}, live));
}

function kindCard(kind) {
  const own = boxes.filter((box) => box.kind === kind), answering = own.filter((box) => box.report);
  const uses = answering.map((box) => box.report.use), busiest = uses.length ? Math.max(...uses) : null;
  return card(`Kind ${kind}`, [...new Set(answering.flatMap((box) => Object.keys(box.report.models)))].join(" · ") || "no model is served",
    `${count(answering.length)}/${count(own.length)}`, answering.length < own.length ? "bad" : "good", "boxes answer", busiest == null ? "" : `use ${percent(mean(uses))}, busiest ${percent(busiest)}`);
}

function classCard(name) {
  const shares = boxes.map((box) => box.report?.met[name]).filter((share) => share != null);
  const worst = Math.min(...shares);
  return card(name, "objectives met in the last minute", percent(mean(shares), 1), levelOfMet(mean(shares)), `mean of ${plural(shares.length, "box")}`, `worst box ${percent(worst, 1)}`);
}

const pairs = (values, text) => Object.entries(values).map(([name, value]) => el("div", {}, el("small", {}, OWNERS[name] ?? name), " ", text(value)));

function row(box) {
  const link = el("a", { href: `${box.url}/dashboard/`, title: box.name }, new URL(box.url).host);
  if (!box.report) return el("tr", {}, el("th", { scope: "row" }, link), el("td", {}, box.kind), el("td", {}, el("span.badge", { "data-level": "bad" }, "no answer")), el("td", { colspan: 5 }, "It gets no requests until it answers."));
  const { models, owners, use, met: shares } = box.report;
  const serves = Object.keys(models).length > 0;
  return el("tr", {}, el("th", { scope: "row" }, link), el("td", {}, box.kind),
    el("td", {}, el("span.badge", { "data-level": serves ? "good" : "bad" }, serves ? "serves" : "no model")),
    el("td", {}, el("div.scale", { "data-level": levelOfUse(use), size: use, at: 1 }), el("small", {}, percent(use))),
    el("td", {}, ...Object.entries(shares).map(([name, share]) => el("div", {}, el("small", {}, name), " ", el("b", { "data-level": levelOfMet(share) }, percent(share, 1))))),
    el("td", {}, ...pairs(owners, ({ ttft_ms: byClass }) => span(Object.values(byClass)))),
    el("td", {}, ...pairs(owners, ({ ahead_ms: ms }) => duration(ms))),
    el("td", {}, ...pairs(owners, ({ free }) => bytes(free))));
}

/** The shortest and the longest forecast of the classes. */
function span(times) {
  const least = duration(Math.min(...times)), most = duration(Math.max(...times));
  return least === most ? least : `${least} to ${most}`;
}

function cell(box) {
  const use = box.report?.use, text = `${new URL(box.url).host}, ${box.kind}: ${use == null ? "no answer" : percent(use)}`;
  return el("a", { href: `${box.url}/dashboard/`, title: text, "aria-label": text, "data-level": use == null ? "none" : levelOfUse(use), "data-silent": use == null, size: use ?? 0 });
}

const HEADS = ["box", "kind", "state", "utilisation", "met, last minute", "forecast of the first token", "work ahead", "free memory"];

function draw() {
  const { href } = document.activeElement, within = document.activeElement.closest("#cells, #boxes");
  const kinds = [...new Set(boxes.map((box) => box.kind))], answering = boxes.filter((box) => box.report).length;
  boxes.sort(ORDERS[order]);
  part("models").textContent = `${count(answering)} of ${plural(boxes.length, "box")} answer`;
  part("classes").replaceChildren(...kinds.map(kindCard), ...names("met").map(classCard));
  part("cells").replaceChildren(...boxes.map(cell));
  part("shown").textContent = boxes.length > ROWS ? `The first ${ROWS} of ${count(boxes.length)}; a box opens its own dashboard.` : "A box opens its own dashboard.";
  part("boxes").replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ...HEADS.map((head) => el("th", { scope: "col" }, head)))), el("tbody", {}, ...boxes.slice(0, ROWS).map(row))));
  [...(within?.querySelectorAll("a") ?? [])].find((link) => link.href === href)?.focus({ preventScroll: true });
}

function failed(error) {
  if (error.status === 401 || error.status === 403) {
    if (error.status === 403 || part("key").dataset.tried) part("why").textContent = error.message;
    adminKey.forget();
    lock(true);
    show("wait", "locked");
    part("key").focus();
    return;
  }
  const silent = lastAnswer ? `no answer for ${count(Math.round((Date.now() - lastAnswer) / 1000))} s` : "no answer";
  show("bad", `${silent}: ${error.message}`);
}

function lock(isLocked) {
  part("unlock").hidden = !isLocked;
  part("board").hidden = part("forget").hidden = isLocked;
}

function show(state, text) {
  part("state").dataset.state = state;
  part("state").textContent = text;
}

async function poll() {
  clearTimeout(timer);
  try {
    ({ boxes } = await polled("boxes"));
    lastAnswer = Date.now();
    lock(false);
    show("live", "live");
    draw();
  } catch (error) {
    failed(error);
    if (!part("unlock").hidden) return;
  }
  timer = setTimeout(poll, document.hidden ? HIDDEN_PERIOD_MS : PERIOD_MS);
}

function setOrder(name) {
  order = name;
  for (const button of part("order").children) button.setAttribute("aria-pressed", String(button.dataset.order === name));
  draw();
}

document.documentElement.dataset.theme = localStorage.getItem("tandem-theme") ?? "auto";
part("order").addEventListener("click", ({ target }) => target.dataset.order && setOrder(target.dataset.order));
part("forget").addEventListener("click", () => { adminKey.forget(); location.reload(); });
part("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  adminKey.set(part("key").value);
  part("key").dataset.tried = "yes";
  part("key").value = "";
  poll();
});
document.addEventListener("visibilitychange", () => document.hidden || poll());
setOrder(order);
poll();
