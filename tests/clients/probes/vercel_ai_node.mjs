import { createCohere } from "@ai-sdk/cohere";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as ai from "ai";

import * as probe from "./probe.mjs";

const provider = createOpenAICompatible({
  name: "tandem",
  baseURL: `${probe.URL_OF_SERVER}/v1`,
  apiKey: probe.KEY,
  headers: probe.HEADERS,
  supportsStructuredOutputs: true,
});
const asked = { model: provider(probe.CHAT), prompt: "Hello", maxRetries: 0, maxOutputTokens: probe.FEW_TOKENS };
const schema = ai.jsonSchema(probe.SCHEMA);

await probe.run({
  async chat() {
    const answer = await ai.generateText(asked);
    probe.check(answer.text && answer.usage.outputTokens, answer.text);
  },
  async stream() {
    let text = "";
    for await (const part of ai.streamText(asked).textStream) text += part;
    probe.check(text, text);
  },
  async tools() {
    const mood = ai.tool({ description: "Notes a mood.", inputSchema: schema });
    const answer = await ai.generateText({
      ...asked,
      maxOutputTokens: probe.CALL_TOKENS,
      tools: { mood },
      toolChoice: { type: "tool", toolName: "mood" },
    });
    probe.checkMood(answer.toolCalls[0].input);
  },
  async "structured output"() {
    const output = ai.Output.object({ schema });
    const answer = await ai.generateText({ ...asked, maxOutputTokens: probe.CALL_TOKENS, output });
    probe.checkMood(answer.output);
  },
  async responses() {
    const openai = createOpenAI({ baseURL: `${probe.URL_OF_SERVER}/v1`, apiKey: probe.KEY });
    // Without it the items of a conversation are named by ids, which only a server that stores them knows.
    const providerOptions = { openai: { store: false } };
    const answer = await ai.generateText({ ...asked, model: openai.responses(probe.CHAT), providerOptions });
    probe.check(answer.text, answer.text);
  },
  async rerank() {
    const cohere = createCohere({ baseURL: `${probe.URL_OF_SERVER}/v2`, apiKey: probe.KEY });
    const ranks = { model: cohere.reranking(probe.RERANKER), documents: probe.TEXTS, query: "What is scarce?" };
    const { ranking } = await ai.rerank({ ...ranks, maxRetries: 0 });
    probe.check(ranking.length === 2 && ranking[0].score >= ranking[1].score, ranking);
  },
  async embeddings() {
    const model = provider.textEmbeddingModel(probe.EMBEDDINGS);
    const { embeddings } = await ai.embedMany({ model, values: probe.TEXTS, maxRetries: 0 });
    probe.checkVectors(embeddings);
  },
  async errors() {
    const error = await probe.refusal(() => ai.generateText({ ...asked, model: provider("nobody") }));
    probe.check(ai.APICallError.isInstance(error) && error.statusCode === 404, error);
  },
  async images() {
    const image = { type: "image", image: Buffer.from(probe.PIXEL, "base64"), mediaType: "image/png" };
    const messages = [{ role: "user", content: [image] }];
    const error = await probe.refusal(() => ai.generateText({ ...asked, prompt: undefined, messages }));
    probe.check(ai.APICallError.isInstance(error) && error.statusCode === 400, error);
    return JSON.parse(error.responseBody).error.param;
  },
});
