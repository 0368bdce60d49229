"""Free TCP ports on the loopback interface.

Ports come from below the ephemeral range, so that an outgoing connection of a process
that starts in between cannot take one, and from below 22000, from where SGLang takes
ports by itself; a port is handed out once per process.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable
from typing import NamedTuple

from dspark_pd.bed.errors import BedError

LOOPBACK = "127.0.0.1"
_LOWEST, _HIGHEST = 10_000, 22_000
_TRIES = 500
_handed_out: set[int] = set()


class Endpoint(NamedTuple):
    """Where an engine is reached; only a prefill has a bootstrap port."""

    url: str
    bootstrap_port: int | None = None


def is_free(port: int) -> bool:
    """True when nothing is bound to `port` on the loopback interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def free_port(offsets: Iterable[int] = ()) -> int:
    """A port that was free a moment ago and that this process has not handed out.

    So are the ports at `offsets` from it, for a server that takes them without asking.
    """
    for _ in range(_TRIES):
        port = random.randrange(_LOWEST, _HIGHEST)
        block = {port, *(port + offset for offset in offsets)}
        if not block & _handed_out and all(map(is_free, block)):
            _handed_out.update(block)
            return port
    raise BedError(
        "no free TCP port",
        expected=f"a free port between {_LOWEST} and {_HIGHEST} on {LOOPBACK}",
        found=f"none in {_TRIES} tries",
        next_step="stop what listens there (ss -ltnp) and run again",
    )


def claim_port(port: int, owner: str) -> int:
    """Check the port a user asked for, and keep `free_port` from handing it out.

    `owner` names what would listen on it.
    """
    if not 0 < port < 65_536:
        raise BedError(
            f"{owner}: port {port} is not a TCP port",
            "1 to 65535",
            str(port),
            next_step="pass another port",
            usage=True,
        )
    if not is_free(port):
        raise BedError(
            f"{owner}: port {port} is in use",
            expected=f"a port of {LOOPBACK} that nothing listens on",
            found=f"{LOOPBACK}:{port} is taken",
            cause="another server, or an earlier run that still runs",
            next_step=f"`ss -ltnp 'sport = :{port}'` shows who; stop it or pass another port",
            usage=True,
        )
    _handed_out.add(port)
    return port


def release_port(port: int) -> None:
    """Let a port be claimed again, once the server that had it was stopped."""
    _handed_out.discard(port)
