"""A decode engine starts only with an algorithm that can continue handed-over requests."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import unittest
from types import SimpleNamespace
from unittest import mock

from sglang.srt.arg_groups import speculative_hook
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.dspark_components import disagg_start_up
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

DSPARK = SpeculativeAlgorithm.DSPARK


class TestStartUpRefusal(CustomTestCase):
    def test_who_takes_a_handoff(self):
        takes = disagg_start_up.takes_handoff
        for name in ("DSPARK", "EAGLE", "EAGLE3"):
            self.assertTrue(takes(SpeculativeAlgorithm.from_string(name)), name)
        for name in ("NGRAM", "STANDALONE"):
            self.assertFalse(takes(SpeculativeAlgorithm.from_string(name)), name)

    def test_the_answer_is_that_of_the_releases_builder(self):
        """Without a branch for an algorithm the builder returns None at once."""
        for algorithm in SpeculativeAlgorithm:
            if algorithm.is_none():
                continue
            build = algorithm.build_disagg_draft_input
            nothing = [None] * len(inspect.signature(build).parameters)
            try:
                branch = build(*nothing) is not None
            except Exception:
                branch = True  # It has one, which wants a real batch.
            with self.subTest(algorithm.name):
                self.assertEqual(disagg_start_up.takes_handoff(algorithm), branch)

    def test_registered_algorithms_take_one_with_a_builder_of_their_own(self):
        class Builder(CustomSpecAlgo):
            def build_disagg_draft_input(self, *_):
                return "input"

        takes = disagg_start_up.takes_handoff
        self.assertFalse(takes(CustomSpecAlgo("PLAIN", lambda _: None)))
        self.assertTrue(takes(Builder("OWN", lambda _: None)))

    def test_only_the_decode_engine_is_refused(self):
        ngram = SpeculativeAlgorithm.NGRAM
        for mode in ("null", "prefill"):
            args = SimpleNamespace(disaggregation_mode=mode)
            disagg_start_up.refuse_without_handoff(ngram, args)
        args = SimpleNamespace(disaggregation_mode="decode")
        disagg_start_up.refuse_without_handoff(DSPARK, args)
        disagg_start_up.refuse_without_handoff(None, args)
        with self.assertRaisesRegex(ValueError, "NGRAM.*--disaggregation-mode decode"):
            disagg_start_up.refuse_without_handoff(ngram, args)

    def test_argument_resolution_refuses(self):
        """The refusal happens while arguments are resolved, before any weight."""
        # Older releases resolve everything in the constructor, models included.
        unresolved = (
            mock.patch.object(ServerArgs, "__post_init__", lambda _: None)
            if dataclasses.is_dataclass(ServerArgs)
            else contextlib.nullcontext()
        )
        with unresolved:
            server_args = ServerArgs(
                model_path="unused",
                device="cpu",
                speculative_algorithm="NGRAM",
                disaggregation_mode="decode",
            )
        with self.assertRaisesRegex(ValueError, "NGRAM cannot run with"):
            speculative_hook.handle_speculative_decoding(server_args)


if __name__ == "__main__":
    unittest.main()
