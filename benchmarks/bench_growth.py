"""How the time of an open grows with the size: per GiB it should stay what it is, from 64 MiB on."""

from __future__ import annotations

import asyncio
import functools
import math
import time

from harness import GIB, MIB, Column, Figures, Outcome, fitting, parse_arguments, publish, region_name, take_turns

import aioshm


def opened(size: int, directory: str) -> Figures:
    async def main() -> Figures:
        started = time.perf_counter()
        async with aioshm.open_region(region_name("growth"), size, directory=directory):
            ready = time.perf_counter()
        closed = time.perf_counter()
        return {"open": ready - started, "per GiB": (ready - started) * GIB / size, "close": closed - ready}

    return asyncio.run(main())


def main() -> None:
    arguments = parse_arguments(__doc__, mib=8192, rounds=5, smaller=[64, 128, 256, 512, 1024, 2048, 4096])
    wanted = sorted({*(size for size in arguments.smaller if size < arguments.mib), arguments.mib})
    sizes = fitting(wanted, arguments.directory)
    outcome = Outcome(
        "Growth",
        {"rounds": arguments.rounds},
        [Column("open", "open, ms", 1e3), Column("per GiB", "per GiB, ms", 1e3), Column("close", "close, ms", 1e3)],
        take_turns(
            {f"{size} MiB": functools.partial(opened, size * MIB, arguments.directory) for size in sizes},
            arguments.rounds,
            prime={f"{size} MiB": size * MIB for size in sizes},
        ),
    )
    first, last = sizes[0], sizes[-1]
    outcome.compare(f"per GiB, {last} over {first} MiB", f"{last} MiB", f"{first} MiB", "per GiB")
    grown = outcome.compare(f"open, {last} over {first} MiB", f"{last} MiB", f"{first} MiB", "open")
    outcome.figures["time grows with the size to the power of"] = math.log(grown) / math.log(last / first)
    publish(outcome, arguments.json)


if __name__ == "__main__":
    main()
