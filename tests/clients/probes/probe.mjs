// Runs the feature probes of one Node client and prints the outcomes as JSON; the counterpart of probe.py.

export const CHAT = "tiny-llama", EMBEDDINGS = "minilm", RERANKER = "tiny-reranker";
export const KEY = "unused";
export const HEADERS = { "x-service-class": "interactive" };
export const HELLO = [{ role: "user", content: "Hello" }];
export const TEXTS = ["A queue forms where arrivals outpace service.", "Memory is what runs out first."];
export const FEW_TOKENS = 16, CALL_TOKENS = 800;
export const SCHEMA = {
  type: "object",
  properties: { mood: { type: "string", enum: ["good", "bad"] } },
  required: ["mood"],
  additionalProperties: false,
};
export const PIXEL =
  "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYPj/HwADAgH/p9Z8XQAAAABJRU5ErkJggg==";
export const [URL_OF_SERVER] = process.argv.slice(2);

export function check(claim, found) {
  if (!claim) throw new Error(`unexpected: ${JSON.stringify(found)}`);
}

export function checkMood(found) {
  const value = typeof found === "string" ? JSON.parse(found) : found;
  check(["good", "bad"].includes(value.mood) && Object.keys(value).length === 1, value);
}

export function checkVectors(rows) {
  check(rows.length === TEXTS.length && rows.every((row) => row.length === 384), rows.length);
  check(rows.every((row) => Math.abs(row.reduce((sum, value) => sum + value * value, 0) - 1) < 1e-3), rows[0]);
}

// The error that a call rejects with.
export async function refusal(call) {
  try {
    await call();
  } catch (error) {
    return error;
  }
  throw new Error("the server did not refuse the request");
}

export async function run(probes) {
  const cells = {}, failures = {};
  for (const [feature, probe] of Object.entries(probes)) {
    try {
      cells[feature] = (await probe()) ?? "works";
    } catch (error) {
      cells[feature] = "FAILS";
      failures[feature] = String(error.stack).slice(0, 1500);
    }
  }
  console.log("\n" + JSON.stringify({ cells, failures }));
}
