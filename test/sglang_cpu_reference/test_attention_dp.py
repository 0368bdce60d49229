from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from sglang_cpu_reference.attention_dp import copy_rows


@pytest.mark.parametrize("offset_src", [True, False])
@pytest.mark.parametrize("offset, size", [(0, 4), (2, 3), (3, 9), (6, 1), (0, 0)])
def test_rows_are_those_that_both_tensors_have(offset, size, offset_src):
    long, short = torch.arange(12.0).view(6, 2), torch.full((4, 2), -1.0)
    dst, src = (short, long) if offset_src else (long.clone(), short)
    before = dst.clone()
    copy_rows(dst, src, 0, offset, torch.tensor(size), offset_src)
    for row in range(len(dst)):
        at = row if offset_src else row - offset
        other = row + offset if offset_src else at
        copied = 0 <= at < size and other < len(src)
        expected = src[other] if copied else before[row]
        torch.testing.assert_close(dst[row], expected)
