"""Small HTTP client: JSON in, JSON out, server-sent events; never through a proxy."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from dspark_pd.bed.errors import BedError

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_BODY_SHOWN = 400


def _request(url: str, body: Any) -> urllib.request.Request:
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.Request(
        url, data=data, headers={"Content-Type": "application/json"}
    )


def open_url(url: str, body: Any = None, timeout_s: float = 120.0) -> Any:
    """Response object of a GET (no body) or a POST; BedError on anything but 2xx."""
    try:
        return _opener.open(_request(url, body), timeout=timeout_s)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")[:_BODY_SHOWN]
        raise HttpError(url, f"HTTP {error.code}: {text}", error.code) from error
    except (OSError, http.client.HTTPException) as error:
        raise HttpError(url, f"{type(error).__name__}: {error}", None) from error


class HttpError(BedError):
    """A request was not answered with 2xx; `status` is None without any answer."""

    def __init__(self, url: str, found: str, status: int | None) -> None:
        super().__init__(
            f"request to {url} failed",
            expected="HTTP 200 before the timeout",
            found=found,
            next_step="read the log of the server behind that address",
        )
        self.status = status


def call(url: str, body: Any = None, timeout_s: float = 120.0) -> Any:
    """Parsed JSON of the answer; its text when it is not JSON."""
    with open_url(url, body, timeout_s) as response:
        try:
            text = response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise HttpError(url, f"{type(error).__name__}: {error}", None) from error
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def is_healthy(url: str, timeout_s: float = 5.0) -> bool:
    """True when `url`/health answers 200 in time."""
    try:
        open_url(f"{url}/health", timeout_s=timeout_s).close()
    except BedError:
        return False
    return True


def events(url: str, body: Any, timeout_s: float = 120.0) -> Iterator[Any]:
    """Parsed `data:` lines of a server-sent event stream, up to `[DONE]`."""
    with open_url(url, body, timeout_s) as response:
        for raw in response:
            line = raw.decode().strip()
            if not line.startswith("data:"):
                continue
            data = line[len("data:") :].strip()
            if data == "[DONE]":
                return
            yield json.loads(data)
