// npm's ollama.
import { Ollama } from "ollama";

const [base, chatModel, embeddingModel, question] = process.argv.slice(2);
const client = new Ollama({ host: base });
const messages = JSON.parse(question);
const ask = { model: chatModel, messages, options: { temperature: 0 } };
const format = { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"] };

const chat = await client.chat(ask);
const stream = [];
for await (const part of await client.chat({ ...ask, stream: true })) stream.push(part.message.content);
const structured = await client.chat({ ...ask, format });
const weather = { name: "weather", description: "of a city", parameters: format };
const few = { temperature: 0, num_predict: 4 };
const shown = await client.chat({ ...ask, tools: [{ type: "function", function: weather }], options: few });
const vectors = await client.embed({ model: embeddingModel, input: ["a cat", "a dog"] });
const models = (await client.list()).models.map((model) => model.name);
const prompt = "Write a long story about a dragon."; // which is not over before the client leaves
const long = await client.generate({ model: chatModel, prompt, stream: true, options: { temperature: 0, num_predict: 4000 } });
let left = "";
try {
  for await (const _ of long) long.abort();
} catch (aborted) {
  left = aborted.name;
}
let error = "";
try {
  await client.chat({ ...ask, model: "nope" });
} catch (refused) {
  error = `${refused.name} ${refused.status_code}`;
}
console.log(
  JSON.stringify({
    chat: chat.message.content,
    stream,
    structured: JSON.parse(structured.message.content),
    embeddings: vectors.embeddings.map((one) => one.length),
    models,
    left,
    tools: shown.prompt_eval_count - chat.prompt_eval_count,
    error,
  }),
);
