"""Arguments of an engine from a file: a script, a unit, a manifest, flags or JSON.

JSON is server arguments by field name, as ``/server_info`` gives them, alone or under
``server_args`` beside ``environ`` and ``version``. What a manifest's containers run are
scripts, too (`doctor_containers`); all other text is one (`doctor_scripts`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dspark_pd import doctor_yaml
from dspark_pd.doctor_command import Command, NotArguments, chosen, note_spelling
from dspark_pd.doctor_containers import Script, read_manifest
from dspark_pd.doctor_expressions import shell_of
from dspark_pd.doctor_fields import FIELDS, field_of
from dspark_pd.doctor_scripts import parse_command


def parse(text: str, role: str, folder: Path | None = None) -> Command:
    """Return what ``text``, of a file in ``folder``, says.

    Raises NotArguments, and ValueError for bad syntax.
    """
    try:
        documents = doctor_yaml.documents(text)
        command = _parse_yaml(documents, role, folder) if documents else None
        if command is not None:
            return command
        return parse_json(text) if _is_json(text) else parse_command(text, role)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _parse_yaml(documents: list[Any], role: str, folder: Path | None) -> Command | None:
    """None for what is YAML by chance."""
    manifest = read_manifest(documents, shell_of(folder))
    read = _engines_of(manifest.containers, role)
    meant = any(doctor_yaml.is_manifest(document) for document in documents)
    if not read and meant:
        read = _engines_of(manifest.texts, role)
    if read:
        return chosen(read, role)
    if meant:
        raise NotArguments("a manifest without an engine in it")
    flags = doctor_yaml.flags_of(documents[0]) if len(documents) == 1 else None
    if not flags or not FIELDS.keys() & flags:
        return None
    others = [k for k, v in documents[0].items() if isinstance(v, dict)]
    if {field_of(str(key)) for key in others} - FIELDS.keys():
        raise NotArguments("values of a chart; render it first")
    command = Command(flags)
    note_spelling(command, {})
    return command


def _engines_of(scripts: list[Script], role: str) -> list[Command]:
    """What can be read; raises ValueError where nothing can be and something should."""
    read, broken = [], []
    for script in scripts:
        try:
            command = parse_command(script.text, role, script.outside)
        except NotArguments:
            continue
        except ValueError as error:
            broken.append(error)
            continue
        command.release = script.release
        # Other programs have a --config, too.
        if command.certain or "model_path" in {*command.args, *command.unread}:
            read.append(command)
    if broken and not read:
        raise broken[0]
    return read


def _is_json(text: str) -> bool:
    """A list is JSON only where it can be read: ``[Unit]`` opens a systemd unit."""
    if text.lstrip().startswith("["):
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return False
        return True
    return text.lstrip().startswith("{")


# -- JSON -------------------------------------------------------------------------------


def parse_json(text: str) -> Command:
    document = json.loads(text)
    if not isinstance(document, dict):
        raise NotArguments(f"JSON of a {type(document).__name__}, not an object")
    args = document.get("server_args", document)
    environ = document.get("environ")
    for name, value in (("server_args", args), ("environ", environ)):
        optional = name == "environ" and value is None
        if not isinstance(value, dict) and not optional:
            raise NotArguments(f"{name} is {json.dumps(value)[:40]}, not an object")
    release = document.get("version")
    if environ is not None:
        environ = {key: str(value) for key, value in environ.items()}
    command = Command(dict(args), environ, str(release) if release else None)
    note_spelling(command, {})
    return command
