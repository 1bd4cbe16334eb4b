import Anthropic from "@anthropic-ai/sdk";

import * as probe from "./probe.mjs";

const client = new Anthropic({ baseURL: probe.URL_OF_SERVER, apiKey: probe.KEY, maxRetries: 0 });
const asked = { model: probe.CHAT, messages: probe.HELLO, max_tokens: probe.FEW_TOKENS };

await probe.run({
  async chat() {
    const answer = await client.messages.create(asked, { headers: probe.HEADERS });
    probe.check(answer.content[0].text && answer.usage.output_tokens, answer);
  },
  async stream() {
    let text = "";
    const stream = client.messages.stream(asked).on("text", (part) => (text += part));
    const answer = await stream.finalMessage();
    probe.check(text && text === answer.content[0].text, answer);
  },
  async tools() {
    const answer = await client.messages.create({
      ...asked,
      max_tokens: probe.CALL_TOKENS,
      tools: [{ name: "mood", input_schema: probe.SCHEMA }],
      tool_choice: { type: "tool", name: "mood" },
    });
    probe.check(answer.content[0].type === "tool_use", answer);
    probe.checkMood(answer.content[0].input);
  },
  async "structured output"() {
    const answer = await client.messages.create({
      ...asked,
      max_tokens: probe.CALL_TOKENS,
      output_config: { format: { type: "json_schema", schema: probe.SCHEMA } },
    });
    probe.checkMood(answer.content[0].text);
  },
  async tokens() {
    const counted = await client.messages.countTokens({ model: probe.CHAT, messages: probe.HELLO });
    const { usage } = await client.messages.create(asked);
    probe.check(counted.input_tokens === usage.input_tokens + usage.cache_read_input_tokens, usage);
  },
  async models() {
    const names = [];
    for await (const model of client.models.list()) names.push(model.id);
    probe.check(names.includes(probe.CHAT), names);
  },
  async errors() {
    const error = await probe.refusal(() => client.messages.create({ ...asked, model: "nobody" }));
    probe.check(error instanceof Anthropic.NotFoundError, error);
  },
  async images() {
    const source = { type: "base64", media_type: "image/png", data: probe.PIXEL };
    const messages = [{ role: "user", content: [{ type: "image", source }] }];
    const error = await probe.refusal(() => client.messages.create({ ...asked, messages }));
    probe.check(error instanceof Anthropic.BadRequestError, error);
    return error.error.error.param;
  },
});
