// The explanation of one request: /admin/explain/ID as a panel beside the dashboard.

import { OBJECTIVES, REASONS, bytes, count, duration, el, objectives } from "./format.js";
import { admin } from "./feed.js";

const panel = document.getElementById("explain");
const LEVELS = { ADMIT: "good", ADMIT_WITH_PREEMPTION: "good", DEFER: "warn", REJECT: "bad", PREEMPTED: "warn" };
const WORDS = { ADMIT: "admitted", ADMIT_WITH_PREEMPTION: "admitted after preempting", DEFER: "deferred", REJECT: "rejected", PREEMPTED: "preempted" };
let shown = null;

const close = () => { location.hash = ""; };
const link = (id) => el("a", { href: `#explain=${encodeURIComponent(id)}` }, id);
export const facts = (pairs) => el("dl", {}, ...pairs.filter(([, value]) => value != null && value !== "–").flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));

/** Opens what the address names: `#explain=ID`. */
export async function route() {
  const id = new URLSearchParams(location.hash.slice(1)).get("explain");
  if (id === shown && id !== null) return;
  const before = shown;
  shown = id;
  panel.hidden = id === null;
  if (id === null) {
    panel.replaceChildren();
    // Back to the request that opened it, where the keyboard goes on.
    document.querySelector(`a[href="#explain=${encodeURIComponent(before ?? "")}"]`)?.focus({ preventScroll: true });
    return;
  }
  const head = el("header", {}, el("h2", {}, "Why"), el("code", {}, id), el("button", { type: "button", onclick: close, "aria-label": "Close" }, "✕"));
  panel.replaceChildren(head, el("p.note", {}, "Asking the gate…"));
  try {
    const { requests } = await admin(`explain/${encodeURIComponent(id)}`);
    if (shown === id) panel.replaceChildren(head, ...requests.map(request));
  } catch (error) {
    if (shown === id) panel.replaceChildren(head, el("p.note", {}, error.message));
  }
  head.querySelector("button").focus();
}

addEventListener("hashchange", route);
addEventListener("keydown", (event) => event.key === "Escape" && !panel.hidden && close());

/** The forecast beside a first token; empty without one. */
const prediction = ({ ttft_ms: mean, ttft_upper_ms: upper }) => (mean == null ? "" : `, predicted ${duration(mean)}${upper == null ? "" : ` (0.9 quantile ${duration(upper)})`}`);

/** The forecast beside the output; a row of the decision log has the median in place of the mean. */
const length = (tokens) => (tokens == null ? "" : `, predicted ${Math.round(tokens.mean ?? tokens["0.5"])} (0.9 quantile ${Math.round(tokens["0.9"])})`);

function request(one) {
  const { measured, predicted } = one;
  const outcome = one.outcome ?? one.phase;
  const level = one.outcome === "met" ? "good" : one.outcome == null ? "none" : one.outcome === "late" ? "warn" : "bad";
  return el("article", {},
    el("p.verdict", {}, el("span.badge", { "data-level": level }, outcome), ` ${one.request.kind} · ${one.request.class} · ${one.request.model}`),
    timeline(one),
    facts([
      ["Objectives", objectives(one.request.objectives_ms)],
      ["Missed", one.missed.map((name) => OBJECTIVES[name]).join(", ") || null],
      ["First token", measured.ttft_ms == null ? null : `${duration(measured.ttft_ms)}${prediction(predicted)}`],
      ["Per token", measured.tpot_ms == null ? null : duration(measured.tpot_ms)],
      ["Longest gap", measured.gap_ms == null ? null : duration(measured.gap_ms)],
      ["Queue", measured.queue_ms == null ? null : duration(measured.queue_ms)],
      ["End to end", measured.e2e_ms == null ? null : duration(measured.e2e_ms)],
      ["Prompt", `${count(one.request.prompt_tokens)} tokens${measured.cached_tokens ? `, ${count(measured.cached_tokens)} cached` : ""}`],
      ["Output", measured.output_tokens == null ? null : `${count(measured.output_tokens)} tokens${length(predicted.output_tokens)}`],
      ["Tenant", one.request.tenant],
    ]),
    el("h3", {}, "Decisions"),
    el("ol.decisions", {}, ...one.decisions.map(decision)),
    one.now ? el("section", {}, el("h3", {}, "If it were decided now"), decision(one.now)) : null);
}

/** Queue, first token and output as one bar, with the predicted first token and each decision on it. */
function timeline(one) {
  const { measured } = one;
  const total = Math.max(measured.e2e_ms ?? one.arrived_ms_ago, one.decisions.at(-1)?.at_ms ?? 0, 1);
  const queue = measured.queue_ms ?? total, first = measured.ttft_ms ?? measured.e2e_ms ?? total;
  const part = (name, from, to) => (to > from ? el(`i.${name}`, { size: (to - from) / total, at: from / total, title: `${name}: ${duration(to - from)}` }) : null);
  return el("div.timeline", { role: "img", "aria-label": `queue ${duration(queue)}, first token after ${duration(first)}, end after ${duration(total)}` },
    part("queue", 0, queue), part("prefill", queue, Math.min(first, total)), part("output", first, total),
    ...one.decisions.map((each) => el("u", { at: each.at_ms / total, "data-level": LEVELS[each.decision], title: `${WORDS[each.decision]} at ${duration(each.at_ms)}` })),
    one.predicted.ttft_ms == null ? null : el("u.predicted", { at: one.predicted.ttft_ms / total, title: `predicted first token ${duration(one.predicted.ttft_ms)}` }),
    el("span", {}, "arrival"), el("span", {}, duration(total)));
}

/** One decision with its numbers, of a request or of a dry run. */
export function decision(each) {
  const { memory, places, time } = each;
  const details = [];
  if (each.victims?.length) details.push(...each.victims.flatMap((id) => [" ", link(id)]));
  if (each.for) details.push(" for ", link(each.for));
  else if (each.decision === "PREEMPTED") details.push(each.by === "engine" ? " for the running requests" : " for waiting embeddings");
  return el("li", {},
    el("p", {}, each.at_ms == null ? null : el("time", {}, `+${duration(each.at_ms)}`), el("span.badge", { "data-level": LEVELS[each.decision] }, WORDS[each.decision]), ...details,
      each.reason ? ` ${REASONS[each.reason] ?? each.reason}` : null),
    each.detail ? el("p.note", {}, each.detail) : null,
    each.recompute_tokens ? el("p.note", {}, `${count(each.recompute_tokens)} tokens to compute again, about ${duration(each.recompute_ms)}`) : null,
    memory ? el("div.meter", { title: "held, needed, and what the quota allows" },
      el("i.held", { size: memory.held_bytes / memory.ceiling_bytes, at: 0 }),
      el("i.need", { size: memory.needs_bytes / memory.ceiling_bytes, at: memory.held_bytes / memory.ceiling_bytes })) : null,
    memory ? facts([
      ["Memory", `${bytes(memory.held_bytes)} held + ${bytes(memory.needs_bytes)} needed of ${bytes(memory.ceiling_bytes)}`],
      ["Predicted peak", bytes(memory.predicted_peak_bytes)],
      ["Places", `${count(places.running)} running, ${count(places.free)} free`],
      ["Predicted wait", time.predicted_wait_ms == null ? null : duration(time.predicted_wait_ms)],
      ["Latest start", time.latest_start_ms == null ? null : time.latest_start_ms < 0 ? `${duration(-time.latest_start_ms)} ago` : `in ${duration(time.latest_start_ms)}`],
      ["Decode step", time.decode_step_ms == null ? null : `${duration(time.decode_step_ms)}, with it ${duration(time.decode_step_with_it_ms)}${time.tightest_tpot_ms == null ? "" : `, tightest TPOT ${duration(time.tightest_tpot_ms)}`}`],
      ["Retry after", each.retry_after_ms == null ? null : duration(each.retry_after_ms)],
    ]) : null);
}
