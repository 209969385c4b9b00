"""OpenAI's files and batches (https://platform.openai.com/docs/api-reference/batch): many requests that can wait."""
