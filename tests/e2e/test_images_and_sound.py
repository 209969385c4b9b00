"""Images and sound for the real llama.cpp, in every family, with tiny models of random weights."""

import base64
import io
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.daemons import Daemon
from tests.models import projector, random_llama
from tests.models.projector import IMAGE_TOKENS, SOUND_TOKENS

CHAT, TRANSCRIPTIONS = "/v1/chat/completions", "/v1/audio/transcriptions"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
TORN, NO_IMAGE = PIXEL[:40], base64.b64encode(b"no image at all").decode()
SEES, HEARS, BOTH, NEITHER = "my/sees", "my/hears", "my/both", "my/neither"
Body = dict[str, Any]


@pytest.fixture(scope="module")
def daemon(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Daemon:
    """It has a model for each choice of senses."""
    package(daemon, tmp_path_factory.mktemp("senses"))
    return daemon


def package(daemon: Daemon, folder: Path) -> None:
    text = random_llama.write(folder / "random.gguf")
    for name, sees, hears in ((SEES, True, False), (HEARS, False, True), (BOTH, True, True), (NEITHER, False, False)):
        file = folder / f"{name.partition('/')[2]}.gguf"
        senses = ["--mmproj", str(projector.write(file, sees=sees, hears=hears, width=random_llama.WIDTH))]
        done = daemon.run("package", "--gguf", str(text), *(senses if sees or hears else ()), name)
        assert done.returncode == 0, done.stderr


def wav(seconds: float) -> str:
    """Silence, as base64."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(16000)
        sound.writeframes(bytes(int(seconds * 16000) * 2))
    return base64.b64encode(file.getvalue()).decode()


def image(data: str) -> Body:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def sound(data: str) -> Body:
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def chat(daemon: Daemon, model: str, *parts: Body, **fields: Any) -> Any:
    content = [{"type": "text", "text": "hello"}, *parts]
    messages = [{"role": "user", "content": content}]
    return daemon.post(CHAT, {"model": model, "messages": messages, "max_tokens": 2, "temperature": 0, **fields})


@dataclass(frozen=True)
class Family:
    """How a family sends an image, where its plain answer counts the prompt, and where its error has the sentence.
    `counts` are added: Anthropic counts what came from the cache by itself."""

    path: str
    body: Body
    counts: tuple[str, ...]
    said: tuple[str, ...] = ("error", "message")


def families(data: str | None) -> dict[str, Family]:
    """A request of each family for the same chat, with or without the image."""
    url = f"data:image/png;base64,{data}"
    text = {"type": "text", "text": "hello"}
    source = {"type": "base64", "media_type": "image/png", "data": data}

    def user(*parts: Body) -> list[Body]:
        return [{"role": "user", "content": [part for part in parts if data is not None or "text" in part]}]

    ollama: Body = {"images": [data]} if data is not None else {}
    options: Body = {"stream": False, "options": {"num_predict": 2, "temperature": 0}}
    block = {"type": "image", "source": source}
    told = {"input": user({"type": "input_text", "text": "hello"}, {"type": "input_image", "image_url": url})}
    return {
        "openai": Family(
            CHAT,
            {
                "max_tokens": 2,
                "temperature": 0,
                "messages": user(text, {"type": "image_url", "image_url": {"url": url}}),
            },
            ("usage.prompt_tokens",),
        ),
        "anthropic": Family(
            "/anthropic/v1/messages",
            {"max_tokens": 2, "temperature": 0, "messages": user(text, block)},
            ("usage.input_tokens", "usage.cache_read_input_tokens"),
        ),
        "count_tokens": Family(
            "/anthropic/v1/messages/count_tokens", {"messages": user(text, block)}, ("input_tokens",)
        ),
        "responses": Family(
            "/v1/responses", {"max_output_tokens": 2, "temperature": 0, **told}, ("usage.input_tokens",)
        ),
        "ollama": Family(
            "/api/chat",
            {"messages": [{"role": "user", "content": "hello", **ollama}], **options},
            ("prompt_eval_count",),
            ("error",),
        ),
        "generate": Family(
            "/api/generate", {"prompt": "hello", **ollama, **options}, ("prompt_eval_count",), ("error",)
        ),
    }


def find(answer: Any, path: str) -> Any:
    for name in path.split("."):
        answer = answer[name]
    return answer


def tokens(daemon: Daemon, model: str, family: Family) -> int:
    answer = daemon.post(family.path, {"model": model, **family.body})
    assert answer.status_code == 200, answer.text
    return sum(find(answer.json(), count) for count in family.counts)


FAMILIES = list(families(None))


@pytest.mark.parametrize("name", FAMILIES)
def test_an_image_is_seen(daemon: Daemon, name: str) -> None:
    """By as many tokens of the prompt as the image has patches."""
    without = tokens(daemon, SEES, families(None)[name])
    assert tokens(daemon, SEES, families(PIXEL)[name]) == without + IMAGE_TOKENS


@pytest.mark.parametrize("data", [TORN, NO_IMAGE], ids=["torn", "none"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_damaged_image_is_the_clients_fault(daemon: Daemon, name: str, data: str) -> None:
    family = families(data)[name]
    answer = daemon.post(family.path, {"model": SEES, **family.body})
    assert answer.status_code == 400
    assert find(answer.json(), ".".join(family.said)) == "Failed to load image or audio file"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("model", [NEITHER, HEARS])
def test_a_model_that_sees_nothing_says_so(daemon: Daemon, name: str, model: str) -> None:
    family = families(PIXEL)[name]
    answer = daemon.post(family.path, {"model": model, **family.body})
    assert answer.status_code == 400
    assert "image input is not supported" in find(answer.json(), ".".join(family.said))


def test_what_each_model_takes_is_in_the_list(daemon: Daemon) -> None:
    listed = {model["id"]: model["capabilities"] for model in daemon.get("/v1/models").json()["data"]}
    senses = {SEES: ["vision"], HEARS: ["audio"], BOTH: ["vision", "audio"], NEITHER: []}
    assert {name: listed[name][2:] for name in senses} == senses
    assert all(listed[name][:2] == ["chat", "completion"] for name in senses)


@pytest.mark.parametrize("model", [HEARS, BOTH])
def test_sound_is_heard(daemon: Daemon, model: str) -> None:
    """Half a minute of it has as many tokens as a second; of more, the next half minute has as many again."""
    without = chat(daemon, model).json()["usage"]["prompt_tokens"]
    for seconds, pieces in ((1, 1), (31, 2)):
        answer = chat(daemon, model, sound(wav(seconds)))
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == without + pieces * SOUND_TOKENS


def test_sound_in_a_response(daemon: Daemon) -> None:
    used = []
    for heard in ([], [sound(wav(1))]):
        content = [{"type": "input_text", "text": "hello"}, *heard]
        body = {"model": HEARS, "max_output_tokens": 2, "input": [{"role": "user", "content": content}]}
        used.append(daemon.post("/v1/responses", body).json()["usage"]["input_tokens"])
    assert used[1] == used[0] + SOUND_TOKENS


def test_both_in_one_message(daemon: Daemon) -> None:
    without = chat(daemon, BOTH).json()["usage"]["prompt_tokens"]
    answer = chat(daemon, BOTH, image(PIXEL), sound(wav(1)))
    assert answer.json()["usage"]["prompt_tokens"] == without + IMAGE_TOKENS + SOUND_TOKENS


def test_sound_that_cannot_be_heard(daemon: Daemon) -> None:
    for model, data, said in (
        (HEARS, NO_IMAGE, "Failed to load image or audio file"),
        (HEARS, "", "Invalid base64 value"),
        (SEES, wav(1), "audio input is not supported"),
        (NEITHER, wav(1), "audio input is not supported"),
    ):
        answer = chat(daemon, model, sound(data))
        assert (answer.status_code, said in answer.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:1/x.png", "send an image or a sound as a data: URL"),
        ("https://127.0.0.1:1/x.png", "send an image or a sound as a data: URL"),
        ("file:///etc/passwd", "file:// URLs are not allowed"),
        ("@@@", "Invalid base64 value"),
        ("data:text/plain;base64,eA==", "Invalid uri format"),
    ],
)
def test_no_engine_fetches_a_file(daemon: Daemon, url: str, said: str, stream: bool) -> None:
    answer = chat(daemon, SEES, {"type": "image_url", "image_url": {"url": url}}, stream=stream)
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (400, True)


def test_an_image_in_a_stream(daemon: Daemon) -> None:
    answer = chat(daemon, SEES, image(PIXEL), stream=True)
    assert (answer.status_code, answer.text.rstrip()[-12:]) == (200, "data: [DONE]")


def transcribed(daemon: Daemon, model: str, heard: bytes, **parts: str) -> Any:
    with daemon.client() as client:
        files = {"file": ("talk.wav", heard, "audio/wav")}
        return client.post(TRANSCRIPTIONS, data={"model": model, "max_tokens": "4", **parts}, files=files)


def test_sound_is_written_down(daemon: Daemon) -> None:
    """By the process that answers chats."""
    assert chat(daemon, HEARS).status_code == 200
    one = transcribed(daemon, HEARS, base64.b64decode(wav(1)))
    assert one.status_code == 200, one.text
    used = one.json()["usage"]
    assert (type(one.json()["text"]), used["output_tokens"] in range(1, 5)) == (str, True)
    text = transcribed(daemon, HEARS, base64.b64decode(wav(1)), response_format="text", temperature="0")
    assert (text.status_code, text.headers["Content-Type"]) == (200, "text/plain; charset=utf-8"), text.text
    more = transcribed(daemon, HEARS, base64.b64decode(wav(31))).json()["usage"]
    assert more["input_tokens"] == used["input_tokens"] + SOUND_TOKENS
    assert [each["mode"] for each in daemon.runners() if each["model_name"] == HEARS] == ["completion"]
    streamed = transcribed(daemon, HEARS, base64.b64decode(wav(1)), stream="true").text
    assert "transcript.text.done" in streamed
    assert streamed.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize(
    ("model", "sound", "parts", "said"),
    [
        (SEES, "", {}, "does not offer transcription"),
        (NEITHER, "", {}, "does not offer transcription"),
        (HEARS, NO_IMAGE, {}, "Failed to load image or audio file"),
        (HEARS, wav(1), {"response_format": "srt"}, "srt, vtt and verbose_json come from a model of Whisper"),
        (HEARS, wav(1), {"temperature": "hot"}, "must be numbers"),
    ],
)
def test_sound_that_cannot_be_written_down(
    daemon: Daemon, model: str, sound: str, parts: dict[str, str], said: str
) -> None:
    answer = transcribed(daemon, model, base64.b64decode(sound), **parts)
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (400, True), answer.text
