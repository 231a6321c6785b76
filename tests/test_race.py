"""Many open one name at the same instant, round after round: one creator, one inode, one content, no file left."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import pytest
from conftest import loop_factory
from rank_hooks import Crowd
from ranks import Rank

SIZE = (1 << 20) + 13
MEMBERS = 8
ROUNDS = 300
FEW_ROUNDS = 40


@pytest.fixture(scope="module", autouse=True)
def _pipe_of_libuv() -> None:
    """Have libuv make the pipe that it keeps for as long as the process runs: it is no leak of the first test."""
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.new_event_loop().close()


class Party(Protocol):
    """Members that open from one place. `go` starts a step and returns at once; `done` returns what came of it."""

    members: int

    def go(self, step: str, **arguments: Any) -> None: ...
    def done(self) -> Any: ...


class ProcessParty:
    """Tasks of a rank process."""

    def __init__(self, rank: Rank, members: int) -> None:
        self.rank = rank
        self.members = members

    def go(self, step: str, **arguments: Any) -> None:
        self.rank.send("hook", call="crowd", step=step, **arguments)

    def done(self) -> Any:
        answer = self.rank.answer()
        assert "error" not in answer, json.dumps(answer)
        return answer["result"]


class ThreadParty:
    """Tasks of a loop that a thread of this process runs."""

    def __init__(self, runner: asyncio.Runner, thread: ThreadPoolExecutor, members: int) -> None:
        self.members = members
        self._runner = runner
        self._thread = thread
        self._crowd = Crowd()
        self._future: Future[Any] | None = None

    def go(self, step: str, **arguments: Any) -> None:
        self._future = self._thread.submit(self._take, functools.partial(getattr(self._crowd, step), **arguments))

    def _take(self, step) -> Any:
        return self._runner.run(step())

    def done(self) -> Any:
        assert self._future is not None
        return self._future.result(30)


@pytest.fixture
def make_parties(ranks, request):
    """Make parties of processes and of threads, given the number of members of each."""
    with contextlib.ExitStack() as stack:

        def make(*, processes: tuple[int, ...] = (), threads: tuple[int, ...] = ()) -> list[Party]:
            parties: list[Party] = [
                ProcessParty(rank, count)
                for rank, count in zip(ranks.start_many(len(processes)), processes, strict=True)
            ]
            for count in threads:
                thread = stack.enter_context(ThreadPoolExecutor(1))
                runner = asyncio.Runner(loop_factory=loop_factory())
                stack.callback(lambda thread=thread, runner=runner: thread.submit(runner.close).result())
                parties.append(ThreadParty(runner, thread, count))
            return parties

        yield make


def race(parties: list[Party], name, path, rounds: int) -> None:
    members = sum(party.members for party in parties)
    creators = set()
    for number in range(rounds):
        first = 0
        for party in parties[number % len(parties) :] + parties[: number % len(parties)]:
            party.go("open", name=name, size=SIZE, first=first, count=party.members, options={"threads": 1})
            first += party.members
        opened = [(party, result) for party in parties for result in party.done()]
        made = [party for party, result in opened if result["created"]]
        assert len(made) == 1, f"round {number}: {len(made)} creators"
        creators.update(map(id, made))
        inode = path.stat().st_ino
        assert [result["inode"] for _, result in opened] == [inode] * members
        assert all(result["clean"] for _, result in opened), f"round {number}: bytes of the round before"
        for party in parties:
            party.go("look", length=members)
        for party in parties:
            assert party.done() == [list(range(1, members + 1))] * party.members
        for party in parties:
            party.go("close")
        for party in parties:
            party.done()
        assert not path.exists(), f"round {number}: a name was left"
    if len(parties) > 1:
        assert len(creators) > 1, "no race: the same one was always first"


KINDS = {
    "processes": {"processes": (1,) * MEMBERS},
    "tasks in one loop": {"threads": (MEMBERS,)},
    "threads with a loop each": {"threads": (1,) * MEMBERS},
    "processes, threads and tasks": {"processes": (1, 1, 2), "threads": (1, 1, 2)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_creator_on_one_inode(make_parties, name, path, kind):
    race(make_parties(**KINDS[kind]), name, path, FEW_ROUNDS)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_creator_on_one_inode_for_many_rounds(monkeypatch, make_parties, name, path, kind, loop):
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    monkeypatch.setenv("AIOSHM_TEST_LOOP", loop)
    race(make_parties(**KINDS[kind]), name, path, ROUNDS)


@pytest.mark.parametrize("count", [2, 5])
def test_opening_and_leaving_out_of_step(ranks, name, path, count):
    """Nobody waits for anybody: makers, joiners and leavers meet in every state, and the last one leaves nothing."""
    rounds = 60
    crew = ranks.start_many(count)
    for index, rank in enumerate(crew):
        rank.send("rounds", name=name, size=SIZE, count=rounds, index=index, options={"threads": 1})
    answers = [rank.answer(60) for rank in crew]
    assert all("error" not in answer for answer in answers), answers
    assert 1 <= sum(answer["created"] for answer in answers) <= rounds * count
    assert not path.exists()
