// The event tables: decisions, preemptions, quota moves, and what happened to engines and configuration.

import { classColor, ownerColor } from "./charts.js";
import { OWNERS, REASONS, bytes, clock, count, duration, el } from "./format.js";

const ROWS = 60;

export class Tables {
  constructor(feed, view) {
    this.feed = feed;
    this.view = view;
    this.filter = "refused";
    this.seen = "";
    const panel = (id, title, note, ...more) => {
      const body = el("div.rows", { id: `rows-${id}`, tabindex: "0", role: "region", "aria-label": title });
      this[id] = body;
      return el("article.panel", { id: `table-${id}` }, el("h2", {}, title), el("p.note", {}, note), ...more, body);
    };
    const filters = el("div.buttons", { role: "group", "aria-label": "Kind of decision" }, ...[
      ["refused", "Not admitted"], ["rejection", "Rejected"], ["deferral", "Deferred"], ["admission", "Admitted"], ["late", "Missed"],
    ].map(([key, text]) => el("button", { type: "button", "data-filter": key, onclick: () => this.setFilter(key) }, text)));
    document.getElementById("tables").replaceChildren(
      panel("decisions", "Decisions", "Why requests were deferred or rejected. A request opens its explanation.", filters),
      panel("preemptions", "Preemptions", "Requests that lost their memory, which request got it, and what computing it again costs."),
      panel("quotas", "Quota moves", "Merged by second, with the urgency that caused the largest move."),
      panel("happenings", "Engines, configuration, faults", "Restarts, versions of the configuration and how their guards ended, and impairments."),
    );
  }

  setFilter(key) { this.filter = key; this.seen = ""; this.update(); }

  update() {
    const { records, next } = this.feed;
    const key = `${this.filter} ${next} ${this.view.focus} ${this.feed.instance} ${this.view.theme}`;
    if (key === this.seen || !this.feed.last) return;
    this.seen = key;
    this.names = Object.keys(this.feed.about.classes);
    for (const button of document.querySelectorAll("[data-filter]")) button.setAttribute("aria-pressed", String(button.dataset.filter === this.filter));
    const focused = (one) => !this.view.focus || [one.class, one.for_class].includes(this.view.focus);
    const wanted = {
      refused: [...records.rejection, ...records.deferral].sort((a, b) => a.seq - b.seq),
      late: records.end.filter((one) => one.outcome !== "met" && one.outcome !== "rejected"),
    }[this.filter] ?? records[this.filter];
    this.fill("decisions", wanted.filter(focused), (one) => this.decision(one), "No such decision since the page's first record.");
    // The engine's are read after they happened, and may be older than the last one.
    const lost = records.preemption.filter(focused).sort((a, b) => a.at - b.at);
    this.fill("preemptions", lost, (one) => this.preemption(one), "Nothing was preempted.", this.cost(lost));
    this.fill("quotas", records.quota, (one) => this.move(one), "The quotas have not moved.");
    const happenings = [...records.restart, ...records.config, ...records.fault].sort((a, b) => a.seq - b.seq);
    this.fill("happenings", happenings, (one) => this.happening(one), "Nothing happened.");
  }

  /** Rows that are shown already stay: new ones would lose the keyboard's focus and the selected text. */
  fill(id, records, row, empty, head) {
    const body = this[id], shown = records.slice(-ROWS).reverse(), sum = shown.length ? head : null;
    const key = [this.feed.instance, this.filter, classColor(0), this.names, sum?.textContent, shown.map((one) => one.seq)].join();
    if (body.dataset.shown === key) return;
    body.dataset.shown = key;
    const focused = body.contains(document.activeElement) ? document.activeElement.href : null;
    body.replaceChildren(...(sum ? [sum] : []), ...(shown.length ? shown.map(row) : [el("p.empty", {}, empty)]));
    if (focused) [...body.querySelectorAll("a")].find((link) => link.href === focused)?.focus({ preventScroll: true });
  }

  row(one, badge, level, ...cells) {
    // Pushes the detail to the right; one that does not fit begins a line of its own at the left.
    if (cells.at(-1).localName === "small") cells.splice(-1, 0, el("i.push"));
    return el("div.event", { "data-type": one.type },
      el("time", {}, clock(one.time)), el("span.badge", { "data-level": level }, badge), el("div.cells", {}, ...cells));
  }

  who(id, name) {
    if (!id) return el("span.who", {}, "waiting embeddings");
    const short = id.length > 22 ? `${id.slice(0, 21)}…` : id;
    return el("a.who", { href: `#explain=${encodeURIComponent(id)}`, title: id, color: name ? classColor(this.names.indexOf(name)) : null }, short, name ? el("em", {}, name) : null);
  }

  decision(one) {
    const who = this.who(one.id, one.class);
    if (one.type === "rejection") {
      const retry = one.retry_after_ms == null ? "no retry can help" : `retry after ${duration(one.retry_after_ms)}`;
      return this.row(one, "rejected", "bad", who, el("span", {}, REASONS[one.reason] ?? one.reason), el("small", {}, retry));
    }
    const wait = el("small", {}, one.wait_ms ? `predicted wait ${duration(one.wait_ms)}` : "");
    if (one.type === "deferral") return this.row(one, "deferred", "warn", who, el("span", {}, REASONS[one.reason] ?? one.reason), wait);
    if (one.type === "admission") return this.row(one, "admitted", "good", who, el("span", {}, one.victims ? `after preempting ${count(one.victims)}` : one.kind), wait);
    const missed = one.missed.length ? `missed ${one.missed.map((name) => name.toUpperCase()).join(", ")}` : "";
    const ttft = one.ttft_ms == null ? "" : `first token ${duration(one.ttft_ms)}${one.predicted_ttft_ms == null ? "" : `, predicted ${duration(one.predicted_ttft_ms)}`}`;
    return this.row(one, one.outcome, one.outcome === "late" ? "warn" : "bad", who, el("span", {}, missed), el("small", {}, ttft));
  }

  cost(records) {
    const tokens = records.reduce((sum, one) => sum + one.recompute_tokens, 0);
    const time = records.reduce((sum, one) => sum + (one.recompute_ms ?? 0), 0);
    return el("p.sum", {}, el("b", {}, count(records.length)), " preemptions, ", el("b", {}, count(tokens)), " tokens to compute again, about ", el("b", {}, duration(time)));
  }

  preemption(one) {
    const beneficiary = one.for || one.by === "gate" ? this.who(one.for, one.for_class) : el("span", {}, "the running requests");
    const freed = one.freed_bytes == null ? "" : ` · freed ${bytes(one.freed_bytes)}`;
    return this.row(one, "lost", "warn", this.who(one.id, one.class), el("span", {}, "for "), beneficiary,
      el("small", {}, `${count(one.recompute_tokens)} tokens again, ${duration(one.recompute_ms)}${freed}`));
  }

  move(one) {
    const delta = one.to.llm - one.from.llm, gains = delta > 0 ? "llm" : "embedding";
    const most = Math.max(one.urgency.llm, one.urgency.embedding, 1e-9);
    const urgency = Object.keys(OWNERS).map((owner) => el("span.urgency", { title: `urgency of ${OWNERS[owner]}: ${one.urgency[owner].toFixed(3)}` },
      el("i", { size: one.urgency[owner] / most, color: ownerColor(owner) }), `${OWNERS[owner]} ${one.urgency[owner].toFixed(2)}`));
    const isLending = one.urgency.llm + one.urgency.embedding < 1e-6;
    const text = delta === 0 ? "there and back" : `+${bytes(Math.abs(delta))}`;
    return this.row(one, delta === 0 ? "none" : OWNERS[gains], gains, el("span.size", {}, text), ...(isLending ? [el("span", {}, "unused memory lent or taken back")] : urgency),
      el("small", {}, `LLM ${bytes(one.from.llm)} → ${bytes(one.to.llm)}${one.moves > 1 ? ` · ${one.moves} moves` : ""}`));
  }

  happening(one) {
    if (one.guard) return this.row(one, `version ${one.version} ${one.guard.replace("_", " ")}`, { kept: "good", rolled_back: "bad", failed: "bad" }[one.guard] ?? "mark", el("span", {}, one.text));
    if (one.type === "config") {
      const changes = Object.entries(one.changes ?? {}).map(([key, [was, now]]) => `${key}: ${was} → ${now}`);
      return this.row(one, `version ${one.version}`, "mark", el("span", {}, changes.join("; ") || "the configuration of the start"));
    }
    if (one.type === "restart") {
      const text = one.text ?? (one.part === "engine" ? `serves again; the start took ${duration((one.seconds ?? 0) * 1000)}` : "its process was restarted");
      return this.row(one, `${one.part} ${one.state}`, ["down", "failed"].includes(one.state) ? "bad" : "good", el("span", {}, `${one.model}: ${text}`));
    }
    return this.row(one, one.state === "began" ? "fault" : "recovered", one.state === "began" ? "bad" : "good", el("span", {}, one.text));
  }
}
