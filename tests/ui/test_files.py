"""The files of the page: what is served, to whom, and what was taken from elsewhere."""

import asyncio
import gzip
import hashlib
import tomllib

import aiohttp
import pytest

from modelrunner.ui.staticfiles import STATIC
from tests.api.conftest import StartDaemon, start_daemon

__all__ = ["start_daemon"]

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
LIBRARIES = tomllib.loads((STATIC.parent / "vendored.toml").read_text())["library"]


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library["name"])
def test_a_library_is_the_one_that_is_named(library: dict):
    assert hashlib.sha256((STATIC / library["file"]).read_bytes()).hexdigest() == library["sha256"]
    assert all("opyright" in (STATIC.parent / "licenses" / name).read_text() for name in library["licences"])


async def test_browsers_get_the_page_and_programs_their_line(start_daemon: StartDaemon):
    daemon = await start_daemon()
    for path, headers in (("/", BROWSER), ("/ui", {})):
        async with daemon.tcp.get(path, headers=headers) as answer:
            assert "<!doctype html>" in await answer.text()
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
    async with daemon.tcp.get("/") as answer:
        assert await answer.text() == "modelrunner is running\n"


async def test_files_are_compressed_and_fetched_once(start_daemon: StartDaemon):
    daemon = await start_daemon()
    async with aiohttp.ClientSession(daemon.tcp._base_url, auto_decompress=False) as client:
        async with client.get("/ui/app.js", headers={"Accept-Encoding": "gzip"}) as answer:
            assert gzip.decompress(await answer.read()) == (STATIC / "app.js").read_bytes()
            etag = answer.headers["ETag"]
            assert answer.headers["Vary"] == "Origin, Accept, Accept-Encoding"
        async with client.get("/ui/app.js", headers={"Accept-Encoding": "identity"}) as answer:
            assert await answer.read() == (STATIC / "app.js").read_bytes()
            assert answer.headers["ETag"] != etag  # strong: it names these bytes
        async with client.get("/ui/app.js", headers={"Accept-Encoding": "gzip", "If-None-Match": etag}) as answer:
            assert answer.status == 304
            assert await answer.read() == b""


async def test_the_page_needs_no_key_and_its_data_does(start_daemon: StartDaemon):
    daemon = await start_daemon(models={"smol": 0})
    async with daemon.unix.post("/keys", json={"name": "kim"}) as answer:
        text = (await answer.json())["text"]
    for path in ("/", "/ui", *(f"/ui/{file.name}" for file in STATIC.iterdir())):
        async with daemon.tcp.get(path, headers=BROWSER) as answer:
            assert answer.status == 200, path
    for path in ("/engines/now", "/models", "/ui/../keys", "/ui/..%2fkeys", "/ui/%2e%2e/keys", "/ui/x/../../keys"):
        reader, writer = await _raw(daemon.port, path)
        status = (await reader.readline()).split()[1]
        writer.close()
        await writer.wait_closed()
        assert status == b"401", path
    async with daemon.tcp.get("/engines/now", headers={"X-API-Key": text}) as answer:
        assert answer.status == 403  # a key for inference alone


async def _raw(port: int, path: str):
    """Asks for the path as it stands: a client would make it normal first."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
    await writer.drain()
    return reader, writer


async def test_what_is_no_file_of_the_page_is_not_found(start_daemon: StartDaemon):
    daemon = await start_daemon()
    for path in ("/ui/none.js", "/ui/__init__.py", "/ui/a%00.js", "/ui/..%2ffiles.py", "/ui/APP.JS"):
        async with daemon.tcp.get(path) as answer:
            assert answer.status == 404, path
