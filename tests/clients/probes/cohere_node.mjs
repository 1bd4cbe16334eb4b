import { CohereClient, CohereClientV2, CohereError } from "cohere-ai";

import * as probe from "./probe.mjs";

const server = { token: probe.KEY, baseUrl: probe.URL_OF_SERVER, environment: probe.URL_OF_SERVER };
const client = new CohereClientV2(server);
// Release 8.1.0 of CohereClientV2 has a method `tokenize` that fails before it sends anything.
const older = new CohereClient(server);
const asked = { model: probe.CHAT, messages: probe.HELLO, maxTokens: probe.FEW_TOKENS };
const ranked = { model: probe.RERANKER, query: "What is scarce?", documents: probe.TEXTS };
const tool = { type: "function", function: { name: "mood", parameters: probe.SCHEMA } };
const text = "Hello, hello.";

await probe.run({
  async chat() {
    const answer = await client.chat(asked, { headers: probe.HEADERS });
    probe.check(answer.message.content[0].text && answer.usage.tokens.outputTokens, answer);
  },
  async stream() {
    let said = "", last;
    for await (const event of await client.chatStream(asked, { headers: probe.HEADERS })) {
      if (event.type === "content-delta") said += event.delta.message.content.text;
      last = event;
    }
    probe.check(said && last.type === "message-end" && last.delta.usage.tokens.outputTokens, last);
  },
  async tools() {
    const required = { ...asked, maxTokens: probe.CALL_TOKENS, tools: [tool], toolChoice: "REQUIRED" };
    const answer = await client.chat(required);
    // A random model may call more than once, and the limit of tokens may cut the last call.
    const [call] = answer.message.toolCalls;
    probe.check(call.function.name === "mood", call);
    probe.checkMood(call.function.arguments);
    let streamed = "";
    for await (const event of await client.chatStream(required)) {
      if (event.type === "tool-call-delta" && event.index === 0) streamed += event.delta.message.toolCalls.function.arguments;
    }
    probe.checkMood(streamed);
  },
  async "structured output"() {
    const answer = await client.chat({
      ...asked,
      maxTokens: probe.CALL_TOKENS,
      responseFormat: { type: "json_object", jsonSchema: probe.SCHEMA },
    });
    probe.checkMood(answer.message.content[0].text);
  },
  async embeddings() {
    const types = ["float", "base64"];
    const { embeddings, texts } = await client.embed({
      model: probe.EMBEDDINGS, texts: probe.TEXTS, inputType: "search_document", embeddingTypes: types,
    });
    probe.checkVectors(embeddings.float);
    probe.check(embeddings.base64.length === texts.length, embeddings.base64);
  },
  async rerank() {
    const { results } = await client.rerank(ranked);
    probe.check(results.length === 2 && results[0].relevanceScore >= results[1].relevanceScore, results);
  },
  async tokens() {
    const { tokens } = await older.tokenize({ model: probe.CHAT, text });
    const found = await older.detokenize({ model: probe.CHAT, tokens });
    probe.check(tokens.length && found.text === text, found);
  },
  async models() {
    const { models } = await client.models.list({ endpoint: "chat" });
    probe.check(models.length === 1 && models[0].name === probe.CHAT, models);
    const one = await client.models.get(probe.EMBEDDINGS);
    probe.check(one.endpoints[0] === "embed", one);
  },
  async errors() {
    for (const call of [
      () => client.rerank({ ...ranked, model: "nobody" }),
      () => client.chat({ ...asked, model: "nobody" }),
    ]) {
      const error = await probe.refusal(call);
      probe.check(error instanceof CohereError && error.statusCode === 404, error);
    }
  },
  async images() {
    const url = `data:image/png;base64,${probe.PIXEL}`;
    const content = [{ type: "image_url", imageUrl: { url } }];
    const error = await probe.refusal(() => client.chat({ ...asked, messages: [{ role: "user", content }] }));
    probe.check(error instanceof CohereError && error.statusCode === 400, error);
    return error.body.error.param;
  },
});
