"""Pictures of a model of random weights, through the daemon, for clients and on the command line."""

import base64
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator
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


def test_the_address_of_a_picture_holds_it(daemon: Daemon) -> None:
    [picture] = ask(daemon, response_format="url", output_format="webp", seed=7).json()["data"]
    assert picture.keys() == {"url", "seed"}
    head, _, data = picture["url"].partition(",")
    assert head == "data:image/webp;base64"
    assert [base64.b64decode(data)] == pictures(ask(daemon, output_format="webp", seed=7))


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
        ({"response_format": "file"}, "response_format", "b64_json, url"),
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


def png(width: int, height: int, pixel: Callable[[int, int], tuple[int, int, int, int]]) -> bytes:
    """A picture with these values of red, green, blue and alpha."""
    rows = [b"\0" + bytes(value for x in range(width) for value in pixel(x, y)) for y in range(height)]
    return png_of(width, height, b"".join(rows))


def png_of(width: int, height: int, rows: bytes) -> bytes:
    """A file of 8 bits and four channels (https://www.w3.org/TR/png-3, 11)."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    ]
    parts = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def rgb(data: bytes) -> list[bytes]:
    """The rows of a picture that the engine made: 8 bits, three channels."""
    chunks, at = b"", 8
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        chunks += data[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += 12 + length
    width, height = size(data)
    plain, rows, before = zlib.decompress(chunks), [], bytes(3 * width)
    for y in range(height):
        start = y * (3 * width + 1)
        before = unfiltered(plain[start], plain[start + 1 : start + 1 + 3 * width], before)
        rows.append(before)
    return rows


def unfiltered(kind: int, row: bytes, above: bytes) -> bytes:
    """https://www.w3.org/TR/png-3, 9.2"""
    out = bytearray()
    for i, value in enumerate(row):
        a, b, c = (out[i - 3], above[i], above[i - 3]) if i >= 3 else (0, above[i], 0)
        nearest = min((a, b, c), key=lambda each: abs(a + b - c - each))
        out.append((value + (0, a, b, (a + b) // 2, nearest)[kind]) % 256)
    return bytes(out)


GREY = png(64, 64, lambda x, y: (100, 100, 100, 255))
LEFT = png(64, 64, lambda x, y: (0, 0, 0, 0 if x < 32 else 255))  # transparent on the left


def edit(daemon: Daemon, path: str = "edits", picture: bytes = GREY, **fields: Any) -> httpx.Response:
    files = {"image": ("../../a.png", picture), **({"mask": ("m.png", m)} if (m := fields.pop("mask", None)) else {})}
    data = {"model": "tiny", "prompt": "a cat", "steps": STEPS, "seed": 7, **fields}
    with daemon.client() as client:
        return client.post(f"/v1/images/{path}", data=data, files=files)


def test_an_edit_begins_with_the_picture_and_keeps_what_its_mask_covers(daemon: Daemon) -> None:
    [masked] = pictures(edit(daemon, mask=LEFT))
    assert size(masked) == (64, 64)
    for row in rgb(masked):
        assert row[96:] == bytes([100]) * 96
    assert any(row[:96] != bytes([100]) * 96 for row in rgb(masked))
    [transparent] = pictures(edit(daemon, picture=png(64, 64, lambda x, y: (100, 100, 100, 0 if x < 32 else 255))))
    assert all(row[96:] == bytes([100]) * 96 for row in rgb(transparent))
    [whole] = pictures(edit(daemon))
    assert pictures(edit(daemon)) == [whole]
    assert pictures(edit(daemon, seed=8)) != [whole]
    assert pictures(edit(daemon, strength=0.3)) != [whole]
    assert [size(each) for each in pictures(edit(daemon, size="64x96", n=2))] == [(64, 96)] * 2


def test_openais_client_edits(client: openai.OpenAI) -> None:
    extra = {"steps": STEPS, "seed": 7}
    answer = client.images.edit(model="tiny", image=GREY, mask=LEFT, prompt="a cat", n=2, extra_body=extra)
    assert [size(base64.b64decode(each.b64_json or "")) for each in answer.data or []] == [(64, 64)] * 2
    with client.images.edit(model="tiny", image=GREY, prompt="a cat", stream=True, extra_body=extra) as stream:
        assert [event.type for event in stream][-1] == "image_edit.completed"


def test_a_variation_begins_with_a_picture_and_has_no_prompt(daemon: Daemon) -> None:
    made = pictures(edit(daemon, "variations", n=2))
    assert [size(each) for each in made] == [(64, 64)] * 2
    assert pictures(edit(daemon, "variations", n=2, prompt="another")) == made
    assert made[0] not in pictures(edit(daemon))


def test_a_picture_that_is_too_large_for_an_edit_is_made_smaller(daemon: Daemon) -> None:
    [made] = pictures(edit(daemon, picture=png_of(512, 256, (b"\0" + b"ddd\xff" * 512) * 256)))
    assert size(made) == (176, 88)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"picture": b"no picture"}, "image", "no picture in PNG, JPEG, WEBP"),
        ({"picture": GREY[:90]}, "image", "no picture in PNG"),
        ({"picture": png_of(30000, 40000, b"")}, "image", "30000x40000 pixels"),
        ({"mask": png(32, 32, lambda x, y: (0, 0, 0, 0))}, "mask", "must be the same"),
        ({"mask": GREY}, "mask", "no transparent pixels"),
        ({"strength": "2"}, "strength", "from 0.01 to 1"),
        ({"strength": "NaN"}, "strength", "from 0.01 to 1"),
        ({"n": "[" * 50000}, "n", "from 1 to 10"),
        ({"n": "0"}, "n", "from 1 to 10"),
        ({"prompt": ""}, "prompt", "must be a text"),
        ({"prompt": "a" * 70000}, "prompt", "65536 bytes at most"),
        ({"size": "1000000000x1000000000"}, "size", "128x128 is the largest size"),
        ({"image[]": "text"}, "image", "has 2 pictures"),
    ],
)
def test_what_is_refused_of_an_edit(daemon: Daemon, fields: dict[str, Any], param: str, said: str) -> None:
    answer = edit(daemon, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], said in error["message"]) == (400, param, True), error


def test_an_edit_needs_a_form_with_a_picture(daemon: Daemon) -> None:
    answer = daemon.post("/v1/images/edits?model=tiny", b"{}")
    assert (answer.status_code, "multipart/form-data" in answer.json()["error"]["message"]) == (400, True)
    with daemon.client() as client:
        none = client.post("/v1/images/edits", data={"model": "tiny"}, files={"other": b"x"})
    assert (none.status_code, none.json()["error"]["param"]) == (400, "image")


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
    done = daemon.run("run", "tiny", "a dog", "--image", str(file), "-o", str(tmp_path / "dog.webp"), "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert re.match(BEGINNINGS["webp"], (tmp_path / "dog.webp").read_bytes(), re.DOTALL)
    assert "Drawing: step 1 of 40" in done.stderr
