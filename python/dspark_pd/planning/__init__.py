"""From a set and a target to the files as they shall be; nothing is written here."""

from __future__ import annotations
