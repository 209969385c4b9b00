"""Images for the real vLLM, in every family, with a tiny model of random weights."""

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from modelrunner.types import Bundle
from tests.e2e.conftest import StartDaemon
from tests.e2e.daemons import Daemon
from tests.e2e.test_images_and_sound import FAMILIES, NO_IMAGE, PIXEL, TORN, chat, families, find, image, sound, wav
from tests.e2e.test_images_and_sound import tokens as tokens_of
from tests.models.prepare import SMOLLM2_SAFETENSORS

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
SEES = "my/sees"
MARKS = 3  # tokens around an image's
IMAGE_TOKENS = 4


@pytest.fixture(autouse=True)
def nothing_left(no_process_left: None) -> None:
    """Instead of the check after every test: the daemon serves all of them."""


@pytest.fixture(scope="module")
def daemon(
    installed: Path,
    make_daemon: StartDaemon,
    bundle_of: Callable[[str], Bundle],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Daemon]:
    daemon = make_daemon()
    (daemon.data / "engines" / "vllm").symlink_to(installed)
    daemon.start()
    folder = tmp_path_factory.mktemp("vision") / "model"
    script = Path(__file__).with_name("tiny_vision.py")
    tokenizer = bundle_of(SMOLLM2_SAFETENSORS).directory
    subprocess.run([installed / "bin" / "python", script, tokenizer, folder], check=True, capture_output=True)
    packaged = daemon.run("package", "--safetensors-dir", str(folder), SEES)
    assert packaged.returncode == 0, packaged.stderr
    yield daemon
    daemon.stop()


@pytest.mark.parametrize("name", FAMILIES)
def test_an_image_is_seen(daemon: Daemon, name: str) -> None:
    """By as many tokens of the prompt as the image has."""
    blind, seeing = families(None)[name], families(PIXEL)[name]
    counts = blind.counts[:1]  # vLLM's messages do not tell what came from the cache
    without = tokens_of(daemon, SEES, replace(blind, counts=counts))
    assert tokens_of(daemon, SEES, replace(seeing, counts=counts)) == without + MARKS + IMAGE_TOKENS


@pytest.mark.parametrize("data", [TORN, NO_IMAGE], ids=["torn", "none"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_damaged_image_is_the_clients_fault(daemon: Daemon, name: str, data: str) -> None:
    family = families(data)[name]
    answer = daemon.post(family.path, {"model": SEES, **family.body})
    assert answer.status_code == 400
    assert find(answer.json(), ".".join(family.said))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_that_sees_nothing_says_so(daemon: Daemon, name: str) -> None:
    family = families(PIXEL)[name]
    answer = daemon.post(family.path, {"model": SMOLLM2_SAFETENSORS, **family.body})
    assert answer.status_code == 400
    assert find(answer.json(), ".".join(family.said))


def test_what_each_model_takes_is_in_the_list(daemon: Daemon) -> None:
    listed = {model["id"]: model["capabilities"] for model in daemon.get("/v1/models").json()["data"]}
    assert listed[SEES] == ["chat", "completion", "vision"]


def test_sound_is_refused(daemon: Daemon) -> None:
    answer = chat(daemon, SEES, sound(wav(1)))
    assert answer.status_code == 400
    assert "audio" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("url", ["http://127.0.0.1:1/x.png", "file:///etc/passwd", "@@@"])
def test_no_engine_fetches_a_file(daemon: Daemon, url: str, stream: bool) -> None:
    answer = chat(daemon, SEES, {"type": "image_url", "image_url": {"url": url}}, stream=stream)
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        400,
        "the engine fetches no files: send an image or a sound as a data: URL",
    )


def test_another_file_is_no_image(daemon: Daemon) -> None:
    answer = chat(daemon, SEES, {"type": "image_url", "image_url": {"url": "data:text/plain;base64,eA=="}})
    assert answer.status_code == 400, answer.text


def test_an_image_in_a_stream(daemon: Daemon) -> None:
    answer = chat(daemon, SEES, image(PIXEL), stream=True)
    assert (answer.status_code, answer.text.rstrip()[-12:]) == (200, "data: [DONE]")
