"""Which of NIXL's builds this process has loaded.

The ``nixl`` package picks one at import time; its classes live in the build's own
modules, which are complete while ``nixl`` itself is still being imported.
"""

from __future__ import annotations

import sys
from types import ModuleType

# The package ``nixl`` re-exports whichever of these is installed.
NIXL_BUILDS = ("nixl_cu13", "nixl_cu12", "nixl_rocm")


def loaded_module(name: str) -> ModuleType:
    """The module ``name`` of the loaded build, for example ``_api``.

    Raises:
        ImportError: no build has loaded it.
    """
    for build in NIXL_BUILDS:
        module = sys.modules.get(f"{build}.{name}")
        if module is not None:
            return module
    raise ImportError(
        f"sglang-cpu-reference: no NIXL build has loaded {name}; looked for "
        f"{', '.join(NIXL_BUILDS)}. Next: pip show nixl"
    )
