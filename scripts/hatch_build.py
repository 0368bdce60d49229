"""Puts the overlay inside a wheel, and nothing inside a development install.

In a wheel the overlay is data of our own package, where it can never shadow SGLang. A
development install finds it in the repository; a copy in site-packages would make a
second, empty `dspark_pd` that hides the first.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class OverlayHook(BuildHookInterface):
    """Adds `python/sglang` as `dspark_pd/_overlay` to standard wheels."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            build_data["force_include"]["python/sglang"] = "dspark_pd/_overlay"
