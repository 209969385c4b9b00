"""The behaviours 1 to 12, 28, 40 and 41 that docker/model-runner's own tests promise its users, and the faults of it
that the daemon must not have. Most have their test where their part is tested (paths are under tests/, without one
under tests/api/):

| | behaviour | test |
|---|---|---|
| 1 | an unknown model is an error, 404 in one shape | test_bad_requests |
| 2 | malformed JSON is a 400 | test_bad_requests |
| 3 | no messages: never 500 | test_no_messages_are_no_fault_of_the_daemon |
| 4 | an unchanged model is not fetched again | pull/test_huggingface.test_an_unchanged_model_is_not_fetched_again |
| 5 | a model of OpenAI's list has an id | test_control_plane.test_the_openai_list |
| 6 | Ollama's show has `details.format` | test_ollama |
| 7 | a chat has content, a stream ends with [DONE] | clients/test_openai, gateway/test_flow |
| 8 | Responses: text, a schema that is obeyed | test_responses, clients/test_openai |
| 9 | Anthropic's messages: text, usage | test_anthropic, clients/test_anthropic |
| 10 | Ollama's chats, generations, tags | test_ollama, clients/test_ollama |
| 11 | five chats on a cold model: one load | test_chats_on_a_cold_model_are_one_load |
| 12 | pull, list, run, ps, unload, rm | e2e/test_docker_behaviours |
| 28 | pages that may ask, preflights | test_control_plane.test_allowed_pages_get_cors_headers_and_preflights |
| 40 | Responses: made, streamed, read, removed, refused | test_responses |
| 41 | images and the order of messages, Ollama | gateway/test_ollama.test_messages_with_calls_and_images |

| fault that is absent | test |
|---|---|
| `/v1/score` is taken for a backend "v1" | test_v1_is_no_backend |
| parts of a tool call are sent as calls | gateway/test_ollama.test_calls_of_tools_are_put_together |
| an empty prompt unloads the model | gateway/test_ollama.test_an_empty_request_loads_and_with_no_keep_alive_unloads |
| a conversation loses the user's side | test_responses.test_a_conversation_replays_both_sides |
| a refusal in a stream has status 200 | test_a_refused_stream_is_no_200 |
| `reasoning.effort` does not reach the engine | test_the_effort_of_a_response_reaches_the_engine |
| `http://localhost:*` is taken literally | gateway/test_access |
| `*` allows nothing | test_a_star_allows_every_page |
| a lease is given back to a runner with another draft | test_a_draft_model_replaces_the_runner_without_it |
| a runner without the new draft stays | test_a_draft_model_replaces_the_runner_without_it |
| a load under way loses a configuration | test_configure.test_who_waits_for_a_load_gets_the_runner_that_replaces_it |
| concurrent changes of the index lose entries | store/test_store.test_many_threads_change_it_at_once |
| callers of one pull write the same file | pull/test_huggingface.test_twenty_pulls_are_one_download |
| an unknown quantization becomes another | pull/test_huggingface.test_an_unknown_quantization_lists_what_there_is |
| the last shard is taken for the first | store/test_store.test_shards_come_in_their_own_order |
| a model that was loaded is counted twice on disk | test_a_loaded_model_is_counted_once |
| metrics find no runner by its name | test_telemetry.test_metrics_of_the_engines_tell_their_runner |
"""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.api.conftest import StartDaemon
from tests.api.test_operations import ask
from tests.fakes import of_code
from tests.waiting import HUNG

CHAT = {"model": "smol", "messages": [{"role": "user", "content": "hi"}]}


async def test_chats_on_a_cold_model_are_one_load(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})

    async def ask() -> int:
        async with daemon.tcp.post("/v1/chat/completions", json=CHAT) as answer:
            await answer.read()
            return answer.status

    assert await asyncio.gather(*(ask() for _ in range(5))) == [200] * 5
    assert daemon.backend.runs == 1


@pytest.mark.parametrize("path", ["/v1/rerank", "/engines/v1/rerank", "/rerank", "/v1/score", "/engines/v1/score"])
async def test_v1_is_no_backend(start_daemon: StartDaemon, path: str) -> None:
    """The model is what is missing, not a backend."""
    daemon = await start_daemon()
    async with daemon.tcp.post(path, json={"model": "nope", "query": "x", "documents": ["x"]}) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/responses", {"model": "smol", "input": "hi"}), ("/api/chat", CHAT)],
)
async def test_a_refused_stream_is_no_200(start_daemon: StartDaemon, path: str, body: dict) -> None:
    daemon = await start_daemon(models={"smol": 0})
    daemon.backend.knobs = ("--status", "422")
    async with daemon.tcp.post(path, json=body | {"stream": True}) as answer:
        assert 400 <= answer.status < 500
        assert answer.content_type == "application/json"


async def test_no_messages_are_no_fault_of_the_daemon(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    async with daemon.tcp.post("/v1/chat/completions", json=CHAT | {"messages": []}) as answer:
        assert answer.status != 500


async def test_a_keep_alive_beyond_all_dates_is_never(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    async with daemon.tcp.post("/v1/chat/completions", json=CHAT | {"keep_alive": 1e200}) as answer:
        assert answer.status == 200
        await answer.read()
    for path in ("/engines/ps", "/engines/now", "/api/ps"):
        async with daemon.tcp.get(path) as answer:
            assert answer.status == 200, path


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", '"messages":[],"tools":[1e400]'),
        ("/v1/chat/completions", '"messages":[],"tools":[{}],"tool_choice":-1e400'),
        ("/v1/messages", '"messages":[],"max_tokens":1,"tools":[{"x":1e400}]'),
        ("/v1/responses", '"input":"hi","tools":[1e400]'),
        ("/v1/responses", '"input":"hi","tool_choice":1e400'),
        ("/api/chat", '"messages":[{"role":"user","content":"hi"}],"tools":[1e400]'),
    ],
)
async def test_a_number_that_is_no_double_is_the_clients_mistake(
    start_daemon: StartDaemon, path: str, fields: str, stream: bool
) -> None:
    daemon = await start_daemon(models={"smol": 0})
    body = f'{{"model":"smol","stream":{str(stream).lower()},{fields}}}'
    async with daemon.unix.post(path, data=body) as answer:
        assert answer.status == 400, await answer.text()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", '"messages":DEEP'),
        ("/v1/chat/completions", '"messages":[],"tools":DEEP'),
        ("/v1/messages", '"max_tokens":1,"messages":[{"role":"user","content":"hi"}],"system":DEEP'),
        ("/v1/messages", '"max_tokens":1,"messages":[{"role":"user","content":"hi"}],"tools":DEEP'),
        ("/v1/responses", '"input":"hi","tools":[{"type":"function","name":"f","parameters":{"x":DEEP}}]'),
        ("/api/chat", '"messages":[{"role":"user","content":"hi"}],"tools":DEEP'),
    ],
)
async def test_json_of_any_depth_is_taken_or_refused(start_daemon: StartDaemon, path: str, fields: str) -> None:
    """What passes the first look can be read and written by every later step."""
    daemon = await start_daemon(models={"smol": 0})
    statuses = []
    for depth in (10, 300, *range(700, 1001, 3), 100_000):
        body = f'{{"model":"smol",{fields.replace("DEEP", "[" * depth + "]" * depth)}}}'
        async with daemon.unix.post(path, data=body) as answer:
            assert answer.status in (200, 400), (depth, await answer.text())
            statuses.append(answer.status)
    assert statuses[-1] == 400
    assert statuses == sorted(statuses)


async def test_the_effort_of_a_response_reaches_the_engine(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = await start_daemon(models={"smol": 0})
    daemon.backend.knobs = ("--record", str(tmp_path / "record"))
    body = {"model": "smol", "input": "hi", "reasoning": {"effort": "low"}}
    assert (await ask(daemon, "POST", "/v1/responses", json=body))[0] == 200
    lines = [msgspec.json.decode(line) for line in (tmp_path / "record").read_bytes().splitlines()]
    [chat] = [msgspec.json.decode(line["body"]) for line in lines if line.get("path") == "/v1/chat/completions"]
    assert chat["reasoning_effort"] == "low"


@pytest.mark.parametrize("origins", [["*"], ["http://localhost", "*"]])
async def test_a_star_allows_every_page(start_daemon: StartDaemon, origins: list[str]) -> None:
    daemon = await start_daemon(origins=origins)
    headers = {"Origin": "https://any.example"}
    async with daemon.tcp.get("/v1/models", headers=headers) as answer:
        assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (200, "https://any.example")
    asked = headers | {"Access-Control-Request-Method": "POST"}
    async with daemon.tcp.options("/v1/chat/completions", headers=asked) as answer:
        assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (204, "https://any.example")


async def test_a_loaded_model_is_counted_once(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    _, before = await ask(daemon, "GET", "/engines/df")
    assert (await ask(daemon, "POST", "/v1/chat/completions", json=CHAT))[0] == 200
    _, after = await ask(daemon, "GET", "/engines/df")
    assert before["models_disk_usage"] == after["models_disk_usage"] > 0


@of_code("it takes draft models")
async def test_a_draft_model_replaces_the_runner_without_it(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})

    async def only_runner() -> Any:
        """The old one drains after the new one is there."""
        async with asyncio.timeout(HUNG):
            while len(found := (await ask(daemon, "GET", "/engines/ps"))[1]) != 1 or found[0]["in_use"]:
                pass
        return found[0]

    chosen = []
    for draft in ({"draft_model": "smol"}, None):
        assert (await ask(daemon, "POST", "/v1/chat/completions", json=CHAT))[0] == 200
        chosen.append((await only_runner())["id"])
        change = {"model": "smol", "speculative": draft, "apply": "restart"}
        assert (await ask(daemon, "POST", "/engines/_configure", json=change))[0] in (200, 202)
    assert (await ask(daemon, "POST", "/v1/chat/completions", json=CHAT))[0] == 200
    assert len({*chosen, (await only_runner())["id"]}) == 3
