"""dspark-pd: put a patch set on a released SGLang, explain it, take it off again.

The package imports neither torch nor sglang: it reads and writes SGLang's files and
never runs them, so it works on a machine that cannot start an engine.
"""

from __future__ import annotations

__version__ = "0.1.0"
