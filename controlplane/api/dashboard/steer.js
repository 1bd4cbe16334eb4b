// Changes of the server: the configuration, tried before it is applied; a hypothetical request; drain.

import { decision, facts } from "./explain.js";
import { admin } from "./feed.js";
import { bytes, count, el } from "./format.js";

const MINUTE_MS = 60000;
// What happens to an applied change: the query parameters of PUT /admin/config, and what the server does then.
const AFTERWARDS = {
  keep: ["Keep it", () => ({}), () => ""],
  for: ["Undo it after the time", (ms) => ({ for_ms: ms }), (minutes) => `The server undoes it after ${minutes} min.`],
  guard: ["Undo it if a class loses the points within the time", (ms, points) => ({ guard_ms: ms, drop: points }),
    (minutes, points) => `The server undoes it if a class loses more than ${points} points within ${minutes} min.`],
};
const panel = document.getElementById("steer");
const opener = document.getElementById("steer-open");
const text = (value) => (value === undefined ? "none" : JSON.stringify(value));
const field = (label, input) => {
  // Otherwise the options of a select would be part of its name.
  input.setAttribute("aria-label", label);
  return el("label.field", {}, el("span", {}, label), input);
};
const button = (label, onclick, more = {}) => el("button", { type: "button", onclick, ...more }, label);
const number = (name, value, more = {}) => el("input", { type: "number", name, value, min: "1", step: "any", required: true, ...more });
const select = (name, options, onchange) => el("select", { name, onchange }, ...options.map(([value, label]) => el("option", { value }, label)));

export class Steering {
  constructor(feed) {
    this.feed = feed;
    opener.addEventListener("click", () => (panel.hidden ? this.open() : this.close()));
    addEventListener("keydown", (event) => event.key === "Escape" && !panel.hidden && this.close());
  }

  open() {
    panel.replaceChildren(
      el("header", {}, el("h2", {}, "Change"), el("code", {}), button("✕", () => this.close(), { "aria-label": "Close" })),
      this.configuration(), this.hypothetical(), this.maintenance());
    panel.hidden = false;
    opener.setAttribute("aria-expanded", "true");
    panel.querySelector("textarea").focus();
  }

  close() {
    panel.hidden = true;
    opener.setAttribute("aria-expanded", "false");
    opener.focus();
  }

  configuration() {
    const part = el("textarea", { name: "part", rows: "7", spellcheck: "false", placeholder: "classes:\n  batch: {ttft_ms: 60000}" });
    const then = select("then", Object.entries(AFTERWARDS).map(([key, [label]]) => [key, label]), () => shownTimes());
    const minutes = number("minutes", 60), points = number("points", 3, { min: "0", max: "100" });
    const times = field("Time, minutes", minutes), drop = field("Points of attainment", points);
    const result = el("div.outcome", { role: "status" });
    const applying = button("Apply", () => run(), { disabled: true });
    let pending = null, latest = null;

    const shownTimes = () => {
      times.hidden = then.value === "keep";
      drop.hidden = then.value !== "guard";
    };
    const outdated = () => { pending = latest = null; applying.disabled = true; };
    const attempt = async (change) => {
      outdated();
      latest = change;
      try {
        const plan = await admin(change.path({ dry_run: true }), change.request());
        // The text was edited, or another change was tried, before this answer came.
        if (latest !== change) return;
        result.replaceChildren(...planned(plan, "Would change"));
        applying.disabled = !Object.keys(plan.applied).length;
        pending = { ...change, etag: plan.etag };
      } catch (error) {
        if (latest === change) result.replaceChildren(el("p.refused", {}, error.message));
      }
    };
    const run = async () => {
      const change = pending;
      outdated();
      try {
        // The version that was tried: another change since then is not overwritten unseen.
        const more = change.more();
        const made = await admin(change.path(more), change.request({ "if-match": change.etag }));
        const said = el("p", {}, `Version ${made.version} is in force. `, change.note());
        result.replaceChildren(said, ...planned(made, "Changed"));
        // It is applied, whatever this answer is.
        if (more.guard_ms) said.append(await notJudged(made.version).catch((error) => ` Which classes are judged is unknown: ${error.message}`));
      } catch (error) {
        result.replaceChildren(el("p.refused", {}, error.message));
      }
    };
    const path = (name) => (query) => `${name}?${new URLSearchParams(query)}`;
    const put = () => attempt({
      path: path("config"),
      request: (headers) => ({ method: "PUT", body: part.value, headers: { "content-type": "application/yaml", ...headers } }),
      more: () => AFTERWARDS[then.value][1](MINUTE_MS * minutes.value, points.value),
      note: () => AFTERWARDS[then.value][2](minutes.value, points.value),
    });
    const back = () => attempt({
      path: path("config/rollback"), request: (headers) => ({ method: "POST", headers }), more: () => ({}), note: () => "",
    });
    part.addEventListener("input", outdated);
    shownTimes();
    return el("section", {}, el("h3", {}, "Configuration"),
      el("p.note", {}, "A part of the YAML, or a whole configuration. It is tried first: what would change, and what needs a restart."),
      field("Part of the configuration", part), field("Afterwards", then), el("div.pair", {}, times, drop),
      el("p.actions", {}, button("Try", put), applying, button("Try undoing the last change", back)), result);
  }

  hypothetical() {
    const { models, classes } = this.feed.about;
    const names = Object.values(models).flat();
    const model = select("model", names.map((name) => [name, name]));
    const tokens = number("tokens", 500, { step: "1" }), most = number("most", 200, { step: "1" }), inputs = number("inputs", 1, { step: "1" });
    const chosen = select("class", [["", "default"], ...Object.keys(classes).map((name) => [name, name])]);
    const result = el("div.outcome", { role: "status" });
    const ask = async () => {
      const body = { model: model.value, prompt_tokens: Number(tokens.value), inputs: Number(inputs.value), max_tokens: Number(most.value) };
      if (chosen.value) body.service_class = chosen.value;
      try {
        const found = await admin("explain", { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" } });
        result.replaceChildren(decision(found), facts([
          ["Queue", `${count(found.queue.others)} waiting, ${count(found.queue.before_it)} of them before it`],
          ["Class", found.request.class],
        ]));
      } catch (error) {
        result.replaceChildren(el("p.refused", {}, error.message));
      }
    };
    return el("section", {}, el("h3", {}, "What would happen to a request now?"),
      el("p.note", {}, "Nothing is admitted. Inputs count for embeddings and documents, the longest output for generations."),
      field("Model", model), el("div.pair", {}, field("Tokens of the prompt or of each input", tokens), field("Longest output", most)),
      el("div.pair", {}, field("Inputs", inputs), field("Class", chosen)),
      el("p.actions", {}, button("Decide", ask)), result);
  }

  maintenance() {
    const result = el("div.outcome", { role: "status" });
    const drain = async () => {
      result.replaceChildren(el("p", {}, "Draining: new and waiting requests are rejected…"));
      try {
        await admin("drain", { method: "POST" });
        result.replaceChildren(el("p", {}, "Drained: no request runs. Only a restart admits requests again."));
      } catch (error) {
        result.replaceChildren(el("p.refused", {}, error.message));
      }
    };
    const sure = () => result.replaceChildren(
      el("p", {}, "Waiting requests are rejected, running ones end, and only a restart admits requests again. "), button("Drain now", drain));
    return el("section", {}, el("h3", {}, "Maintenance"), el("p.actions", {}, button("Drain…", sure)), result);
  }
}

/** Names the classes that the guard of a version will not judge, since too few of their requests ended before. */
async function notJudged(version) {
  const { guard } = await admin("config");
  if (guard?.version !== version) return "";
  const few = guard.not_judged.filter((name) => (guard.before[name]?.requests ?? 0) < guard.fewest_requests);
  return few.length ? ` Not judged, with fewer than ${guard.fewest_requests} requests in the time before: ${few.join(", ")}.` : "";
}

/** The outcome of a change key by key. */
function planned(plan, words) {
  const keys = (title, found) => (Object.keys(found).length ? [el("p", {}, el("b", {}, title)), el("ul", {}, ...Object.entries(found).map(([key, each]) =>
    el("li", {}, el("code", {}, key), `: ${text(each.from)} → ${text(each.to)}`, each.reason ? el("p.note", {}, each.reason) : null)))] : []);
  const workers = Object.entries(plan.workers?.models ?? {}).map(([model, each]) =>
    el("li", {}, el("code", {}, model), `: worker ${each.action}${each.weight_bytes ? `, ${bytes(each.weight_bytes)} of weights` : ""}`));
  const found = [...keys(words, plan.applied), ...keys("Needs a restart", plan.needs_restart)];
  return [...(found.length ? found : [el("p", {}, "No key changes.")]), workers.length ? el("ul", {}, ...workers) : ""];
}
