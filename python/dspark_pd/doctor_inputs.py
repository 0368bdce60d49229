"""One engine as the doctor knows it, and reading it from a file of arguments.

A file is either JSON (server arguments by field name, as ``/server_info`` gives them)
or text as a person would type it: environment assignments, ``export`` lines, and one
command line, with or without backslashes.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_pd.doctor_agreement import WARN, Finding, load
from dspark_pd.doctor_servers import read_server
from dspark_pd.errors import refuse

_ALIASES = {
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "pp": "pp_size",
    "pipeline_parallel_size": "pp_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "model": "model_path",
    "attention_context_parallel_size": "attn_cp_size",
    "decode_context_parallel_size": "dcp_size",
    "speculative_draft_model": "speculative_draft_model_path",
}
_ASSIGNMENT = re.compile(r"^[A-Z_][A-Z0-9_]*=", re.ASCII)


@dataclasses.dataclass
class Engine:
    """What is known of one engine.

    `environ` is None when it cannot be known (a running server does not tell).
    `description` is what the engine tells its peers, or a guess from its arguments;
    `unpatched` says that it tells them nothing. `problems` are findings from reading it.
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
    problems: list[Finding] = dataclasses.field(default_factory=list)

    @property
    def shown(self) -> str:
        """One line: where it came from and what it is."""
        algorithm = self.args.get("speculative_algorithm") or "no speculation"
        size = f"TP {self.args.get('tp_size') or 1} PP {self.args.get('pp_size') or 1}"
        release = f", SGLang {self.release}" if self.release else ""
        return f"{self.source} ({algorithm}, {size}{release})"

    def env(self, name: str) -> str:
        """A variable of its environment; empty when unset or unknown."""
        return (self.environ or {}).get(name, "")

    def has(self, name: str) -> bool:
        """True when a flag is given and not off."""
        return self.args.get(name) not in (None, False, "", 0)

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "release": self.release,
            "description": self.description,
        }


def read_engine(role: str, source: str, timeout_s: float) -> Engine:
    """An engine from a URL or a file; an unreadable file is a usage error."""
    engine = Engine(role, source)
    if source.startswith(("http://", "https://")):
        published = read_server(engine, timeout_s)
    else:
        published = None
        _read_file(engine, Path(source))
    if engine.args:
        _describe(engine, published)
    return engine


def _describe(engine: Engine, published: dict[str, Any] | None) -> None:
    """What the engine says of itself counts; without it, what its arguments say."""
    module = load("peer_description")
    args = engine.args
    engine.target_config = module.read_config(args.get("model_path"))
    engine.draft_config = module.read_config(args.get("speculative_draft_model_path"))
    engine.description = published or module.describe(
        args,
        role=engine.role,
        target_config=engine.target_config,
        draft_config=engine.draft_config,
        environ=engine.environ,
    )
    if published:
        return
    if engine.environ is None:
        _forget_switches(engine)
    if engine.target_config is None:
        engine.problems.append(
            Finding(
                "DOC-CONFIG",
                WARN,
                f"the config of {engine.role}'s model {args.get('model_path')} cannot be "
                "read on this machine",
                "models, drafts and DeepSeek-V4 rings are not compared",
                "run the doctor where the model lies",
            )
        )


def _forget_switches(engine: Engine) -> None:
    """Drop what only the environment decides and nobody has told."""
    unknown = ["allow_cold_draft", "allow_partial_context"]
    if engine.role == "decode" and engine.description.get("mode") == "native":
        unknown.append("mode")  # or a tail
    for key in unknown:
        engine.description.pop(key, None)


# -- a file of arguments ----------------------------------------------------------------


def _read_file(engine: Engine, path: Path) -> None:
    """Arguments and environment from a file; a file publishes no description."""
    try:
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("{"):
            document = json.loads(text)
            engine.args = dict(document.get("server_args", document))
            engine.release = document.get("version")
            environ = document.get("environ")
            engine.environ = dict(environ) if environ is not None else None
        else:
            engine.args, engine.environ = parse_command(text)
    except (OSError, ValueError) as error:
        refuse("U001", message=f"{path} cannot be read: {error}", verb="doctor")
    if not engine.args:
        refuse("U001", message=f"{path} holds no server arguments", verb="doctor")


def parse_command(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """(arguments by field name, environment) of a command line as typed.

    Raises ValueError for text with unbalanced quotes.
    """
    tokens = shlex.split(text.replace("\\\n", " "), comments=True)
    environ: dict[str, str] = {}
    args: dict[str, Any] = {}
    flag: str | None = None
    for token in tokens:
        if token.startswith("--"):
            name, equals, value = token[2:].partition("=")
            flag = _field(name)
            args[flag] = _value(value) if equals else True
            flag = None if equals else flag
        elif flag is not None:
            known = args[flag]
            # A second value after a flag makes it a list, as argparse's nargs does.
            args[flag] = _value(token) if known is True else _extended(known, token)
        elif _ASSIGNMENT.match(token):
            name, _, value = token.partition("=")
            environ[name] = value
    return args, environ


def _extended(known: Any, token: str) -> list[Any]:
    return [*(known if isinstance(known, list) else [known]), _value(token)]


def _field(name: str) -> str:
    field = name.replace("-", "_")
    return _ALIASES.get(field, field)


def _value(text: str) -> Any:
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def flags_of(args: Mapping[str, Any]) -> list[str]:
    """The arguments as flags, for messages."""
    return [f"--{name.replace('_', '-')}" for name in args]
