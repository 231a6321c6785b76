"""Ranks arrive, populate, die, are cancelled, leave and come again in any order: what must hold all the while."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import os
from collections import defaultdict
from pathlib import Path

import pytest
from conftest import loop_factory
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import aioshm
from aioshm import _locks, _mapping, _roster

WORLD = 3
SIZE = 6 << 20
RANKS = st.integers(0, WORLD - 1)
_serial = itertools.count()
_member = contextvars.ContextVar["Member | None"]("member", default=None)


class Member:
    """One task that is a rank: it opens the region, writes its token, and stays until told to leave."""

    def __init__(self, name: str, rank: int, token: int) -> None:
        self.rank = rank
        self.token = token
        self.region: aioshm.Region | None = None
        self.inode = 0
        self.descriptions: list[_locks.Description] = []
        self.mappings: list[_mapping.Mapping] = []
        self.dead = False
        self.leaving = asyncio.Event()
        self.error: BaseException | None = None
        self.task = asyncio.ensure_future(self._live(name))

    async def _live(self, name: str) -> None:
        _member.set(self)
        try:
            async with aioshm.open_region(
                name, SIZE, local_rank=self.rank, local_world_size=WORLD, timeout=None, threads=1
            ) as region:
                self.inode = os.fstat(region._tenancy.seat.description.fd).st_ino
                region.buffer[self.rank * 8 : self.rank * 8 + 8] = self.token.to_bytes(8, "little")
                self.region = region
                await self.leaving.wait()
                self.region = None
        except (aioshm.AioshmError, asyncio.CancelledError) as error:
            self.error = error
        except (OSError, ValueError) as error:  # what a dead rank's own code does next is no matter
            if not self.dead:
                raise AssertionError from error
        finally:
            self.region = None

    def unmap(self) -> None:
        """Do what the kernel does when a process is gone."""
        for mapping in self.mappings:
            _mapping.unmap(mapping.release())

    def die(self) -> None:
        """Lose all descriptions at once, as by SIGKILL: with them the locks go, and nobody cleans up but the kernel."""
        self.dead = True
        self.region = None
        for description in self.descriptions:
            description.close()
        self.task.cancel()


class Cohorts(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.name = f"test-{os.getpid()}-state-{next(_serial)}"
        self.path = Path(f"/dev/shm/aioshm-{os.geteuid()}-{self.name}")
        self.runner = asyncio.Runner(loop_factory=loop_factory())
        self.members: dict[int, Member] = {}
        self.claimed: dict[int, set[int]] = defaultdict(set)
        self.tokens = itertools.count(1)
        self.patch = pytest.MonkeyPatch()
        for kind, kept in ((_locks.Description, "descriptions"), (_mapping.Mapping, "mappings")):
            self.patch.setattr(kind, "__init__", self._recording(kind.__init__, kept))

        claim = _roster.Roster.claim

        def claiming(roster):
            claim(roster)
            self.claimed[roster._description.status().st_ino].add(roster._request.local_rank)

        self.patch.setattr(_roster.Roster, "claim", claiming)

    @staticmethod
    def _recording(real, kept):
        def made(thing, *arguments, **options):
            real(thing, *arguments, **options)
            member = _member.get()
            if member is not None:
                getattr(member, kept).append(thing)

        return made

    @rule(rank=RANKS)
    def arrive(self, rank: int) -> None:
        if rank not in self.members:
            self.runner.run(self._arrive(rank))

    @rule(rank=RANKS)
    def cancel(self, rank: int) -> None:
        if rank in self.members:
            self.members[rank].task.cancel()
            self.runner.run(self._settle())

    @rule(rank=RANKS)
    def die(self, rank: int) -> None:
        if rank in self.members:
            self.members[rank].die()
            self.runner.run(self._settle())

    @rule(rank=RANKS)
    def leave(self, rank: int) -> None:
        if rank in self.members:
            self.members[rank].leaving.set()
            self.runner.run(self._settle())

    @rule(looks=st.integers(1, 40))
    def go_on(self, looks: int) -> None:
        self.runner.run(self._settle(looks))

    @invariant()
    def living_regions_are_whole_and_separate(self) -> None:
        inside = [
            member
            for member in getattr(self, "members", {}).values()
            if member.region is not None and not member.region.closed
        ]
        for member in inside:
            assert len(self.claimed[member.inode]) == WORLD, "released before all ranks had come"
            for peer in inside:
                token = bytes(member.region.buffer[peer.rank * 8 : peer.rank * 8 + 8])
                if member.inode == peer.inode:
                    assert token == peer.token.to_bytes(8, "little"), "a living region's data was changed"
        created = [member.inode for member in inside if member.region.created]
        assert len(created) == len(set(created)), "a region has two creators"

    def teardown(self) -> None:
        if not hasattr(self, "runner"):
            return
        self.runner.run(self._end())
        self.patch.undo()
        if self.path.exists():  # only the dead may leave it, and then nobody may be inside
            assert any(self.died), "left behind by the living"
            self.runner.run(self._recycle())
        self.runner.close()
        assert not self.path.exists()

    async def _arrive(self, rank: int) -> None:
        self.members[rank] = Member(self.name, rank, next(self.tokens))
        await self._settle()

    async def _settle(self, looks: int = 1) -> None:
        """Let everybody look a few times, and drop those who are done."""
        for _ in range(looks):
            await asyncio.sleep(0.001)
        for rank, member in list(self.members.items()):
            if member.task.done():
                member.task.result()
                if member.dead:
                    member.unmap()
                del self.members[rank]
                self.died.append(member.dead)

    async def _end(self) -> None:
        tasks = [member.task for member in self.members.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)
        await self._settle()

    async def _recycle(self) -> None:
        async with aioshm.open_region(self.name, SIZE) as region:
            assert region.created
            assert not any(region.buffer[: 8 * WORLD])

    def __init__(self) -> None:
        super().__init__()
        self.died: list[bool] = []


Cohorts.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestCohorts = pytest.mark.slow(Cohorts.TestCase)
