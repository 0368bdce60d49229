"""Starts engines and routers side by side and stops them whatever happens.

Life cycle of a bed: `with Bed("name") as bed` makes a folder for logs; `bed.start`
launches engines together and returns once each answers `/health`; `bed.start_router`
puts a router before some of them; leaving the block stops everything. The logs stay
when something failed and are removed otherwise, unless `keep_logs` asks for them.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dspark_pd.bed import diagnosis, web
from dspark_pd.bed.counters import bytes_posted
from dspark_pd.bed.errors import BedError
from dspark_pd.bed.ports import LOOPBACK, Endpoint, claim_port, free_port
from dspark_pd.bed.process import Process, stop_all
from dspark_pd.bed.specs import EngineSpec, RouterSpec, base_environment

if TYPE_CHECKING:
    from typing_extensions import Self

Spec = TypeVar("Spec", EngineSpec, RouterSpec)

START_TIMEOUT_S = 300.0
_POLL_S = 0.1
_PROGRESS_EVERY_S = 15.0
_HEALTH_TRIES = 3

Say = Callable[[str], None]


class Server(Process):
    """A child that serves HTTP on the loopback interface."""

    host = LOOPBACK
    port: int

    @property
    def url(self) -> str:
        """Base address, without a slash at the end."""
        return f"http://{self.host}:{self.port}"

    def healthy(self) -> bool:
        """The child runs and answers `/health`."""
        return self.alive() and web.is_healthy(self.url)


class Engine(Server):
    """A started engine; `spec` is what it was asked to be."""

    def __init__(self, spec: EngineSpec, folder: Path) -> None:
        self.spec = spec
        self.port = _port(spec.port, spec.name, spec.port_offsets)
        self.bootstrap_port = None
        if spec.role == "prefill":
            self.bootstrap_port = _port(spec.bootstrap_port, f"{spec.name} bootstrap")
        self.stats_dir = folder / f"{spec.name}.stats"
        self.stats_dir.mkdir(parents=True, exist_ok=True)
        super().__init__(
            spec.name,
            spec.command(self.port, self.bootstrap_port),
            spec.environment(self.stats_dir),
            folder / f"{spec.name}.log",
        )

    @property
    def endpoint(self) -> Endpoint:
        """What a router has to know of it."""
        return Endpoint(self.url, self.bootstrap_port)

    def bytes_posted(self) -> int:
        """Bytes its ranks have moved to other engines since it started."""
        return bytes_posted(self.stats_dir)

    def info(self) -> dict[str, Any]:
        """`/server_info`: the resolved arguments and the state of the engine."""
        found: dict[str, Any] = web.call(f"{self.url}/server_info", timeout_s=30.0)
        return found

    def flush_cache(self, timeout_s: float = 30.0) -> None:
        """Empty the radix cache (and host pools) of an idle engine."""
        web.call(f"{self.url}/flush_cache?timeout={timeout_s:.0f}", {}, timeout_s + 10)


class Router(Server):
    """A started router."""

    def __init__(self, spec: RouterSpec, folder: Path) -> None:
        self.spec = spec
        self.port = _port(spec.port, spec.name)
        super().__init__(
            spec.name,
            spec.command(self.port, free_port()),
            base_environment(),
            folder / f"{spec.name}.log",
        )

    def healthy(self) -> bool:
        """The router runs and has a usable engine of each role."""
        return super().healthy() and _is_ready(self.url)


class Bed:
    """Owner of a set of servers and of their log folder."""

    def __init__(
        self,
        name: str,
        *,
        folder: Path | None = None,
        say: Say | None = None,
        keep_logs: bool = False,
        start_timeout_s: float | None = None,
    ) -> None:
        root = Path(os.environ.get("DSPARK_PD_LOG_DIR") or ".demo")
        self.folder = (folder or root / f"{name}-{os.getpid()}").resolve()
        self.keep_logs = keep_logs
        self.servers: list[Server] = []
        self._say = say or say_to_stderr
        self._limit_s = start_timeout_s or _start_timeout_s()
        self._names: dict[str, int] = {}

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, exc_type: object, *_: object) -> None:
        self.stop()
        if exc_type is None and not self.keep_logs:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            self._say(f"logs: {self.folder}")

    def start(self, specs: Sequence[EngineSpec]) -> list[Engine]:
        """Start engines side by side; returns them, ready, in the order of `specs`.

        When one fails, all of this call are stopped and BedError tells which, the
        likely cause and the end of its log.
        """
        engines = [Engine(self._unique(spec), self.folder) for spec in specs]
        self._bring_up(engines)
        return engines

    def start_router(self, spec: RouterSpec) -> Router:
        """Start a router and wait until it can serve requests."""
        return self.start_routers([spec])[0]

    def start_routers(self, specs: Sequence[RouterSpec]) -> list[Router]:
        """Start routers side by side."""
        routers = [Router(self._unique(spec), self.folder) for spec in specs]
        self._bring_up(routers)
        return routers

    def stop(self, *servers: Server) -> None:
        """Stop the given servers, or all of them."""
        chosen = list(servers) or list(self.servers)
        stop_all(chosen)
        self.servers = [s for s in self.servers if s not in chosen]

    def assert_healthy(self) -> None:
        """Every server runs and answers; BedError names the first that does not.

        ``/health`` makes a token, which takes seconds on a busy machine, so one miss
        does not count.
        """
        sick = list(self.servers)
        for _ in range(_HEALTH_TRIES):
            sick = unhealthy(sick)
        for server in sick:
            raise diagnosis.failure(server, "is not healthy")

    def _unique(self, spec: Spec) -> Spec:
        # A restarted engine gets a log of its own.
        count = self._names[spec.name] = self._names.get(spec.name, 0) + 1
        if count == 1:
            return spec
        return replace(spec, name=f"{spec.name}.{count}")

    def _bring_up(self, servers: Sequence[Server]) -> None:
        self.servers += servers
        try:
            for server in servers:
                server.start()
            self._wait_ready(list(servers))
        except BaseException:
            self.stop(*servers)
            raise

    def _wait_ready(self, waiting: list[Server]) -> None:
        began = said = time.monotonic()
        while waiting:
            for server in list(waiting):
                if server.poll() is not None:
                    raise diagnosis.failure(server, "ended while it started")
            not_yet = unhealthy(waiting)
            for server in [s for s in waiting if s not in not_yet]:
                self._say(f"{server.name}: ready after {_since(began)}")
            waiting = not_yet
            if not waiting:
                return
            now = time.monotonic()
            if now - began > self._limit_s:
                raise diagnosis.failure(
                    waiting[0], f"was not ready after {self._limit_s:.0f} s"
                )
            if now - said > _PROGRESS_EVERY_S:
                said = now
                names = ", ".join(server.name for server in waiting)
                self._say(f"waiting for {names} ({_since(began)})")
            time.sleep(_POLL_S)


def unhealthy(servers: Sequence[Server]) -> list[Server]:
    """Those that do not answer `/health`.

    All are asked at once: an engine makes a token first, and looks for it once a second.
    """
    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        answers = list(pool.map(lambda server: server.healthy(), servers))
    return [server for server, ok in zip(servers, answers, strict=True) if not ok]


def _port(asked: int | None, owner: str, offsets: Sequence[int] = ()) -> int:
    return free_port(offsets) if asked is None else claim_port(asked, owner)


def _start_timeout_s() -> float:
    """`DSPARK_PD_START_TIMEOUT` in seconds, for machines slower or busier than two
    cores of their own."""
    return float(os.environ.get("DSPARK_PD_START_TIMEOUT") or START_TIMEOUT_S)


def _since(began: float) -> str:
    return f"{time.monotonic() - began:.0f} s"


def _is_ready(url: str) -> bool:
    try:
        web.open_url(f"{url}/readiness", timeout_s=5.0).close()
    except BedError:
        return False
    return True


def say_to_stderr(text: str) -> None:
    """One progress line."""
    print(f"[bed] {text}", file=sys.stderr, flush=True)
