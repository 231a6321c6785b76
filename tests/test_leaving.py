"""Leaving: the last one out removes the name, once, however the steps of leavers and comers mix."""

from __future__ import annotations

import itertools
import os
import threading

import pytest

import aioshm
from aioshm import _rendezvous
from aioshm._locks import GATE, READY_BIT, WORLD, Description

MIB = 1 << 20


@pytest.fixture
def insider(path):
    """Return what stands inside a finished region: a description that shares its gate."""
    opened = []

    def make() -> Description:
        description = Description(str(path), os.O_CREAT)
        opened.append(description)
        os.ftruncate(description.fd, MIB)
        os.fchmod(description.fd, 0o600 | READY_BIT)
        assert description.try_shared(GATE)
        assert description.try_shared(WORLD.at(0))
        return description

    yield make
    for description in opened:
        description.close()
    path.unlink(missing_ok=True)


def test_leaving_twice_does_nothing_more(run, name, path):
    async def main():
        first = await aioshm.open_region(name, MIB).__aenter__()
        second = await aioshm.open_region(name, MIB).__aenter__()
        seat = first._tenancy.seat
        assert not seat.leave()
        assert not seat.leave()
        assert path.exists()
        async with aioshm.open_region(name, MIB) as third:
            assert not third.created
        assert second._tenancy.seat.leave()
        assert not path.exists()
        assert not second._tenancy.seat.leave()
        async with aioshm.open_region(name, MIB) as successor:
            assert successor.created
            assert not seat.leave()
            assert not second._tenancy.seat.leave()
            assert path.exists()
            await first.aclose()
            await second.aclose()
            assert path.exists()
        seat.description.close()
        assert not seat.leave()

    run(main())


class Turns:
    """Lets threads take turns at the lock table in a given order; whoever is not in it any more runs freely."""

    def __init__(self, order: tuple[int, ...]) -> None:
        self._order = list(order)
        self._changed = threading.Condition()
        self._who = threading.local()

    def run(self, works) -> list:
        results = [None] * len(works)

        def work(index: int) -> None:
            self._who.index = index
            try:
                results[index] = works[index]()
            finally:
                with self._changed:
                    self._order = [turn for turn in self._order if turn != index]
                    self._changed.notify_all()

        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(works))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return results

    def take(self, call):
        index = getattr(self._who, "index", None)
        with self._changed:
            assert self._changed.wait_for(lambda: index not in self._order or self._order[0] == index, 30)
            try:
                return call()
            finally:
                if index in self._order:
                    self._order.pop(0)
                self._changed.notify_all()


@pytest.fixture
def in_turns(monkeypatch):
    """Run works in threads so that their steps at locks and name come in a given order."""
    turns = Turns(())
    for method in ("try_exclusive", "try_shared", "unlock", "unlink"):
        real = getattr(Description, method)

        def stepping(self, *arguments, real=real):
            return turns.take(lambda: real(self, *arguments))

        monkeypatch.setattr(Description, method, stepping)

    def run(order: tuple[int, ...], *works) -> list:
        nonlocal turns
        turns = Turns(order)
        return turns.run(works)

    return run


def orders(steps: int):
    """Return every order in which two actors can take so many steps each."""
    for first in itertools.combinations(range(2 * steps), steps):
        yield tuple(0 if turn in first else 1 for turn in range(2 * steps))


def test_two_leavers_never_leave_the_name_however_their_steps_mix(in_turns, path, insider):
    for order in orders(4):
        seats = [_rendezvous.Seat(insider(), str(path), "joiner") for _ in range(2)]
        results = in_turns(order, seats[0].leave, seats[1].leave)
        assert sorted(results) == [False, True], order
        assert not path.exists(), order
        for seat in seats:
            seat.description.close()


def test_leaver_and_comer_agree_however_their_steps_mix(in_turns, name, path, insider):
    """Whoever comes is inside a region that has its name, or starts over; it is never inside one that is gone."""
    request = aioshm.open_region(name, MIB)._request
    found = set()
    for order in orders(5):
        leaver = insider()
        comer = Description(str(path), 0)

        def look(comer=comer):
            return _rendezvous._look(comer, request, MIB)

        removed, look_found = in_turns(order, _rendezvous.Seat(leaver, str(path), "creator").leave, look)
        leaver.close()
        while look_found is _rendezvous._Look.FORMING:
            look_found = _rendezvous._look(comer, request, MIB)
        found.add(look_found)
        if look_found is _rendezvous._Look.JOINER:
            assert not removed, order
            assert path.stat().st_ino == comer.status().st_ino, order
            assert _rendezvous.Seat(comer, str(path), "joiner").leave(), order
        else:
            assert look_found in (_rendezvous._Look.DELETED, _rendezvous._Look.LEFTOVER), order
        assert not path.exists(), order
        comer.close()
    assert _rendezvous._Look.JOINER in found
    assert _rendezvous._Look.DELETED in found
