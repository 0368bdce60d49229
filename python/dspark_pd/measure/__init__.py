"""Measures a live deployment over HTTP: tokens of each verify step, request by request.

Life cycle: ``client`` streams requests and keeps what each stream told; ``statistics``
sorts those into groups (step, prompt length, cache tier, prefill) beside a reference;
``diagnosis`` names the cause of a pattern; ``report`` and ``plot`` show it.
"""

from __future__ import annotations
