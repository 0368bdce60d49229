"""The patch set as it is written: hunks, modules, components, releases."""

from __future__ import annotations
