"""What is known of two engines, and whether they would work together.

``sources`` reads an engine, ``tables`` asks the overlay's own tables, ``checks`` has the
doctor's. Nothing here imports SGLang.
"""

from __future__ import annotations
