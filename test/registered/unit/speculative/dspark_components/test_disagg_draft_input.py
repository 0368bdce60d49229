"""DSPARK's draft input after a handoff: what is rebuilt, relayed and prepared.

Holds for each release; the one without a DSPARK branch has ``disagg_draft_input``, which
is compared here with the branch of the others.
"""

from __future__ import annotations

import importlib.util
import pathlib
import unittest
from types import SimpleNamespace
from unittest import mock

import torch
from test_disagg_first_decode import (
    DSPARK,
    HandoffTestCase,
    PrebuiltBatch,
    hand_off,
    make_future_map,
)

from sglang.srt.speculative import spec_utils
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

ROOT = pathlib.Path(__file__).resolve().parents[5]
BUILDER = "python/sglang/srt/speculative/dspark_components/disagg_draft_input.py"


def load_builder():
    """The module from its source; only one release has it in its package."""
    spec = importlib.util.spec_from_file_location("disagg_draft_input", ROOT / BUILDER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestDSparkHandoffInput(HandoffTestCase):
    def test_input_is_complete(self):
        """Without it the first decode step finds None and the scheduler dies."""
        for overlap in (True, False):
            with self.subTest(overlap=overlap):
                batch, _ = hand_off(overlap=overlap)
                self.assertIsNotNone(batch.spec_info)
                self.assertEqual(batch.spec_info.bonus_tokens.tolist(), [41, 42])
                self.assertEqual(batch.spec_info.new_seq_lens.tolist(), [30, 7])

    def test_overlap_input_is_relayed(self):
        """The next step reads the request's relay entry and must find these tokens."""
        batch, future_map = hand_off(overlap=True)
        self.assertEqual(batch.spec_info.future_indices.tolist(), [5, 2])
        self.assertEqual(future_map.new_seq_lens_buf[[5, 2]].tolist(), [30, 7])
        batch.spec_info.bonus_tokens = torch.zeros(2, dtype=torch.int64)
        future_map._resolve_spec_extras(batch)
        self.assertEqual(batch.spec_info.bonus_tokens.tolist(), [41, 42])

    def test_nothing_is_relayed_without_overlap(self):
        batch, _ = hand_off(overlap=False)
        self.assertIsNone(batch.spec_info.future_indices)


class TestFirstDecodeStep(HandoffTestCase):
    """The step after the handoff, where stock 0.5.16 takes the scheduler down."""

    def test_first_step_is_prepared(self):
        for overlap in (True, False):
            with self.subTest(overlap=overlap):
                batch, _ = hand_off(overlap=overlap)
                self.assertIs(self.prepared_by(batch), batch.spec_info)

    def prepared_by(self, batch):
        """Run the release's own dispatch and return the input that was prepared."""
        prepared = []
        no_mamba = mock.MagicMock()
        no_mamba.return_value.mamba.enable_mamba_extra_buffer_lazy = False
        asked = {
            "get_exec": no_mamba,
            "mamba_extra_buffer_lazy_enabled": bool,
            "get_server_args": lambda: SimpleNamespace(
                enable_mamba_extra_buffer_lazy=bool
            ),
        }
        prepare = mock.patch.object(
            DFlashDraftInputV2,
            "prepare_for_decode",
            lambda draft_input, batch: prepared.append(draft_input),
        )
        with prepare, mock.patch.multiple(spec_utils, create=True, **asked):
            spec_utils.spec_prepare_for_decode(batch)
        return prepared[0]


class TestOwnBuilder(HandoffTestCase):
    """The builder for releases without a DSPARK branch, whatever the release."""

    def build(self, overlap):
        future_map = make_future_map()
        batch = PrebuiltBatch(
            DSPARK, (41, 42), rows=[5, 2], seq_lens=[30, 7], overlap=overlap
        )
        built = load_builder().build_first_decode_input(
            batch, torch.tensor([41, 42]), future_map
        )
        return batch, built, future_map

    def test_matches_what_the_release_builds(self):
        for overlap in (True, False):
            with self.subTest(overlap=overlap):
                _, built, future_map = self.build(overlap)
                reference, reference_map = hand_off(overlap=overlap)
                reference = reference.spec_info
                self.assertEqual(type(built), type(reference))
                self.assertTrue(torch.equal(built.bonus_tokens, reference.bonus_tokens))
                self.assertTrue(torch.equal(built.new_seq_lens, reference.new_seq_lens))
                self.assertEqual(
                    built.future_indices is None, reference.future_indices is None
                )
                if overlap:
                    rows = [5, 2]
                    self.assertEqual(
                        future_map.output_tokens_buf[rows].tolist(),
                        reference_map.output_tokens_buf[rows].tolist(),
                    )


if __name__ == "__main__":
    unittest.main()
