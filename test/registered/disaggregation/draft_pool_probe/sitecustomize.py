"""Writes an engine's draft KV to files, for tests that compare it.

Python imports a module of this name in every process whose PYTHONPATH holds this
folder. When SGLang's decode scheduler is imported, its prebuilt-batch step is wrapped:
after it, the draft K and V of each request's prompt are saved to
``DRAFT_POOL_PROBE_DIR``, one file per request, named by a digest of its prompt. The
stage of a prefill that has the draft does the same when it has sent all of a prompt.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import os
import sys

_MODULES = ("sglang.srt.disaggregation.decode", "sglang.srt.disaggregation.prefill")


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in _MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            if name == _MODULES[0]:
                _wrap_decode(module.SchedulerDisaggregationDecodeMixin)
            else:
                _wrap_prefill(module.SchedulerDisaggregationPrefillMixin)

        spec.loader.exec_module = exec_module
        return spec


def _wrap_prefill(mixin):
    send = mixin.send_kv_chunk

    def send_kv_chunk(self, req, last_chunk=False, end_idx=None):
        if last_chunk and self.draft_worker.primary_draft_kv_pool is not None:
            _save(self, req, len(req.origin_input_ids))
        send(self, req, last_chunk=last_chunk, end_idx=end_idx)

    mixin.send_kv_chunk = send_kv_chunk


def _wrap_decode(mixin):
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

    pool = scheduler.draft_worker.primary_draft_kv_pool
    slots = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :end]
    slots = slots.to(torch.int64)
    kv = torch.stack([buf[slots] for buf in [*pool.k_buffer, *pool.v_buffer]])
    digest = hashlib.sha256(repr(list(req.origin_input_ids)).encode()).hexdigest()
    path = os.path.join(os.environ["DRAFT_POOL_PROBE_DIR"], digest[:24] + ".pt")
    torch.save({"end": end, "kv": kv.clone()}, path + ".part")
    os.replace(path + ".part", path)


if os.environ.get("DRAFT_POOL_PROBE_DIR"):
    sys.meta_path.insert(0, _Finder())
