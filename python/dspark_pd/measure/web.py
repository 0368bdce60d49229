"""HTTP of one deployment: JSON answers and event streams; never through a proxy."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, Final

_NO_ANSWER: Final = (OSError, ValueError, http.client.HTTPException)
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_SHOWN: Final = 300
END: Final = "[DONE]"


class RequestFailed(Exception):
    """A request was refused, or its answer broke off; ``status`` is None without one."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


def _open(url: str, body: Any, timeout_s: float, key: str | None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        url, data=data, headers={"Content-Type": "application/json"}
    )
    if key:
        # Not to where a redirection may lead.
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    try:
        return _opener.open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        text = said(error.read().decode(errors="replace"))
        raise RequestFailed(f"HTTP {error.code}: {text}", error.code) from None
    except _NO_ANSWER as error:
        raise RequestFailed(f"{error}" or type(error).__name__) from None


def said(body: str) -> str:
    """The message in the body of an error, however it is wrapped."""
    try:
        found = json.loads(body)
    except ValueError:
        found = body
    while isinstance(found, dict):
        inner = found.get("error", found.get("message", found.get("detail")))
        if inner is None:
            break
        found = inner
    return " ".join(str(found).split())[:_SHOWN]


def get(url: str, timeout_s: float, key: str | None = None) -> Any:
    """Parsed JSON of a GET; raises RequestFailed."""
    with _open(url, None, timeout_s, key) as response:
        try:
            return json.loads(response.read())
        except _NO_ANSWER as error:
            raise RequestFailed(f"an answer that is no JSON ({error})", 200) from None


def post(url: str, body: Any, timeout_s: float, key: str | None = None) -> None:
    """POST and read the answer to its end; raises RequestFailed."""
    with _open(url, body, timeout_s, key) as response:
        try:
            response.read()
        except _NO_ANSWER as error:
            raise RequestFailed(f"{error}") from None


def events(
    url: str, body: Any, timeout_s: float, key: str | None = None
) -> Iterator[dict[str, Any]]:
    """Events of a stream; raises RequestFailed where it breaks off or tells an error.

    A stream that ends without ``[DONE]`` was cut, whatever it said before.
    """
    with _open(url, body, timeout_s, key) as response:
        lines = iter(response)
        while True:
            try:
                line = next(lines).decode().strip()
            except StopIteration:
                raise RequestFailed("the stream ended before its last event") from None
            except _NO_ANSWER as error:
                raise RequestFailed(f"the stream broke off: {error}") from None
            if not line.startswith("data:"):
                if line.startswith(("{", "<")):
                    raise RequestFailed(f"no event stream: {said(line)}", 200)
                continue
            data = line.removeprefix("data:").strip()
            if data == END:
                return
            yield _event(data)


def _event(data: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        raise RequestFailed(f"an event that is no JSON: {data[:80]}", 200) from None
    if not isinstance(found, dict):
        raise RequestFailed(f"an event that is no object: {data[:80]}", 200)
    if found.get("error"):
        raise RequestFailed(f"the stream told an error: {said(data)}", 200)
    return found
