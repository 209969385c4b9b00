"""Pictures of a model of random weights, through the daemon, for clients and on the command line."""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.daemons import Daemon, until
from tests.waiting import HUNG

pytestmark = pytest.mark.engine
IMAGES = "/v1/images/generations"
BEGINNINGS = {"png": rb"\x89PNG\r\n", "jpeg": rb"\xff\xd8\xff", "webp": rb"RIFF....WEBP"}
STEPS = 4
STOPPED = re.compile(r"a client left after step (\d+): stopped after (\d+)")


@pytest.fixture(autouse=True)
def nothing_left(no_process_left: None) -> None:
    """Instead of the check after every test, for these."""


@pytest.fixture
def client(daemon: Daemon) -> Iterator[openai.OpenAI]:
    base = daemon.get("/version").json()["listen"]
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=5 * HUNG) as made:
        yield made


def ask(daemon: Daemon, **fields: Any) -> httpx.Response:
    return daemon.post(IMAGES, {"model": "tiny", "prompt": "a cat", "steps": STEPS, **fields})


def pictures(answer: httpx.Response) -> list[bytes]:
    assert answer.status_code == 200, answer.text
    return [base64.b64decode(each["b64_json"]) for each in answer.json()["data"]]


def size(png: bytes) -> tuple[int, int]:
    return int.from_bytes(png[16:20]), int.from_bytes(png[20:24])


def test_it_is_listed_as_a_model_that_draws(daemon: Daemon) -> None:
    model = daemon.get("/v1/models/tiny").json()
    assert model["capabilities"] == ["image-generation"]
    shown = daemon.get("/models/tiny").json()["config"]
    assert (shown["format"], shown["architecture"]) == ("diffusers", "StableDiffusionPipeline")


def test_openais_client_gets_pictures_of_the_asked_size(client: openai.OpenAI) -> None:
    answer = client.images.generate(model="tiny", prompt="a cat", n=2, size="64x96", extra_body={"steps": STEPS})
    found = [base64.b64decode(each.b64_json or "") for each in answer.data or []]
    assert [size(each) for each in found] == [(64, 96)] * 2
    assert found[0] != found[1]


def test_the_same_seed_gives_the_same_bytes(daemon: Daemon) -> None:
    first, second = pictures(ask(daemon, seed=7, n=2))
    assert pictures(ask(daemon, seed=7)) == [first]
    assert pictures(ask(daemon, seed=8)) == [second]
    told = ask(daemon).json()["data"][0]
    assert pictures(ask(daemon, seed=told["seed"])) == [base64.b64decode(told["b64_json"])]
    assert pictures(ask(daemon, seed=7, negative_prompt="a dog")) != [first]
    assert pictures(ask(daemon, seed=7, steps=2)) != [first]


@pytest.mark.parametrize("form", BEGINNINGS)
def test_the_forms_of_pictures(daemon: Daemon, form: str) -> None:
    [picture] = pictures(ask(daemon, output_format=form))
    assert re.match(BEGINNINGS[form], picture, re.DOTALL)


def test_the_daemon_names_what_the_engine_does_not_read(daemon: Daemon) -> None:
    assert ask(daemon, style="vivid").headers["x-modelrunner-ignored"] == "style"


def test_events_of_each_step(daemon: Daemon) -> None:
    lines = ask(daemon, stream=True, seed=7, partial_images=1).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    kinds = [event["type"].removeprefix("image_generation.") for event in events]
    assert kinds == ["progress"] * 2 + ["partial_image"] + ["progress"] * 2 + ["completed"]
    assert [event["step"] for event in events if "step" in event] == [1, 2, 3, 4]
    assert {event["steps"] for event in events if "step" in event} == {STEPS}
    assert base64.b64decode(events[-1]["b64_json"]) == pictures(ask(daemon, seed=7))[0]
    assert size(base64.b64decode(events[2]["b64_json"])) == (64, 64)


def test_openais_client_gets_events(client: openai.OpenAI) -> None:
    with client.images.generate(
        model="tiny", prompt="a cat", stream=True, partial_images=2, extra_body={"steps": STEPS}
    ) as stream:
        kinds = [event.type for event in stream]
    assert kinds.count("image_generation.partial_image") == 2
    assert kinds[-1] == "image_generation.completed"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_engine(daemon: Daemon, stream: bool) -> None:
    """What it asked for would take minutes."""
    before = len(daemon.get("/engines/requests?status=499").json())
    body = {"model": "tiny", "prompt": "a cat", "steps": 150, "n": 10, "size": "128x128", "stream": stream}
    with daemon.client() as client:
        if stream:
            with client.stream("POST", IMAGES, json=body) as answer:
                next(answer.iter_raw())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(IMAGES, json=body, timeout=0.5)
    until(lambda: len(daemon.get("/engines/requests?status=499").json()) == before + 1)
    until(lambda: not any(runner["in_use"] for runner in daemon.runners()))
    left, ended = map(int, STOPPED.findall(daemon.run("logs", "tiny").stdout)[-1])
    assert ended - left in (0, 1)  # the step that was under way
    assert ask(daemon).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"prompt": ""}, "prompt", "must be a text"),
        ({"prompt": ["a"]}, "prompt", "must be a text"),
        ({"prompt": "a" * 4001}, "prompt", "4001 characters"),
        ({"n": 11}, "n", "from 1 to 10"),
        ({"n": True}, "n", "from 1 to 10"),
        ({"steps": 10**9}, "steps", "from 1 to 150"),
        ({"seed": -1}, "seed", "from 0 to"),
        ({"seed": 1 << 63}, "seed", "from 0 to"),
        ({"size": "1000000000x1000000000"}, "size", "128x128 is the largest size"),
        ({"size": "256x128"}, "size", "176x88 is the largest size"),
        ({"size": "0x64"}, "size", "multiples of 8"),
        ({"size": "65x64"}, "size", "multiples of 8"),
        ({"size": "large"}, "size", "WIDTHxHEIGHT"),
        ({"guidance_scale": "7"}, "guidance_scale", "from 0 to 50"),
        ({"response_format": "url"}, "response_format", "no pictures are kept"),
        ({"output_format": "gif"}, "output_format", "png, jpeg, webp"),
        ({"output_compression": 101}, "output_compression", "from 0 to 100"),
        ({"partial_images": 4, "stream": True}, "partial_images", "from 0 to 3"),
        ({"negative_prompt": 5}, "negative_prompt", "must be a text"),
    ],
)
def test_what_is_refused(daemon: Daemon, fields: dict[str, Any], param: str, said: str) -> None:
    answer = ask(daemon, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], said in error["message"]) == (400, param, True), error


def test_a_largest_size_of_ones_own(daemon: Daemon) -> None:
    done = daemon.run("configure", "tiny", "--set", "diffusers.largest=64", "--restart")
    assert done.returncode == 0, done.stderr
    assert "64x64 is the largest size" in ask(daemon, size="72x72").json()["error"]["message"]
    assert size(pictures(ask(daemon))[0]) == (64, 64)


def test_the_command_line(daemon: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "cat.png"
    done = daemon.run("run", "tiny", "a cat", "-o", str(file), "--seed", "3")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert size(file.read_bytes()) == (64, 64)
    assert "Drawing: step 1 of 50" in done.stderr
