// Vercel's AI SDK with its own OpenAI provider, which asks the Responses API, over two turns.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, streamText } from "ai";

const [base, chatModel, , question] = process.argv.slice(2);
const model = createOpenAI({ baseURL: `${base}/v1`, apiKey: "none" })(chatModel);
const [system, ...messages] = JSON.parse(question);
const ask = { model, instructions: system.content, temperature: 0, maxRetries: 0 };

const first = await generateText({ ...ask, messages });
messages.push(...first.response.messages, { role: "user", content: "And again, please." });
const stream = [];
const second = streamText({ ...ask, messages });
for await (const piece of second.textStream) stream.push(piece);
console.log(JSON.stringify({ chat: first.text, stream }));
