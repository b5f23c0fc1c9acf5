"""Exchanges among hosts that a rank does not wait for (backends/hosts.py): two ranks as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from weft.backends.hosts import Exchanges
from weft.errors import Mismatch, Timeout


class Wire:
    """An all-gather of two threads."""

    def __init__(self) -> None:
        self.meet = threading.Barrier(2, timeout=10)
        self.said: list[Any] = [None, None]

    def of(self, rank: int) -> Callable[[Any], list[Any]]:
        def exchange(obj: Any) -> list[Any]:
            self.said[rank] = obj
            self.meet.wait()
            both = list(self.said)
            self.meet.wait()
            return both

        return exchange


def alike(theirs: list[Any]) -> None:
    if len(set(theirs)) > 1:
        raise Mismatch(f"{theirs}")


def two(rank: Callable[[int, Exchanges], Any]) -> list[Any]:
    wire = Wire()
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(rank, r, Exchanges(wire.of(r))) for r in range(2)]
        return [end.result(timeout=20) for end in ends]


def test_what_is_heard_later_does_not_wait() -> None:
    gate = threading.Event()

    def rank(me: int, hosts: Exchanges) -> list[Any]:
        if me:
            gate.wait(10)  # the other has asked, and gone on
        hosts.later("a", alike)
        if not me:
            gate.set()
        hosts.wait()
        return hosts.now(me)

    assert two(rank) == [[0, 1], [0, 1]]


def test_a_disagreement_is_raised_on_both_and_the_next_exchange_is_of_one_call() -> None:
    """However many exchanges a rank asks for before it is told."""

    def rank(me: int, hosts: Exchanges) -> list[Any]:
        hosts.later(("rows", me), alike)
        for more in range(3 * me):
            hosts.later(("channel", more), alike)
        with pytest.raises(Mismatch, match="rows"):
            hosts.wait()
        return hosts.now(("next", me))

    for _ in range(20):
        assert two(rank) == [[("next", 0), ("next", 1)]] * 2


def test_a_disagreement_ends_an_exchange_that_is_waited_for() -> None:
    def rank(me: int, hosts: Exchanges) -> list[Any]:
        hosts.later(("rows", me), alike)
        with pytest.raises(Mismatch, match="rows"):
            hosts.now("of the same call")
        hosts.check()
        return hosts.now(me)

    assert two(rank) == [[0, 1], [0, 1]]


def test_what_else_goes_wrong_is_raised() -> None:
    def lost(obj: Any) -> list[Any]:
        raise Timeout("the connection to a rank is lost")

    hosts = Exchanges(lost)
    hosts.later("a", alike)
    with pytest.raises(Timeout):
        hosts.wait()
    with pytest.raises(Timeout):
        hosts.now("b")
    hosts.close()
