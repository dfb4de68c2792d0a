"""api_url in all the forms people write it, and the ones that cannot be used."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provider_llamacpp.errors import ProviderError
from provider_llamacpp.server.address import Target, normalise_api_url


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://127.0.0.1:8080/", "http://127.0.0.1:8080"),
        ("http://127.0.0.1:8080/v1", "http://127.0.0.1:8080"),
        ("http://127.0.0.1:8080/v1/", "http://127.0.0.1:8080"),
        ("http://127.0.0.1:8080/v1/chat/completions", "http://127.0.0.1:8080"),
        ("http://127.0.0.1:8080/v1/chat/completions//", "http://127.0.0.1:8080"),
        ("  http://Pi5.local:8080/v1\n", "http://pi5.local:8080"),
        ("HTTP://host", "http://host"),
        ("https://gw.example/llama/v1", "https://gw.example/llama"),
        ("https://gw.example/llama/chat/completions", "https://gw.example/llama"),
        ("https://gw.example/v1/llama", "https://gw.example/v1/llama"),
        ("http://[::1]:8080/v1", "http://[::1]:8080"),
        ("http://[FE80::1%25eth0]:8080", "http://[fe80::1%25eth0]:8080"),
        ("http://host.:8080", "http://host:8080"),
        ("http://host:", "http://host"),
        ("http://under_score:1/v1", "http://under_score:1"),
        ("http://bücher.example/v1", "http://xn--bcher-kva.example"),
        ("http://host/a%20b/v1", "http://host/a%20b"),
    ],
)
def test_every_way_to_write_it_names_the_same_root(url: str, root: str) -> None:
    assert normalise_api_url(url) == root
    assert normalise_api_url(root) == root


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "must begin with http"),
        ("127.0.0.1:8080", "must begin with http"),
        ("/v1", "must begin with http"),
        ("ws://host:1", "must begin with http"),
        ("file:///etc/passwd", "must begin with http"),
        ("http://", "names no host"),
        ("http:///v1", "names no host"),
        ("http://:8080", "names no host"),
        ("http://host:99999", "bad port"),
        ("http://host:-1", "bad port"),
        ("http://host:abc", "bad port"),
        ("http://host:0", "port 0"),
        ("http://[::1", "bad IPv6"),
        ("http://ho st", "blank"),
        ("http://host/a\r\nX-Evil: 1", "control character"),
        ("http://host\\@evil", "backslash"),
        ("http://user:pw-4711@host", "use the API key"),
        ("http://pw-4711@host", "use the API key"),
        ("http://host/v1?key=pw-4711", "must not hold '?'"),
        ("http://host/v1#pw-4711", "must not hold '?'"),
        ("http://a..b", "no valid host name"),
        ("http://host/ü", "not ASCII"),
        ("http://" + "a" * 70, "no valid host name"),
        ("http://ho$t", "cannot exist"),
        ("http://*", "cannot exist"),
    ],
)
def test_an_address_that_cannot_be_used_is_named_but_not_shown(url: str, words: str) -> None:
    with pytest.raises(ProviderError, match="api_url") as caught:
        normalise_api_url(url)
    assert caught.value.kind == "permanent"
    assert words in caught.value.message
    assert "pw-4711" not in caught.value.message


@given(st.one_of(st.text(), st.text().map(lambda rest: "http://" + rest)))
def test_any_text_gives_a_root_that_stays_itself_or_the_error(url: str) -> None:
    try:
        root = normalise_api_url(url)
    except ProviderError:
        return
    assert root.isascii()
    assert root.startswith(("http://", "https://"))
    assert normalise_api_url(root) == root


def test_the_key_is_in_no_repr() -> None:
    assert "pw-4711" not in repr(Target("http://host", "pw-4711"))
