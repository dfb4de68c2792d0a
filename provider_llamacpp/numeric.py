"""Addresses that are written out, which need no looking up."""

from __future__ import annotations

import socket

Address = tuple[int, int, int, str, tuple[str, int]]
"""What :func:`socket.getaddrinfo` gives for one."""


def ipv4(host: str, port: int) -> list[Address]:
    """What :func:`socket.getaddrinfo` finds for an IPv4 address of four numbers, in a twentieth of
    the time; nothing for every other ``host``."""
    try:
        socket.inet_pton(socket.AF_INET, host)
    except (OSError, ValueError):
        return []
    return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port))]
