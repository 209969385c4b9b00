"""The proxy of each request, from the variables of the environment."""

import httpx
import pytest

from modelrunner.web.proxies import named_for

HTTPS, ALL = "http://proxy.example:1", "socks5://proxy.example:2"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("https_proxy", HTTPS)
    monkeypatch.setenv("all_proxy", ALL)


@pytest.mark.parametrize(
    ("url", "proxy"),
    [
        ("https://hub.example/x", HTTPS),
        ("http://hub.example/x", ALL),
        ("https://localhost:8000", ""),
        ("http://127.0.0.2", ""),
        ("http://[::1]:80", ""),
    ],
)
def test_the_variable_of_the_scheme_goes_before_that_of_all(url: str, proxy: str) -> None:
    assert named_for(httpx.URL(url)) == proxy


def test_a_proxy_without_a_scheme_speaks_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "proxy.example:3")
    assert named_for(httpx.URL("https://hub.example")) == "http://proxy.example:3"


@pytest.mark.parametrize(
    ("exceptions", "direct", "asked"),
    [
        ("*", ["a.example", "10.1.1.1"], []),
        ("", [], ["a.example"]),
        (" , ,", [], ["a.example"]),
        ("example.com", ["example.com", "EXAMPLE.com", "a.example.com", "example.com."], ["notexample.com", "com"]),
        (".example.com", ["example.com", "a.example.com"], ["notexample.com"]),
        ("*.example.com", ["example.com", "a.example.com"], ["notexample.com"]),
        ("https://example.com", ["example.com"], ["b.com"]),
        ("example.com:8443", ["example.com:8443"], ["example.com", "example.com:1"]),
        ("10.0.0.0/8,fe80::/10", ["10.200.0.1", "[fe80::1]"], ["11.0.0.1", "[2001:db8::1]"]),
        ("192.168.1.5", ["192.168.1.5"], ["192.168.1.50"]),
        ("[2001:db8::1]", ["[2001:db8::1]"], ["[2001:db8::2]"]),
        ("2001:db8::1", ["[2001:db8::1]:8443"], ["[2001:db8::2]"]),
        ("[2001:db8::1]:443", [], ["[2001:db8::1]:8443"]),
        ("10.0.0.0/99,::::,%,.,*.", [], ["a.example", "10.1.1.1"]),
    ],
)
def test_exceptions(monkeypatch: pytest.MonkeyPatch, exceptions: str, direct: list[str], asked: list[str]) -> None:
    monkeypatch.setenv("no_proxy", exceptions)
    assert {host: named_for(httpx.URL(f"https://{host}/")) for host in (*direct, *asked)} == dict.fromkeys(
        direct, ""
    ) | dict.fromkeys(asked, HTTPS)
