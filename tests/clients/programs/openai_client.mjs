// npm's openai.
import OpenAI from "openai";

const [base, chatModel, embeddingModel, question] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "none", maxRetries: 0 });
const messages = JSON.parse(question);
const ask = { model: chatModel, messages, temperature: 0 };
const schema = { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"] };
const response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };

const chat = await client.chat.completions.create(ask);
const stream = [];
for await (const chunk of await client.chat.completions.create({ ...ask, stream: true }))
  stream.push(chunk.choices[0]?.delta?.content ?? "");
const structured = await client.chat.completions.create({ ...ask, response_format });
const parameters = schema;
const tools = [{ type: "function", function: { name: "weather", description: "of a city", parameters } }];
const shown = await client.chat.completions.create({ ...ask, tools, tool_choice: "required", max_tokens: 4 });
const response = await client.responses.create({ model: chatModel, input: messages, temperature: 0 });
const vectors = await client.embeddings.create({ model: embeddingModel, input: ["a cat", "a dog"] });
const models = [];
for await (const model of client.models.list()) models.push(model.id);
const endless = { max_tokens: 4000, ignore_eos: true }; // so that the answer is not over before the client leaves
const long = await client.chat.completions.create({ ...ask, ...endless, stream: true });
for await (const _ of long) break; // leaves the stream
let error = "";
try {
  await client.chat.completions.create({ ...ask, model: "nope" });
} catch (refused) {
  error = refused.constructor.name;
}
console.log(
  JSON.stringify({
    chat: chat.choices[0].message.content,
    stream,
    structured: JSON.parse(structured.choices[0].message.content),
    response: response.output_text,
    embeddings: vectors.data.map((one) => one.embedding.length),
    models,
    tools: shown.usage.prompt_tokens - chat.usage.prompt_tokens,
    error,
  }),
);
