"""What a prefill and a decode engine must agree on before they exchange KV.

Life cycle of a pair:
1. Each engine describes itself when it builds its KV manager (``engine_facts``, from the
   arguments by ``description``).
2. Prefill publishes its description at its bootstrap server, which hands it on in a
   response header (``prefill_side``).
3. Decode compares it with its own by the rules (``rules``) on first contact, refuses the
   requests of a prefill that does not fit and tells it why (``decode_side``).

``rules`` and ``description`` are pure standard library, so that a tool can compare two
engines on a machine that has neither torch nor SGLang.
"""
