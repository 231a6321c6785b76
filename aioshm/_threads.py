"""The one place that starts threads: blocking work runs in threads of our own, always to its end.

anyio's and asyncio's own thread helpers do not do: under `task.cancel()`, `asyncio.timeout()` or a failing TaskGroup
sibling their await returns at once and the thread runs on, here into memory that cleanup is unmapping;
and the default executor is joined at interpreter exit without a way to stop what runs in it (CPython #107505).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar

T = TypeVar("T")


class StopFlag:
    """Tells the work of one call to stop: set on cancellation, and when a sibling thread failed."""

    __slots__ = ("_event", "_shorten")

    def __init__(self) -> None:
        self._event = threading.Event()
        self._shorten: list[Callable[[], None]] = []

    def on_set(self, shorten: Callable[[], None]) -> None:
        """Have `shorten` called by `set`, where a call of the kernel can be cut short that looks at no flag.

        It is called in whatever thread sets the flag, more than once perhaps, and may wait for milliseconds.
        """
        self._shorten.append(shorten)

    def set(self) -> None:
        """Ask the work to stop at its next look, and cut short what it waits for."""
        self._event.set()
        for shorten in tuple(self._shorten):
            shorten()

    def set_aside(self) -> Callable[[], None]:
        """Do the same from the event loop, which waits for nothing; return what waits until all is cut short."""
        self._event.set()
        return run_aside(self.set, name="stop") if self._shorten else lambda: None

    def wait(self, seconds: float) -> None:
        """Rest for so long, or until it is set: at once where it is."""
        self._event.wait(seconds)

    def __bool__(self) -> bool:
        return self._event.is_set()


async def run_through(work: Callable[[StopFlag], T], *, name: str) -> T:
    """Run `work` in one thread and return its result; see `run_all_through`."""
    return (await run_all_through([work], name=name))[0]


async def run_all_through(works: list[Callable[[StopFlag], T]], *, name: str) -> list[T]:
    """Run each of `works` in a thread of its own, and return only when all of them are done.

    Args:
        works: What to run. Each gets the flag that asks it to stop and should look at it every few
            milliseconds; work that must be done whatever happens (munmap, close) never looks.
        name: What the threads are for; they are called `aioshm-{name}-{number}`.

    Returns:
        The results, in the order of `works`.

    Raises:
        BaseException: The first that one of the works raised; the others were asked to stop, and are done.
        RuntimeError: No thread could be started; nothing was run, or what was has stopped.

    Cancellation:
        Felt at once, by asyncio's own cancel and by anyio's scopes alike: the flag is set. It goes on
        only when the threads are done, and it is never lost: a result that came meanwhile is dropped.
    """
    handled = sys.exception()  # where this is part of giving back
    crew = _Crew(works, name)
    try:
        crew.start()
        # Unshielded: were it shielded from the start, an anyio scope could not be felt here at all.
        await crew.done.wait()
    except asyncio.CancelledError as cancelled:
        crew.stop_aside()
        await _outlast(crew.done, cancelled, handled)
    except BaseException:
        # Not all could be started; or GeneratorExit: the loop is gone, nobody can be awaited any more.
        crew.stop.set()
        raise
    finally:
        crew.join()
    return crew.results()


async def run_regardless(work: Callable[[], object], *, name: str) -> None:
    """Run `work`, which gives something back: in a thread where that can be, and on the spot where it cannot.

    That is where no thread can be started (a pids limit), and where nobody can be awaited any more, because the
    coroutine is being closed or its loop is gone. Better the loop stands still than the memory stays.

    Raises:
        BaseException: What `work` raised.

    Cancellation:
        Felt when it is done.
    """
    begun = False

    def once(_: StopFlag) -> None:
        nonlocal begun
        begun = True
        work()

    if not isinstance(sys.exception(), GeneratorExit):
        try:
            await run_through(once, name=name)
        except RuntimeError:
            if begun:
                raise
    if not begun:
        work()


def run_aside(work: Callable[[], object], *, name: str) -> Callable[[], None]:
    """Start `work`, which takes milliseconds, and return what waits for its end.

    On the spot where no thread can be started. The interpreter's end waits for it too: whoever waited for a daemon then
    would wait for ever.
    """
    thread = threading.Thread(target=work, name=f"aioshm-{name}", daemon=False)
    try:
        thread.start()
    except RuntimeError:
        work()
        return lambda: None
    return thread.join


async def wait_through(event: asyncio.Event) -> None:
    """Wait for an event that is sure to come, such as the end of what another task runs through.

    Cancellation:
        Felt when it has come.
    """
    handled = sys.exception()
    try:
        await event.wait()
    except asyncio.CancelledError as cancelled:
        await _outlast(event, cancelled, handled)


async def _outlast(done: asyncio.Event, cancelled: asyncio.CancelledError, handled: BaseException | None) -> NoReturn:
    """Wait until it is done, and raise the cancellation that should go on.

    The shield keeps anyio from delivering its cancellation again and again; it does not stop `task.cancel()`.
    Of several cancellations, the one being handled when the wait began among them, the task's own goes on:
    a scope says its own again for as long as it is cancelled, and swallows what it takes for its own.
    """
    seen = [cancelled]
    if isinstance(handled, asyncio.CancelledError):
        seen.insert(0, handled)
    with _shield():
        while not done.is_set():
            try:
                await done.wait()
            except asyncio.CancelledError as again:
                seen.append(again)
    cancelled = next((one for one in seen if not _is_of_a_scope(one)), seen[0])
    try:
        raise cancelled
    finally:
        # anyio before 4.16 takes for a scope's own what has a scope's cancellation in its context.
        if isinstance(cancelled.__context__, asyncio.CancelledError):
            cancelled.__context__ = None
        del cancelled, seen, handled  # or they keep this frame, and it keeps them


def _is_of_a_scope(cancelled: asyncio.CancelledError) -> bool:
    """Whether anyio raised it; its message is the only mark (anyio/_backends/_asyncio.py: is_anyio_cancellation)."""
    return bool(cancelled.args) and "cancel scope" in str(cancelled.args[0])


def _shield() -> contextlib.AbstractContextManager[object]:
    """Return anyio's shield where one of its scopes can be around us: they need its backend, loaded before we waited.

    Loading it only now would stop the loop for tens of milliseconds, at the moment somebody waits for us to be gone.
    """
    if "anyio._backends._asyncio" not in sys.modules:
        return contextlib.nullcontext()
    import anyio

    return anyio.CancelScope(shield=True)


class _Crew(Generic[T]):
    """The threads of one call, and the event that the last of them sets on the loop."""

    def __init__(self, works: list[Callable[[StopFlag], T]], name: str) -> None:
        self.stop = StopFlag()
        self.done = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._works = works
        self._results: list[T | None] = [None] * len(works)
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._running = len(works)
        self._join_stopping: Callable[[], None] = lambda: None
        self._threads = [
            threading.Thread(target=self._run, args=(index,), name=f"aioshm-{name}-{index}", daemon=True)
            for index in range(len(works))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop_aside(self) -> None:
        self._join_stopping = self.stop.set_aside()

    def join(self) -> None:
        """Wait for those threads that were started: after `done` a matter of microseconds, after a stop one chunk."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._join_stopping()

    def results(self) -> list[T]:
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # the frame in the error's traceback would keep the error, and itself, alive
        return self._results  # type: ignore[return-value]  # no error: every slot was filled

    def _run(self, index: int) -> None:
        try:
            self._results[index] = self._works[index](self.stop)
        except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
            self.stop.set()
            with self._lock:
                self._error = self._error or error
        with self._lock:
            self._running -= 1
            last = self._running == 0
        if last:
            with contextlib.suppress(RuntimeError):  # the loop was closed under us: nobody waits any more
                self._loop.call_soon_threadsafe(self.done.set)
