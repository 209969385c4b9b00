-- What wrk sends: a chat of about 500 bytes. MODEL, STREAM and KEY come from the environment.
local question = string.rep("Tell me about Paris. ", 20)
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
if os.getenv("KEY") ~= "" then wrk.headers["X-API-Key"] = os.getenv("KEY") end
wrk.body = string.format(
  '{"model":"%s","messages":[{"role":"user","content":"%s"}],"stream":%s}',
  os.getenv("MODEL"), question, os.getenv("STREAM")
)
