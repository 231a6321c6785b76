"""Bytes as text for people: MiB with one decimal, rounded so that the figures never contradict each other."""

from __future__ import annotations


def mib(size: int) -> str:
    """Return `size` bytes in MiB, rounded to the nearest tenth."""
    return f"{size / (1 << 20):.1f}"


def mib_up(size: int) -> str:
    """Return `size` bytes in MiB, rounded up: for what is required.

    Together with `mib_down` for what is there, "31744.0 required, 31744.0 free" cannot be
    printed for a request that does not fit.
    """
    tenths = -(-size * 10 // (1 << 20))
    return f"{tenths // 10}.{tenths % 10}"


def mib_down(size: int) -> str:
    """Return `size` bytes in MiB, rounded down: for what is available."""
    tenths = size * 10 // (1 << 20)
    return f"{tenths // 10}.{tenths % 10}"
