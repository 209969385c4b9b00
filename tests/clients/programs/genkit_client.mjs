// genkit's plug-in for Ollama. Its streams take each piece that arrives for one line, and a connection may join two: they
// are left out.
import { genkit } from "genkit";
import { ollama } from "genkitx-ollama";

const [base, chatModel, embeddingModel, question] = process.argv.slice(2);
const [system, user] = JSON.parse(question);
const ai = genkit({
  plugins: [
    ollama({
      serverAddress: base,
      models: [{ name: chatModel, type: "chat" }],
      embedders: [{ name: embeddingModel, dimensions: 384 }],
    }),
  ],
});
const ask = { model: `ollama/${chatModel}`, system: system.content, prompt: user.content, config: { temperature: 0 } };

const chat = await ai.generate(ask);
const vectors = await ai.embed({ embedder: `ollama/${embeddingModel}`, content: "a cat" });
console.log(JSON.stringify({ chat: chat.text, embeddings: vectors.map((one) => one.embedding.length) }));
