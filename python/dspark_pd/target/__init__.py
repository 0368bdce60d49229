"""The SGLang that is worked on: where it is, what was done to it, how it is changed."""

from __future__ import annotations
