"""Which origins and which names of the server are allowed."""

import re
from pathlib import Path

import pytest

import modelrunner
from modelrunner.errors import Forbidden
from modelrunner.gateway.access import Access, host_names
from modelrunner.http.answers import cors

SERVER = "localhost:12434"


def allows(patterns: list[str], origin: str) -> bool:
    try:
        return Access([SERVER], patterns).check(SERVER, origin, None, local=False) == origin
    except Forbidden:
        return False


@pytest.mark.parametrize(
    ("pattern", "allowed", "refused"),
    [
        ("http://localhost:*", ["http://localhost", "http://localhost:3000"], ["http://localhost.evil", "null"]),
        ("https://*.example", ["https://a.example", "https://a.b.example"], ["https://example", "https://a.example:1"]),
        ("https://*.example:*", ["https://a.example:1"], ["https://a:1.example", "https://a/.example"]),
        ("chrome-extension://*", ["chrome-extension://abcdef"], ["http://abcdef", "xchrome-extension://a"]),
        ("app://", ["app://obsidian.md", "app://."], ["http://obsidian.md", "app:"]),
        ("null", ["null"], ["http://null", "nullx"]),
        ("*", ["http://any.example:1", "app://x"], ["null"]),
        ("HTTPS://Chat.Example/", ["https://chat.example"], ["https://chatxexample"]),
    ],
)
def test_a_pattern_allows_what_it_says_and_nothing_else(pattern: str, allowed: list[str], refused: list[str]) -> None:
    assert [origin for origin in allowed if not allows([pattern], origin)] == []
    assert [origin for origin in refused if allows([pattern], origin)] == []


def test_without_a_setting_only_our_own_pages_may_ask() -> None:
    assert allows([], f"http://{SERVER}")
    for origin in ("null", "http://localhost:3000", "app://x"):
        assert not allows([], origin)


def test_the_refusal_says_which_setting_allows_it() -> None:
    access = Access(host_names(12434, []))
    with pytest.raises(Forbidden, match=r'origins = \["http://localhost:3000"\]'):
        access.check(SERVER, "http://localhost:3000", None, local=False)
    with pytest.raises(Forbidden, match=r'hosts = \["box:\*"\]'):
        access.check("box:12434", None, None, local=False)


def test_a_containers_name_for_the_host_with_one_port_or_any() -> None:
    access = Access(host_names(12434, ["host.docker.internal", "tunnel:*", "other:80"]))
    for host in ("host.docker.internal:12434", "tunnel", "tunnel:8080", "other:80"):
        access.check(host, None, None, local=False)
    for host in ("host.docker.internal", "host.docker.internal:80", "tunnel.evil:8080", "other:12434"):
        with pytest.raises(Forbidden):
            access.check(host, None, None, local=False)


def test_no_star_stands_for_a_name_of_the_server() -> None:
    """Or a page could rebind its own name to loopback."""
    access = Access(host_names(12434, ["*", "*.example"]))
    for host in ("evil.test:12434", "a.example:12434"):
        with pytest.raises(Forbidden):
            access.check(host, None, None, local=False)


def test_a_tunnel_may_change_the_port_of_this_machine() -> None:
    access = Access(host_names(12434, []))
    for host in ("localhost", "localhost:9999", "127.0.0.1:80", "[::1]:9999"):
        access.check(host, None, None, local=False)


def test_the_advice_about_a_host_helps() -> None:
    for host in ("box:9999", "chat.example"):
        with pytest.raises(Forbidden) as caught:
            Access(host_names(12434, [])).check(host, None, None, local=False)
        advised = caught.value.message.partition('["')[2].partition('"]')[0]
        Access(host_names(12434, [advised])).check(host, None, None, local=False)


def test_local_origins_are_this_machine_s_pages_and_apps() -> None:
    for origin in ("http://localhost:3000", "https://127.0.0.1", "app://obsidian.md", "tauri://localhost", "file://"):
        assert allows(["local"], origin)
    for origin in ("null", "https://evil.example", "http://localhost.evil.example", "chrome-extension://x"):
        assert not allows(["local"], origin)


def test_a_page_may_read_every_field_of_ours() -> None:
    """A browser hides the fields that are not named to it: a page would not see that its request was cut."""
    package = Path(modelrunner.__file__).parent
    ours = {name for file in package.rglob("*.py") for name in re.findall(r"X-Modelrunner-[A-Za-z]+", file.read_text())}
    exposed = dict(cors("https://chat.example"))[b"Access-Control-Expose-Headers"].decode().split(", ")
    assert ours == {name for name in exposed if name.startswith("X-Modelrunner")}
    assert "X-Modelrunner-Truncated" in ours
