// The page: key, time window, theme, pause; everything else is in panels, tables, explain and steer.

import { readTheme, redrawAll } from "./charts.js";
import { route } from "./explain.js";
import { Feed, adminKey, takeKey } from "./feed.js";
import { count, el } from "./format.js";
import { Panels } from "./panels.js";
import { Steering } from "./steer.js";
import { Tables } from "./tables.js";

const THEMES = ["auto", "dark", "light"];
// Seconds, as on the buttons.
const WINDOWS = [60, 300, 900];
const MOST_AGE_SECONDS = 5;
const part = (id) => document.getElementById(id);
const view = {
  seconds: Number(sessionStorage.getItem("tandem-window")) || null,
  theme: localStorage.getItem("tandem-theme") ?? "auto",
  focus: null,
  frozenAt: null,
  setFocus(name) { view.focus = name; draw(); },
};
let panels, tables, lastAnswer = 0, drawn, hasChosenWindow = view.seconds !== null;

function draw() {
  drawn = `${feed.instance} ${feed.next}`;
  panels.update();
  tables.update();
}

function changed(feed) {
  lastAnswer = Date.now();
  part("unlock").hidden = true;
  part("starting").hidden = true;
  part("board").hidden = false;
  part("forget").hidden = false;
  part("steer-open").hidden = false;
  const models = Object.values(feed.about.models).flat();
  part("models").textContent = models.join(" · ");
  const age = feed.last ? feed.now - feed.last.at : 0;
  if (age > MOST_AGE_SECONDS) showState("wait", `no samples for ${Math.round(age)} s`);
  else showState(feed.last ? "live" : "wait", feed.last ? "live" : "waiting for the first sample");
  showFaults(feed.last?.faults ?? {});
  if (!hasChosenWindow && view.frozenAt === null) fitWindow();
  // Most answers between two samples are empty.
  const newest = `${feed.instance} ${feed.next}`;
  if (view.frozenAt === null && newest !== drawn) draw();
  part("board").dataset.answers = Number(part("board").dataset.answers ?? 0) + 1;
}

/** The shortest window that holds all samples: at its start a server has few for a long one. */
function fitWindow() {
  const { sample } = feed.records, span = sample.length ? sample.at(-1).time - sample[0].time : 0;
  const fitting = WINDOWS.find((seconds) => span < seconds) ?? WINDOWS.at(-1);
  if (fitting !== view.seconds) showWindow(fitting);
}

function failed(error) {
  part("starting").hidden = error.code !== "starting";
  if (error.code === "starting") {
    part("stages").textContent = error.message;
    showState("wait", "starting");
    return;
  }
  if (error.status === 401 || error.status === 403) {
    feed.stop();
    adminKey.forget();
    part("board").hidden = true;
    part("forget").hidden = true;
    part("steer-open").hidden = true;
    part("steer").hidden = true;
    part("unlock").hidden = false;
    if (error.status === 403 || lastAnswer || part("key").dataset.tried) part("why").textContent = error.message;
    showState("wait", "locked");
    part("key").focus();
    return;
  }
  const silent = lastAnswer ? `no answer for ${count(Math.round((Date.now() - lastAnswer) / 1000))} s` : "no answer";
  showState("bad", `${silent}: ${error.message}`);
}

/** Those that are shown already stay, so that their text can be selected and is read out once. */
function showFaults(faults) {
  const key = JSON.stringify(faults);
  if (part("faults").dataset.shown === key) return;
  part("faults").dataset.shown = key;
  part("faults").replaceChildren(...Object.entries(faults).map(([name, text]) => el("p", { "data-part": name }, el("b", {}, name.replaceAll("_", " ")), text)));
}

function showState(state, text) {
  part("state").dataset.state = view.frozenAt === null ? state : "wait";
  part("state").textContent = view.frozenAt === null ? text : "paused";
}

function setTheme(theme) {
  view.theme = theme;
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("tandem-theme", theme);
  part("theme").textContent = `Theme: ${theme}`;
  redrawAll();
  if (panels) draw();
}

function setWindow(seconds) {
  hasChosenWindow = true;
  sessionStorage.setItem("tandem-window", seconds);
  showWindow(seconds);
  if (panels) draw();
}

function showWindow(seconds) {
  view.seconds = seconds;
  for (const button of part("window").children) button.setAttribute("aria-pressed", String(Number(button.dataset.seconds) === seconds));
}

const feed = new Feed(changed, failed);
part("window").addEventListener("click", ({ target }) => target.dataset.seconds && setWindow(Number(target.dataset.seconds)));
part("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(view.theme) + 1) % THEMES.length]));
part("pause").addEventListener("click", ({ target }) => {
  view.frozenAt = view.frozenAt === null ? feed.last?.time ?? null : null;
  target.setAttribute("aria-pressed", String(view.frozenAt !== null));
  showState("live", "live");
  if (view.frozenAt === null) draw();
});
part("forget").addEventListener("click", () => { adminKey.forget(); location.reload(); });
part("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  adminKey.set(part("key").value);
  part("key").dataset.tried = "yes";
  part("key").value = "";
  feed.poll().then(route);
});
// In a tab that shows the page already, another fragment loads nothing.
addEventListener("hashchange", () => takeKey() && feed.poll().then(route));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(view.theme));

readTheme();
setTheme(view.theme);
showWindow(view.seconds ?? WINDOWS[0]);
panels = new Panels(feed, view);
tables = new Tables(feed, view);
new Steering(feed);
takeKey();
feed.start();
if (adminKey.get()) route();
