"""One engine as the doctor knows it: read from a file or from a running server.

What could not be read is remembered by name. A row that asks for it is not judged: what
is not known must not refuse a pair (`Unread`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from dspark_pd import doctor_files, doctor_servers
from dspark_pd.doctor_agreement import Finding, load
from dspark_pd.doctor_command import Command, NotArguments, unknown_names
from dspark_pd.doctor_fields import (
    CAPTURE,
    FIELDS,
    SOURCES,
    TAIL_TOKENS,
    VARIABLES,
    Kind,
    flag_of,
    misfit,
    value_of,
)
from dspark_pd.doctor_remarks import remark
from dspark_pd.messages.errors import refuse

_ADDRESS = re.compile(r"[\w.-]+:\d+(/.*)?$")


class Unread(Exception):
    """A row asked for something that could not be read."""


@dataclasses.dataclass
class Engine:
    """What is known of one engine.

    `environ` is None when it cannot be known (a running server does not tell).
    `description` is what the engine tells its peers, or a guess from its arguments;
    `unpatched` says that it tells them nothing. `unread` are the fields and variables,
    `unknown` the keys of the description that should be known and are not.
    `problems` are findings from reading it.
    """

    role: str
    source: str
    args: dict[str, Any] = dataclasses.field(default_factory=dict)
    environ: dict[str, str] | None = None
    release: str | None = None
    target_config: dict[str, Any] | None = None
    draft_config: dict[str, Any] | None = None
    description: dict[str, Any] = dataclasses.field(default_factory=dict)
    unpatched: bool = False
    unread: set[str] = dataclasses.field(default_factory=set)
    unknown: set[str] = dataclasses.field(default_factory=set)
    problems: list[Finding] = dataclasses.field(default_factory=list)

    @property
    def shown(self) -> str:
        """One line: where it came from and what it is."""
        if not self.args:
            return f"{self.source} (unknown)"
        algorithm = self._shown("speculative_algorithm", "no speculation")
        size = f"TP {self._shown('tp_size', 1)} PP {self._shown('pp_size', 1)}"
        release = f", SGLang {self.release}" if self.release else ""
        return f"{self.source} ({algorithm}, {size}{release})"

    def _shown(self, name: str, default: object) -> object:
        return "unknown" if name in self.unread else self.args.get(name) or default

    def arg(self, name: str) -> Any:
        """A server argument; None when not given. Raises Unread."""
        if name in self.unread:
            raise Unread(name)
        return self.args.get(name)

    def env(self, name: str) -> str:
        """A variable of its environment; empty when unset or unknown. Raises Unread."""
        if name in self.unread:
            raise Unread(name)
        return (self.environ or {}).get(name, "")

    def has(self, name: str) -> bool:
        """True when a flag is given and not off. Raises Unread."""
        return self.arg(name) not in (None, False, "", 0)

    @property
    def mode(self) -> str:
        """How draft context is handed over: native, tail or none. Raises Unread."""
        if "mode" in self.unknown:
            raise Unread("mode")
        return str(self.description.get("mode", "none"))

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "release": self.release,
            "description": self.description,
        }


def read_engine(
    role: str, source: str, timeout_s: float, api_key: str | None = None
) -> Engine:
    """An engine from a URL or a file; refuse with U004 what is neither."""
    engine = Engine(role, source)
    if source.startswith(("http://", "https://")):
        _check_address(engine)
        published = doctor_servers.read_server(engine, timeout_s, api_key)
        _settle(engine, "odd")
    else:
        published = None
        _read_file(engine)
        _settle(engine, "malformed")
    if engine.args:
        _describe(engine, published)
    return engine


def _settle(engine: Engine, row: str) -> None:
    """Turn numbers into numbers; name, and forget, what cannot be one."""
    both: tuple[tuple[dict[str, Any], Mapping[str, Kind]], ...]
    both = ((engine.args, FIELDS), (engine.environ or {}, VARIABLES))
    for values, kinds in both:
        for name in [name for name in kinds if name in values]:
            value, kind = values[name], kinds[name]
            wanted = None if name in engine.unread else misfit(name, value)
            if wanted:
                fields = {"name": flag_of(name), "shown": repr(value), "wanted": wanted}
                if value is True:
                    fields["shown"] = "given without a value"
                engine.problems.append(
                    remark(row, role=engine.role, source=engine.source, **fields)
                )
                engine.unread.add(name)
            elif kind == "int" and isinstance(value, str) and values is engine.args:
                text = value.strip()
                engine.args[name] = value_of(text) if text else None
    for values, _ in both:
        for name in engine.unread & values.keys():
            del values[name]


def _describe(engine: Engine, published: dict[str, Any] | None) -> None:
    """What the engine says of itself counts; without it, what its arguments say."""
    if published:
        engine.description = published
    try:
        described = _from_arguments(engine)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        detail = f"{type(error).__name__}: {error}"
        engine.problems.append(_config_remark(engine, "damaged", detail=detail))
        engine.target_config = engine.draft_config = None
        described = _from_arguments(engine, read_models=False)
    if published:
        return
    engine.description = described
    _forget_unread(engine)
    if engine.environ is None:
        _forget_switches(engine)
    known = not engine.unread & {"model_path"}
    if engine.target_config is None and known and not _has_remark(engine, "DOC-CONFIG"):
        row = "config" if engine.args.get("model_path") else "no model"
        engine.problems.append(_config_remark(engine, row))


def _from_arguments(engine: Engine, read_models: bool = True) -> dict[str, Any]:
    module = load("peer_description")
    args = engine.args
    if read_models:
        engine.target_config = module.read_config(
            args.get("model_path"), args.get("revision")
        )
        engine.draft_config = module.read_config(
            args.get("speculative_draft_model_path"),
            args.get("speculative_draft_model_revision"),
        )
    described: dict[str, Any] = module.describe(
        args,
        role=engine.role,
        target_config=engine.target_config,
        draft_config=engine.draft_config,
        environ=engine.environ,
    )
    return described


def _config_remark(engine: Engine, row: str, **fields: str) -> Finding:
    model = engine.args.get("model_path")
    source = engine.source
    return remark(row, role=engine.role, source=source, model=model, **fields)


def _has_remark(engine: Engine, code: str) -> bool:
    return any(finding.code == code for finding in engine.problems)


def _forget_unread(engine: Engine) -> None:
    """Drop what was made from something that could not be read."""
    idle = {"prefill": TAIL_TOKENS, "decode": CAPTURE}[engine.role]
    for key, sources in SOURCES.items():
        needed = set(sources) - ({idle} if key == "mode" else set())
        if needed & engine.unread:
            engine.unknown.add(key)
            engine.description.pop(key, None)


def _forget_switches(engine: Engine) -> None:
    """Drop what only the environment decides and nobody has told."""
    unknown = ["allow_cold_draft", "allow_partial_context"]
    if engine.role == "decode" and engine.description.get("mode") == "native":
        unknown.append("mode")  # or a tail
    for key in unknown:
        engine.description.pop(key, None)


# -- a file of arguments ----------------------------------------------------------------


def _check_address(engine: Engine) -> None:
    try:
        parts = urlsplit(engine.source)
        if parts.hostname and parts.port != 0:
            return
        detail = "no host in it" if not parts.hostname else "port 0"
    except ValueError as error:
        detail = str(error)
    _refuse(engine, f"not an address: {detail}", "http://host:port")


def _read_file(engine: Engine) -> None:
    """Arguments and environment from a file; a file publishes no description."""
    path = Path(engine.source)
    try:
        text = path.read_text(encoding="utf-8")
        command = doctor_files.parse(text, engine.role, path.parent)
        if not command.args:
            raise NotArguments("no flag of an engine")
    except NotArguments as error:
        _refuse(engine, str(error), f"{engine.source} with an engine's flags in it")
    except UnicodeDecodeError:
        _refuse(engine, "a binary file", "the file that starts the engine")
    except OSError as error:
        _refuse_file(engine, error)
    except ValueError as error:
        _refuse(engine, f"not readable: {error}", f"{engine.source}, corrected")
    engine.args, engine.environ = command.args, command.environ
    engine.release = command.release
    engine.unread |= set(unknown_names(command))
    engine.problems += _remarks(engine, command)


def _refuse_file(engine: Engine, error: OSError) -> NoReturn:
    source = engine.source
    if "://" in source:
        scheme = source.partition("://")[0]
        rest = source.partition("://")[2]
        _refuse(engine, f"an address with {scheme}://", f"http://{rest}")
    if _ADDRESS.match(source):
        _refuse(engine, "an address without http://", f"http://{source}")
    text = error.strerror or str(error)
    _refuse(engine, text[0].lower() + text[1:], "URL|FILE")


def _refuse(engine: Engine, found: str, give: str) -> NoReturn:
    fields = {"role": engine.role, "source": engine.source}
    refuse("U004", found=found, give=give, **fields)


def _remarks(engine: Engine, command: Command) -> list[Finding]:
    """Say what was not read, where the doctor would have needed it."""
    common = {"role": engine.role, "source": engine.source}
    found = [
        remark("value", name=flag_of(name), shown=shown, **common)
        for name, shown in command.unread.items()
        if name in {**FIELDS, **VARIABLES}
    ]
    places = dict.fromkeys(command.sources)
    found += [remark("source", shown=shown, **common) for shown in places]
    found += [
        remark("misspelt", shown=shown, meant=flag_of(meant), **common)
        for shown, meant in command.misspelt.items()
    ]
    if command.count > 1:
        mode = command.args.get("disaggregation_mode")
        taken = f"the one for {mode}" if mode else "the first"
        found.append(remark("several", count=command.count, taken=taken, **common))
    return found
