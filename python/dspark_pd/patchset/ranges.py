"""Ranges of releases, printed in the one form in which the set writes them."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet


class ReleaseRange(SpecifierSet):
    """A PEP 440 range that prints its lower bound first: `>=0.5.16,<0.5.24`."""

    def __str__(self) -> str:
        bounds = sorted((not spec.operator.startswith(">"), str(spec)) for spec in self)
        return ",".join(text for _, text in bounds)
