"""The verbs of the command line, one module each.

A verb takes parsed options and returns a ``Result``; it prints nothing. ``output`` turns
results and refusals into text or JSON.
"""

from __future__ import annotations
