"""Room for a region: a file that has its size, because it fits, and addresses to map it at."""

from __future__ import annotations

import errno
import os
import time

from . import _libc, _preflight
from ._errors import InsufficientMemoryError, InsufficientSpaceError
from ._host import read_file_system
from ._mapping import Mapping, round_up
from ._rendezvous import Seat
from ._request import Request
from ._threads import StopFlag

# For so long free memory may stand still before it is taken for all that there will be: who still has the old file open
# is woken when its name goes, or looks every 20 ms.
_FREEING_SECONDS = 0.25


def make_room(request: Request, seat: Seat, file_size: int, stop: StopFlag) -> None:
    """Look whether it fits, and size the file. Runs in a worker thread, under the exclusive gate.

    What stood there before is freed when the last of those who raced for it has looked and closed it: as long as that
    goes on, a no is not certain.
    """
    most, since = -1, time.monotonic()
    while True:
        file_system = read_file_system(request.directory)  # again: a leftover may have been removed since
        try:
            _preflight.check(request, round_up(request.size, file_system.page), file_system)
        except (InsufficientSpaceError, InsufficientMemoryError) as error:
            if error.available > most:
                most, since = error.available, time.monotonic()
            if stop or not seat.displaced or time.monotonic() - since > _FREEING_SECONDS:
                raise
            time.sleep(0.005)
        else:
            break
    os.ftruncate(seat.description.fd, file_size)


def map_region(request: Request, seat: Seat, page: int) -> Mapping:
    """Map the file. A hugetlbfs promises its pages then: ENOMEM where others took them since we looked."""
    try:
        return Mapping(seat.description.fd, size=request.size, page=page)
    except OSError as error:
        if error.errno == errno.ENOMEM and page > _libc.PAGE:
            short = _preflight.find_shortage(request, round_up(request.size, page), reserves=True)
            if short is not None:
                raise short from error
        raise
