"""Endpoints as users write them, and that keys stay hidden."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servetune.spec import SpecError, Target

KEY = "sk-0123456789abcdef"


@pytest.mark.parametrize(
    ("url", "host", "port", "base", "authority"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, "", "127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "127.0.0.1", 8000, "", "127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1", "127.0.0.1", 8000, "", "127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "127.0.0.1", 8000, "", "127.0.0.1:8000"),
        ("https://api.example.com/openai/v1", "api.example.com", 443, "/openai", "api.example.com"),
        ("https://api.example.com/v1beta", "api.example.com", 443, "/v1beta", "api.example.com"),
        ("http://EXAMPLE.com", "example.com", 80, "", "example.com"),
        ("https://[::1]:8443/v1", "::1", 8443, "", "[::1]:8443"),
        ("http://[::1]", "::1", 80, "", "[::1]"),
        ("http://host:443", "host", 443, "", "host:443"),
    ],
)
def test_endpoints(url: str, host: str, port: int, base: str, authority: str) -> None:
    target = Target.parse(url)
    assert (target.host, target.port, target.base, target.authority) == (host, port, base, authority)
    again = Target.parse(target.url)
    assert again == target


@pytest.mark.parametrize(
    "url",
    [
        *["", "localhost", "localhost:8000", "//x", "file:///etc/passwd", "http://", "http:///v1"],
        *["http://x:0", "http://x:-1", "http://x:65536", "http://x:abc", "http://[::1", "http://a:b@x"],
        *["http://x/?a=1", "http://x/#a", "unix:/run/x.sock"],
    ],
)
def test_what_is_no_endpoint(url: str) -> None:
    with pytest.raises(SpecError, match="endpoint"):
        Target.parse(url)


def test_passwords_are_not_repeated() -> None:
    for url in ("http://me:hunter22@x:8000", "http://hunter22@x", "http://me:hunter22@x:99999"):
        with pytest.raises(SpecError) as caught:
            Target.parse(url)
        assert "hunter22" not in str(caught.value)


def test_proxies() -> None:
    assert Target.parse("http://x", proxy="http://p:3128").proxy == ("p", 3128)
    assert Target.parse("http://x", proxy="http://p").proxy == ("p", 80)
    for proxy in ("p:3128", "https://p:1", "socks5://p:1", "http://a:hunter22@p:1"):
        with pytest.raises(SpecError, match="proxy") as caught:
            Target.parse("http://x", proxy=proxy)
        assert "hunter22" not in str(caught.value)


@pytest.mark.parametrize("key", ["a\r\nx: y", "schlüssel", "tab\there", "\x00"])
def test_keys_that_cannot_be_sent(key: str) -> None:
    with pytest.raises(SpecError, match="key") as caught:
        Target.parse("http://x", key=key)
    assert key not in str(caught.value)


def test_the_key_is_not_shown() -> None:
    target = Target.parse("http://x", key=KEY)
    assert KEY not in repr(target)
    assert "***" in repr(target)
    assert KEY not in str(target)
    assert target.masked(f"bad key {KEY}, {KEY}!") == "bad key ***, ***!"
    assert target.masked(f"bad key {KEY[:12]}") == "bad key ***"  # cut off
    assert target.masked("nothing here") == "nothing here"
    assert Target.parse("http://x").masked(KEY) == KEY
    assert Target.parse("http://x", key="").masked("text") == "text"
    assert Target.parse("http://x", key="abc").masked("xabcx") == "x***x"


@given(
    st.text(max_size=20),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1),
    st.text(max_size=20),
)
def test_no_text_shows_a_key(before: str, key: str, after: str) -> None:
    masked = Target.parse("http://x", key=key).masked(before + key + after)
    assert key not in masked.replace("***", "\0")


@given(st.text(max_size=20) | st.text(st.sampled_from("htp:/[]@.?#1x"), max_size=20))
def test_any_text_is_an_endpoint_or_refused(text: str) -> None:
    try:
        target = Target.parse(text)
    except SpecError:
        return
    assert target.host
    assert 0 < target.port < 65536
