import OpenAI from "openai";

import * as probe from "./probe.mjs";

const client = new OpenAI({ baseURL: `${probe.URL_OF_SERVER}/v1`, apiKey: probe.KEY, maxRetries: 0 });
const asked = { model: probe.CHAT, messages: probe.HELLO, max_tokens: probe.FEW_TOKENS };

await probe.run({
  async chat() {
    const answer = await client.chat.completions.create(asked, { headers: probe.HEADERS });
    probe.check(answer.choices[0].message.content && answer.usage.completion_tokens, answer);
  },
  async stream() {
    let text = "";
    for await (const chunk of await client.chat.completions.create({ ...asked, stream: true }))
      text += chunk.choices[0]?.delta?.content ?? "";
    probe.check(text, text);
  },
  async tools() {
    const answer = await client.chat.completions.create({
      ...asked,
      max_tokens: probe.CALL_TOKENS,
      tools: [{ type: "function", function: { name: "mood", parameters: probe.SCHEMA } }],
      tool_choice: { type: "function", function: { name: "mood" } },
    });
    probe.checkMood(answer.choices[0].message.tool_calls[0].function.arguments);
  },
  async "structured output"() {
    const answer = await client.chat.completions.create({
      ...asked,
      max_tokens: probe.CALL_TOKENS,
      response_format: { type: "json_schema", json_schema: { name: "mood", schema: probe.SCHEMA } },
    });
    probe.checkMood(answer.choices[0].message.content);
  },
  async responses() {
    const stream = client.responses.stream({
      model: probe.CHAT,
      input: "Hello",
      max_output_tokens: probe.FEW_TOKENS,
    });
    const answer = await stream.finalResponse();
    probe.check(answer.output_text, answer);
  },
  async embeddings() {
    const answer = await client.embeddings.create({ model: probe.EMBEDDINGS, input: probe.TEXTS });
    probe.checkVectors(answer.data.map((row) => row.embedding));
  },
  async tokens() {
    const asked = { model: probe.CHAT, input: "Hello" };
    const counted = await client.responses.inputTokens.count(asked);
    const { usage } = await client.responses.create({ ...asked, max_output_tokens: 1 });
    probe.check(counted.input_tokens === usage.input_tokens, usage);
  },
  async models() {
    const names = (await client.models.list()).data.map((model) => model.id);
    probe.check(names.includes(probe.CHAT) && names.includes(probe.EMBEDDINGS), names);
  },
  async errors() {
    const error = await probe.refusal(() => client.chat.completions.create({ ...asked, model: "nobody" }));
    probe.check(error instanceof OpenAI.NotFoundError && error.code === "model_not_found", error);
  },
  async images() {
    const content = [{ type: "image_url", image_url: { url: `data:image/png;base64,${probe.PIXEL}` } }];
    const messages = [{ role: "user", content }];
    const error = await probe.refusal(() => client.chat.completions.create({ ...asked, messages }));
    probe.check(error instanceof OpenAI.BadRequestError, error);
    return error.param;
  },
});
