"""A plugin of pytest between llama.cpp's server tests and the server: `LLAMA_TESTS_SIDE` is `direct` (llama-server
itself) or `daemon`. It changes how their `utils.py` starts a server, and with which models; the tests and the making of
llama-server's command line are theirs."""

import os
import signal
import subprocess
import sys
import types
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import standin
from through import ModelServer, RouteMap

from modelrunner.store import Store
from tests.models import prepare

SIDE = os.environ["LLAMA_TESTS_SIDE"]
LIMIT = 120  # seconds for a test: it may hang in a stream, which has no limit of its own
# Theirs are downloaded; these stand in their place on both sides. A text that they expect fails on both, too.
STAND_INS = {
    "ggml-org/test-model-stories260K": standin.NAME,
    "ggml-org/test-model-stories260K-infill": standin.NAME,
    "ggml-org/stories15M_MOE": standin.NAME,
    "ggml-org/models/bert-bge-small/ggml-model-f16.gguf": prepare.MINILM,
    "ggml-org/models/jina-reranker-v1-tiny-en/ggml-model-f16.gguf": prepare.RERANKER,
}

sys.modules["wget"] = types.ModuleType("wget")  # nothing is downloaded
import utils  # noqa: E402  (theirs)


@cache
def model_files() -> dict[str, Path]:
    store = Store(Path(os.environ["LLAMA_TESTS_DATA"]))
    return {reference: store.bundle(reference).model_file for reference in set(STAND_INS.values())}


def with_stand_in(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Returns llama-server's words without those that name a model, and the reference of the model in its place; None
    for a router, which has no model. Skips the test if no model here can stand in."""
    rest, named, waiting = [], [], iter(words)
    for word in waiting:
        if word in ("--hf-repo", "--hf-file"):
            named.append(next(waiting))
        elif word in ("--model", "--model-url", "--mmproj-url", "--model-draft"):
            pytest.skip(f"no model here stands in for {next(waiting)}")
        elif word != "--offline":
            rest.append(word)
    if not named:
        return rest, None
    found = STAND_INS.get(named[0]) or STAND_INS.get("/".join(named))
    if found is None:
        pytest.skip(f"no model here stands in for {'/'.join(named)}")
    return rest, found


def start_directly(words: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    rest, reference = with_stand_in(words)
    model = ["--model", str(model_files()[reference])] if reference else []
    return subprocess.Popen([*rest, *model], **options)


def start_daemon(words: Sequence[str], **_options: Any) -> ModelServer:
    rest, reference = with_stand_in(words)
    return ModelServer(rest[1:], reference or standin.NAME)  # the daemon chooses among models, as a router


def no_download(url: str, *_unused: object) -> str:
    pytest.skip(f"{url} is not here")


utils.subprocess = types.SimpleNamespace(
    Popen=start_directly if SIDE == "direct" else start_daemon, TimeoutExpired=subprocess.TimeoutExpired
)
utils.download_file = no_download
utils.ServerPreset.load_all = staticmethod(lambda: None)  # only fills the cache of downloads
routes = RouteMap()
if SIDE == "daemon":
    routes.take(utils)


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def give_up(*_unused: object) -> None:
        raise TimeoutError(f"the test took more than {seconds} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    routes.missing.clear()
    ModelServer.refused.clear()
    try:
        with limited(LIMIT):
            return (yield)
    finally:
        item.user_properties += [("missing", path) for path in sorted(routes.missing)]
        item.user_properties += [("refused", option) for option in sorted(ModelServer.refused)]


def pytest_sessionfinish() -> None:
    ModelServer.end()
