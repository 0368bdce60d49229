"""How prefill's description reaches the decodes that ask.

Contract: the bootstrap server hands the description on in a header and leaves the body of
its answers as an older decode knows it; ranks that differ are named; each start of the
server has a name of its own.
"""

from __future__ import annotations

import dataclasses
import json
import unittest
from unittest import mock

import requests
from agreement_fixtures import NATIVE
from agreement_managers import WithServer, topology_of

from sglang.srt.disaggregation.agreement.description import (
    DESCRIPTION_KEY,
    HEADER,
    INSTANCE,
    INSTANCE_HEADER,
)
from sglang.srt.disaggregation.agreement.prefill_side import (
    ServedDescription,
    merge_ranks,
)
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.common.conn import PrefillServerInfo
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

OTHER_WEIGHTS = {**NATIVE, "draft_weights": "bbbb"}


class TestBootstrapServer(WithServer):
    def shown(self):
        """What the server says of its engine, and of itself."""
        shown = json.loads(topology_of(self.server).headers[HEADER])
        return shown, shown.pop(INSTANCE)

    def test_prefill_registers_with_its_description(self):
        with mock.patch.object(conn.requests, "put") as put:
            put.return_value.status_code = 200
            self.prefill()
        self.assertEqual(put.call_args.kwargs["json"][DESCRIPTION_KEY], NATIVE)

    def test_server_answers_with_the_description(self):
        self.prefill()
        self.assertEqual(self.shown()[0], NATIVE)

    def test_the_body_is_what_an_older_decode_understands(self):
        self.prefill()
        known = {field.name for field in dataclasses.fields(PrefillServerInfo)}
        body = topology_of(self.server).json()
        self.assertLessEqual(set(body), known)
        self.assertEqual(PrefillServerInfo(**body).page_size, 1)

    def test_a_prefill_without_description_gets_no_header(self):
        self.prefill(None)
        self.assertNotIn(HEADER, topology_of(self.server).headers)

    def test_health_and_description_name_one_instance_for_each_start(self):
        seen = []
        for _ in range(2):
            self.prefill()
            health = requests.get(f"http://{self.addr}/health", timeout=5)
            seen.append(health.headers[INSTANCE_HEADER])
            self.assertEqual(self.shown()[1], seen[-1])
            self.restart_server()
        self.assertNotEqual(*seen)

    def test_ranks_that_differ_are_named_until_one_starts_again(self):
        self.prefill(pp_rank=0, pp_size=2)
        self.prefill(OTHER_WEIGHTS, pp_rank=1, pp_size=2)
        self.assertEqual(self.shown()[0]["conflict"], "draft_weights: aaaa and bbbb")
        self.prefill(pp_rank=1, pp_size=2)
        self.assertEqual(self.shown()[0], NATIVE)


class TestMerge(CustomTestCase):
    def test_a_value_that_one_rank_lacks_is_unknown_and_not_a_conflict(self):
        unreadable = {k: v for k, v in NATIVE.items() if k != "draft_weights"}
        self.assertEqual(merge_ranks([NATIVE, unreadable]), unreadable)

    def test_a_permission_holds_if_every_rank_has_it(self):
        ranks = [{"allow_cold_draft": True}, {"allow_cold_draft": False}]
        self.assertEqual(merge_ranks(ranks), {"allow_cold_draft": False})

    def test_a_payload_without_a_description_is_ignored(self):
        served = ServedDescription()
        for payload in ([], None, {}, {DESCRIPTION_KEY: [1]}):
            served.keep(payload)
        self.assertIsNone(served.shown())


if __name__ == "__main__":
    unittest.main()
