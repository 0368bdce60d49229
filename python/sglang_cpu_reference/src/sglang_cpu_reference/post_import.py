"""Run a callback right after a named module has been imported.

Life cycle: :func:`watch` is called at activation for each module of interest.
A module already imported is served at once; one that is being imported right
now is served at the next import of anything; any other is served inside its own
import, before a single line of its importer runs, so that nobody can have taken
a reference to what the callback replaces. Exceptions of a callback propagate to
whoever imports the module: an adaptation that cannot be installed stops the
process instead of leaving it half adapted.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Callback = Callable[[], None]


class _NotifyingLoader(Loader):
    """The module's own loader, followed by a notification."""

    def __init__(self, loader: Loader, notify: Callback) -> None:
        self._loader = loader
        self._notify = notify

    def __getattr__(self, name: str):
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._notify()


class _PostImportFinder(MetaPathFinder):
    """Finds nothing itself; wraps the loader of the modules it watches."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callback]] = {}
        self._resolving: set[str] = set()

    def watch(self, module_name: str, callback: Callback) -> None:
        self.waiting.setdefault(module_name, []).append(callback)
        self.serve_imported()

    def serve_imported(self) -> None:
        """Serve watched modules that finished importing without our loader."""
        for name in list(self.waiting):
            module = sys.modules.get(name)
            if module is not None and not _is_initializing(module):
                self._serve(name)

    def _serve(self, name: str) -> None:
        for callback in self.waiting.pop(name, ()):
            callback()

    def find_spec(self, fullname, path=None, target=None) -> ModuleSpec | None:
        self.serve_imported()
        if fullname not in self.waiting or fullname in self._resolving:
            return None
        self._resolving.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._resolving.discard(fullname)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _NotifyingLoader(spec.loader, lambda: self._serve(fullname))
        return spec


def _is_initializing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


_finder = _PostImportFinder()


def watch(module_name: str, callback: Callback) -> None:
    """Call ``callback`` once, as soon as ``module_name`` has been imported."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.watch(module_name, callback)
