"""Writes a decode engine's draft KV to files, for tests that compare it.

Python imports a module of this name in every process whose PYTHONPATH holds this
folder. When SGLang's decode scheduler is imported, its prebuilt-batch step is wrapped:
after it, the draft K and V of the last positions of each request are saved to
``DRAFT_POOL_PROBE_DIR``, one file per request, named by a digest of its prompt.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import os
import sys

_MODULE = "sglang.srt.disaggregation.decode"
_POSITIONS = 64


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _wrap(module.SchedulerDisaggregationDecodeMixin)

        spec.loader.exec_module = exec_module
        return spec


def _wrap(mixin):
    build = mixin.get_new_prebuilt_batch

    def get_new_prebuilt_batch(self, running_batch):
        batch = build(self, running_batch)
        if batch is not None and self.draft_worker is not None:
            for req, end in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
                _save(self, req, end)
        return batch

    mixin.get_new_prebuilt_batch = get_new_prebuilt_batch


def _save(scheduler, req, end):
    import torch

    start = max(0, end - _POSITIONS)
    pool = scheduler.draft_worker.primary_draft_kv_pool
    slots = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, start:end]
    slots = slots.to(torch.int64)
    kv = torch.stack([buf[slots] for buf in [*pool.k_buffer, *pool.v_buffer]])
    digest = hashlib.sha256(repr(list(req.origin_input_ids)).encode()).hexdigest()
    path = os.path.join(os.environ["DRAFT_POOL_PROBE_DIR"], digest[:24] + ".pt")
    torch.save({"start": start, "end": end, "kv": kv.clone()}, path + ".part")
    os.replace(path + ".part", path)


if os.environ.get("DRAFT_POOL_PROBE_DIR"):
    sys.meta_path.insert(0, _Finder())
