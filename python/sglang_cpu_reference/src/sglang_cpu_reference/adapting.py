"""How one adaptation is verified and installed.

A target that is missing, has other parameters, or does not take the hook raises
:class:`AdaptationError` inside the import that triggered it: the process stops
with a message, it never runs half adapted. The hook itself is applied by SGLang's
own ``HookRegistry``, which also corrects references other modules already hold.
"""

from __future__ import annotations

import inspect
import logging
import pkgutil
import sys
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adaptation:
    """One adapted target.

    Attributes:
        module: module that defines the target.
        name: dotted name of the target inside the module.
        kind: ``replace``, ``around``, ``before`` or ``after`` (HookRegistry), or
            ``constant``: a constant of a module or class takes the hook's value.
        hook: ``package.module:name`` of this package.
        params: the target's parameter names; None for a class or a builtin.
        optional: those of them that some releases lack.
        why: what goes wrong on a CPU without it.
        seam: the upstream extension point that would make it unnecessary.
        unless: ``module:name`` of that extension point; where it exists, the
            adaptation is not installed.
        since: ``module:name`` that came with the need; where it is missing, the
            adaptation is not installed.
    """

    module: str
    name: str
    kind: str
    hook: str
    params: tuple[str, ...] | None
    why: str
    seam: str
    optional: tuple[str, ...] = ()
    unless: str = ""
    since: str = ""

    @property
    def target(self) -> str:
        return f"{self.module}.{self.name}"


class AdaptationError(RuntimeError):
    """An adaptation does not fit the installed release."""


def install(adaptation: Adaptation) -> None:
    """Verify and install one adaptation.

    Raises:
        AdaptationError: the target is missing, has other parameters, or the
            hook registry did not take the hook.
    """
    if is_needless(adaptation):
        return
    original = resolve_target(adaptation)
    verify_parameters(adaptation, original)
    hook = pkgutil.resolve_name(adaptation.hook)
    if adaptation.kind == "constant":
        _set_constant(adaptation, original, hook)
    else:
        _apply_hook(adaptation, hook)
    if resolve_target(adaptation) is original:
        raise AdaptationError(_message(adaptation, "the hook to be applied", "it not"))
    logger.debug("Adapted %s: %s", adaptation.target, adaptation.why)


def _apply_hook(adaptation: Adaptation, hook: Any) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    # The source is what SGLang's own log line names.
    HookRegistry.register(
        adaptation.target,
        hook,
        HookType(adaptation.kind),
        source=HookSource("cpu_reference", "sglang-cpu-reference"),
    )
    HookRegistry.apply_hooks()


def _set_constant(adaptation: Adaptation, original: Any, value: Any) -> None:
    if type(original) is not type(value):
        expected = f"a constant of type {type(value).__name__}"
        raise AdaptationError(_message(adaptation, expected, repr(original)))
    owner: Any = sys.modules[adaptation.module]
    *path, name = adaptation.name.split(".")
    for part in path:
        owner = getattr(owner, part)
    setattr(owner, name, value)


def is_needless(adaptation: Adaptation) -> bool:
    """Whether this release has the extension point, or not yet the need."""
    if adaptation.since and not _exists(adaptation.since):
        return True
    return bool(adaptation.unless) and _exists(adaptation.unless)


def _exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return False
    return True


def resolve_target(adaptation: Adaptation) -> Any:
    """The object an adaptation names.

    Raises:
        AdaptationError: the module has no such name.
    """
    try:
        return pkgutil.resolve_name(f"{adaptation.module}:{adaptation.name}")
    except (AttributeError, ImportError) as error:
        raise AdaptationError(
            _message(adaptation, "the target to exist", repr(error))
        ) from error


def verify_parameters(adaptation: Adaptation, target: Any) -> None:
    """Compare a target's parameter names with those the hook was written for.

    Raises:
        AdaptationError: they differ.
    """
    if adaptation.params is None:
        return
    found = tuple(inspect.signature(target).parameters)
    expected = tuple(
        p for p in adaptation.params if p in found or p not in adaptation.optional
    )
    if found != expected:
        raise AdaptationError(
            _message(adaptation, f"parameters {adaptation.params}", str(found))
        )


def _message(adaptation: Adaptation, expected: str, found: str) -> str:
    return (
        f"sglang-cpu-reference cannot adapt {adaptation.target}: expected "
        f"{expected}, found {found}. Likely cause: this SGLang or NIXL release is "
        f"newer or older than the plugin. Next: pip show sglang sglang-cpu-reference"
    )
