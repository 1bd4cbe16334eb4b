// Reads /admin/live twice a second and after each sample, and keeps its records: 900 samples and the events of each kind.

const KEPT = {
  sample: 900, admission: 300, deferral: 200, rejection: 250, end: 450, preemption: 300, quota: 300,
  restart: 60, config: 60, fault: 80,
};
// Between the starts of two readings.
const PERIOD_MS = 500;
const SAMPLED_MS = 1000;
// A sample may be late by this.
const LATE_MS = 40;
const HIDDEN_PERIOD_MS = 10000;
// A server that takes longer hangs, or is not reached any more.
const ANSWER_MS = 5000;
const KEY = "tandem-admin-key";

export const adminKey = {
  get: () => sessionStorage.getItem(KEY),
  set: (key) => sessionStorage.setItem(KEY, key),
  forget: () => sessionStorage.removeItem(KEY),
};

/** Moves the key from the address that the server prints, `#key=KEY`, into the storage; false without one. */
export function takeKey() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (key === null) return false;
  adminKey.set(key);
  // Neither the address bar nor the history keeps it.
  history.replaceState(null, "", location.pathname + location.search);
  return true;
}

/** The answer of an admin endpoint; `request` is that of fetch. Throws an Error with `status` and the server's code and message. */
export const admin = (path, request) => ask(`../admin/${path}`, request);

/** The same of an address relative to the page. */
export async function ask(address, request = {}) {
  const response = await fetch(new URL(address, document.baseURI), {
    ...request,
    headers: { ...request.headers, authorization: `Bearer ${adminKey.get() ?? ""}` },
    cache: "no-store",
  });
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    throw Object.assign(new Error(body.error?.message ?? `HTTP ${response.status}`), { status: response.status, code: body.error?.code });
  }
  return response.json();
}

/** What is read again and again: no answer in time is a failure, so that the page does not stay "live". */
export const polled = (address) => ask(address, { signal: AbortSignal.timeout(ANSWER_MS) });

export class Feed {
  /** `changed(feed)` is called after each answer, `failed(error)` after each failure. */
  constructor(changed, failed) {
    this.changed = changed;
    this.failed = failed;
    this.reset(null);
  }

  reset(instance) {
    this.instance = instance;
    this.next = 0;
    this.offset = null;
    this.about = { classes: {}, models: {}, target: 0.9 };
    this.records = Object.fromEntries(Object.keys(KEPT).map((kind) => [kind, []]));
  }

  start() {
    document.addEventListener("visibilitychange", () => document.hidden || this.poll());
    this.poll();
  }

  stop() {
    clearTimeout(this.timer);
    this.isStopped = true;
  }

  async poll() {
    clearTimeout(this.timer);
    this.isStopped = false;
    if (this.isPolling) return;
    this.isPolling = true;
    const began = performance.now();
    try {
      while (this.take(await polled(`../admin/live?since=${this.next}`)));
      this.changed(this);
    } catch (error) {
      this.failed(error);
    } finally {
      this.isPolling = false;
    }
    if (this.isStopped) return;
    this.timer = setTimeout(() => this.poll(), this.wait(began));
  }

  /** Milliseconds until the next reading: a period after the last one began, or sooner, just after the next sample. */
  wait(began) {
    const now = performance.now(), { last } = this;
    const left = Math.max(0, (document.hidden ? HIDDEN_PERIOD_MS : PERIOD_MS) - (now - began));
    if (document.hidden || !last) return left;
    const sampled = this.answered + 1000 * (last.at - this.now) + SAMPLED_MS + LATE_MS - now;
    return sampled > 0 ? Math.min(left, sampled) : left;
  }

  /** Adds the records of one answer; true if there are more to ask for. */
  take(answer) {
    if (this.instance !== null && answer.instance !== this.instance) {
      // The server was restarted: its numbers begin anew.
      this.reset(answer.instance);
      return true;
    }
    this.instance = answer.instance;
    this.about = answer.about ?? this.about;
    // The server sends its monotonic clock; the browser's clock gives the time of day.
    this.offset ??= Date.now() / 1000 - answer.now;
    for (const record of answer.records) {
      const ring = this.records[record.type];
      // Of a record that was too large the server sends no fields.
      if (ring === undefined || record.left_out_bytes) continue;
      record.time = record.at + this.offset;
      // A version of the configuration may have other classes, objectives and models.
      this.about = record.about ?? this.about;
      ring.push(record);
      if (ring.length > KEPT[record.type]) ring.shift();
    }
    this.next = answer.next;
    this.now = answer.now;
    this.answered = performance.now();
    return answer.more;
  }

  get last() {
    return this.records.sample.at(-1);
  }
}
