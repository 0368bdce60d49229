"""From the address of an engine, or from a file, to what is known of the engine.

Four things are read: a running engine; the JSON of ``dspark-pd describe``; a saved
``/server_info``; a file with one flat command line. ``-`` is the last three on stdin.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from packaging.version import Version

from dspark_pd.doctor import arguments, servers
from dspark_pd.doctor.engine import Engine
from dspark_pd.doctor.fields import (
    FIELDS,
    VARIABLES,
    flag_of,
    meant_by,
    relevant,
    settled,
    wanted,
)
from dspark_pd.doctor.releases import released, served_by, serves
from dspark_pd.doctor.remarks import remark
from dspark_pd.doctor.tables import load, why_no_tail
from dspark_pd.messages.errors import refuse

_ADDRESS = re.compile(r"[\w.-]+:\d+(/.*)?$")
# From this release on a patched engine shows its description in /server_info.
_SHOWN_SINCE = Version("0.5.22")


def read_engine(
    role: str, source: str, timeout_s: float, api_key: str | None = None
) -> Engine:
    """Return an engine; refuse with U004 or T106 what cannot be read."""
    engine = Engine(role, source)
    if source.startswith(("http://", "https://")):
        _check_address(engine)
        info = servers.server_info(role, source, timeout_s, api_key)
        if not _has_arguments(info):
            found = f"a JSON object without a server argument{_keys(info)}"
            servers.not_an_engine(role, source, found)
        _take_server_info(engine, info)
        _settle(engine)
        if not engine.description:
            _ask_what_it_tells(engine, timeout_s)
    else:
        _take_text(engine, _text_of(engine))
        _settle(engine)
    if not engine.broken:
        resolve(engine)
        _describe(engine)
    return engine


# -- a running engine, or what one said ---------------------------------------------------


def _check_address(engine: Engine) -> None:
    try:
        parts = urlsplit(engine.source)
        if parts.hostname and parts.port != 0:
            return
        detail = "no host in it" if not parts.hostname else "port 0"
    except ValueError as error:
        detail = str(error)
    _refuse(engine, f"not an address: {detail}", "http://host:port")


def _has_arguments(values: dict[str, Any]) -> bool:
    """Whether any server argument is in it: without one it is something else's JSON."""
    return any(name in FIELDS for name in values)


def _keys(values: dict[str, Any]) -> str:
    return f" ({', '.join(list(values)[:3])})" if values else ""


def _take_server_info(engine: Engine, info: dict[str, Any]) -> None:
    """Arguments, and the description that a patched engine shows."""
    engine.running = True
    found = info.get("internal_states")
    states = (
        [s for s in found if isinstance(s, dict)] if isinstance(found, list) else []
    )
    engine.args = {k: v for k, v in info.items() if k != "internal_states"}
    engine.release = _text(info.get("version"))
    shown = next((s["peer_description"] for s in states if _shows(s)), None)
    engine.description = shown or {}
    release = released(engine.release)
    # Prefill is asked at its bootstrap server.
    if shown is None and states and engine.role == "decode":
        engine.unpatched = release is not None and release >= _SHOWN_SINCE


def _shows(state: dict[str, Any]) -> bool:
    shown = state.get("peer_description")
    return isinstance(shown, dict) and bool(shown)


def _ask_what_it_tells(engine: Engine, timeout_s: float) -> None:
    """Ask a prefill's bootstrap server for what it tells its decodes."""
    if engine.role == "prefill":
        port = engine.args.get("disaggregation_bootstrap_port")
        if not isinstance(port, int):
            engine.problems.append(remark("no bootstrap", source=engine.source))
            return
        try:
            told = servers.bootstrap_description(engine.source, port, timeout_s)
        except servers.NoBootstrapServer as error:
            row = remark("bootstrap", place=error.place, detail=error)
            engine.problems.append(row)
            return
        engine.description = told or {}
        engine.unpatched = not told
    if engine.unpatched:
        _note_unpatched(engine)


def _note_unpatched(engine: Engine) -> None:
    release = released(engine.release)
    if release is None or serves("agreement", release):
        row = remark("unpatched", role=engine.role)
    else:
        served = served_by("agreement")
        row = remark("no agreement", role=engine.role, release=release, served=served)
    engine.problems.append(row)


# -- a file -------------------------------------------------------------------------------


def _text_of(engine: Engine) -> str:
    try:
        if engine.source == "-":
            return sys.stdin.read()
        return Path(engine.source).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        _refuse(engine, "a binary file", "FILE")
    except OSError as error:
        _refuse_file(engine, error)


def _refuse_file(engine: Engine, error: OSError) -> NoReturn:
    source = engine.source
    if "://" in source:
        scheme, _, rest = source.partition("://")
        _refuse(engine, f"an address with {scheme}://", f"http://{rest}")
    if _ADDRESS.match(source):
        _refuse(engine, "an address without http://", f"http://{source}")
    text = error.strerror or str(error)
    _refuse(engine, text[0].lower() + text[1:], "FILE")


def _refuse(engine: Engine, found: str, give: str) -> NoReturn:
    refuse("U004", role=engine.role, source=engine.source, found=found, give=give)


def _take_text(engine: Engine, text: str) -> None:
    if text.lstrip().startswith(("{", "[")):
        _take_json(engine, text)
        return
    folder = Path() if engine.source == "-" else Path(engine.source).parent
    try:
        words = arguments.read_line(text)
        engine.args, unknown = arguments.parse(words.argv, folder)
        if not engine.args:
            raise arguments.NotArguments("no flag that dspark-pd knows")
    except arguments.NotArguments as error:
        _refuse(engine, str(error), "FILE")
    engine.environ = words.environ
    _note_spelling(engine, unknown)


def _take_json(engine: Engine, text: str) -> None:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        _refuse(engine, f"JSON that cannot be read: {error}", "FILE")
    if isinstance(document, dict) and isinstance(document.get("data"), dict):
        document = document["data"]  # of describe --json
    if not isinstance(document, dict):
        _refuse(engine, "JSON that is no object of server arguments", "FILE")
    args, environ = document.get("server_args", document), document.get("environ")
    if not isinstance(args, dict) or not isinstance(environ, (dict, type(None))):
        _refuse(engine, "server_args or environ that is no object", "FILE")
    if not _has_arguments(args):
        _refuse(engine, f"JSON without a server argument{_keys(args)}", "FILE")
    if args is document:
        _take_server_info(engine, document)
        return
    engine.args = args
    engine.release = _text(document.get("version"))
    if environ is not None:
        engine.environ = {str(name): str(value) for name, value in environ.items()}
    unknown = document.get("unknown")
    _note_spelling(engine, unknown if isinstance(unknown, list) else [])


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _note_spelling(engine: Engine, unknown: list[Any]) -> None:
    for shown in [*map(str, unknown), *relevant(engine.environ or {})]:
        meant = meant_by(shown)
        if meant:
            row = remark("misspelt", role=engine.role, shown=shown, meant=meant)
            engine.problems.append(row)


# -- from arguments to a description ------------------------------------------------------


def _settle(engine: Engine) -> None:
    """Read values as SGLang does; name what SGLang could not start with."""
    for values, kinds in ((engine.args, FIELDS), (engine.environ or {}, VARIABLES)):
        for name in [name for name in kinds if name in values]:
            missing = wanted(name, values[name])
            if missing and engine.source.startswith(("http://", "https://")):
                found = f"{name} {values[name]!r}, not {missing}"
                servers.not_an_engine(engine.role, engine.source, found)
            if missing:
                fields = {"name": flag_of(name), "shown": repr(values[name])}
                engine.problems.append(
                    remark("malformed", role=engine.role, wanted=missing, **fields)
                )
            else:
                values[name] = settled(name, values[name])


def resolve(engine: Engine) -> None:
    """Give arguments the values that SGLang's start gives them."""
    args = engine.args
    block = args.get("speculative_dspark_block_size")
    if not engine.drafts or block is None:
        return
    tokens = args.get("speculative_num_draft_tokens")
    if tokens is None:
        args["speculative_num_draft_tokens"] = int(block) + 1
    elif int(tokens) != int(block) + 1:
        fields = {"role": engine.role, "tokens": tokens, "block": block}
        engine.problems.append(remark("block size", **fields))


def _describe(engine: Engine) -> None:
    """What the engine says of itself counts; without it, what its arguments say."""
    try:
        described = _from_arguments(engine)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        detail = f"{type(error).__name__}: {error}"
        engine.problems.append(remark("damaged", role=engine.role, detail=detail))
        engine.target_config = engine.draft_config = None
        described = _from_arguments(engine, read_models=False)
    if engine.description:
        return
    engine.description = described
    if engine.environ is None:
        _forget_switches(engine)
    damaged = any(finding.code == "DOC-CONFIG" for finding in engine.problems)
    if engine.target_config is None and not damaged:
        model = engine.args.get("model_path")
        fields = {"role": engine.role, "source": engine.source, "model": model}
        engine.problems.append(remark("config" if model else "no model", **fields))


def _from_arguments(engine: Engine, read_models: bool = True) -> dict[str, Any]:
    module = load("description")
    args = engine.args
    if read_models:
        engine.target_config = module.read_config(
            args.get("model_path"), args.get("revision")
        )
        draft = module.draft_source(args, engine.target_config)
        engine.draft_config = module.read_config(draft.path, draft.revision)
    described: dict[str, Any] = module.describe(
        args,
        role=engine.role,
        target_config=engine.target_config,
        draft_config=engine.draft_config,
        environ=engine.environ,
    )
    if reason := why_no_tail(engine):
        described |= {"mode": "native", "dspark": {"no_tail": reason}}
    return described


def _forget_switches(engine: Engine) -> None:
    """Drop what only the environment decides and nobody has told."""
    for key in ("allow_cold_draft", "allow_partial_context"):
        engine.description.pop(key, None)
