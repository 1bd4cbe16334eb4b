import { CohereClientV2, CohereError } from "cohere-ai";

import * as probe from "./probe.mjs";

const client = new CohereClientV2({ token: probe.KEY, baseUrl: probe.URL_OF_SERVER, environment: probe.URL_OF_SERVER });
const asked = { model: probe.RERANKER, query: "What is scarce?", documents: probe.TEXTS };

await probe.run({
  async rerank() {
    const { results } = await client.rerank(asked);
    probe.check(results.length === 2 && results[0].relevanceScore >= results[1].relevanceScore, results);
  },
  async errors() {
    const error = await probe.refusal(() => client.rerank({ ...asked, model: "nobody" }));
    probe.check(error instanceof CohereError && error.statusCode === 404, error);
  },
});
