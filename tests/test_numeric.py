"""Addresses that are not looked up are those that looking up would give."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provider_llamacpp.numeric import ipv4


@given(st.tuples(*[st.integers(0, 255)] * 4), st.integers(0, 65535))
def test_four_numbers_are_what_the_resolver_says(numbers: tuple[int, ...], port: int) -> None:
    host = ".".join(map(str, numbers))
    assert ipv4(host, port) == socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "localhost",
        "127.1",
        "1.2.3",
        "1.2.3.4.5",
        "256.1.1.1",
        "0x7f.0.0.1",
        "::1",
        " 1.2.3.4",
        "1.2.3.4 ",
        "1.2.3.4\0",
        "\u0661.2.3.4",
        "h\ud800st",
    ],
)
def test_every_other_host_is_left_to_the_resolver(host: str) -> None:
    assert ipv4(host, 1) == []
