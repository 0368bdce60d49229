"""What the tool says: coded errors, exit codes, results, text and JSON."""

from __future__ import annotations
