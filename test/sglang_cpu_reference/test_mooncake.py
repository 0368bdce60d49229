from __future__ import annotations

import json

import pytest

pytest.importorskip("sglang.srt")

from dspark_pd.bed.specs import base_environment

# Three blocks go from one engine to another; a transfer that fails counts nothing.
MOVE = """
import os, torch
from sglang.srt.platforms import current_platform
assert current_platform.is_out_of_tree()
from mooncake.engine import TransferEngine
def engine():
    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", "") == 0
    return made
a, b = engine(), engine()
x, y = torch.arange(4096, dtype=torch.float32), torch.zeros(4096)
for made, t in ((a, x), (b, y)):
    assert made.register_memory(t.data_ptr(), t.nbytes) == 0
peer = f"127.0.0.1:{b.get_rpc_port()}"
at = lambda t, *offsets: [t.data_ptr() + offset for offset in offsets]
assert a.transfer_sync_write(peer, *at(x, 0), *at(y, 0), 4096) == 0
moved = at(x, 8192, 12288), at(y, 8192, 12288)
assert a.batch_transfer_sync_write(peer, *moved, [2048, 4096]) == 0
assert torch.equal(y[:1024], x[:1024]) and torch.equal(y[2048:2560], x[2048:2560])
assert torch.equal(y[3072:], x[3072:]) and not y[1024:2048].any()
assert a.transfer_sync_write("127.0.0.1:1", *at(x, 0), *at(y, 0), 4096) < 0
loaded = {line.split()[-1] for line in open("/proc/self/maps") if "libibverbs" in line}
assert len(loaded) == 1, loaded
os._exit(0)  # Mooncake logs what is left when it ends
"""


@pytest.fixture(scope="module")
def environment(mooncake: None) -> dict[str, str]:
    """What engines are started with: the loader's path, and the platform's name."""
    return base_environment()


def test_host_memory_moves_over_tcp_and_bytes_are_counted(
    run_child, environment, tmp_path
):
    stats = {"SGLANG_CPU_REFERENCE_STATS_DIR": str(tmp_path)}
    child = run_child(MOVE, **environment, **stats)
    assert child.returncode == 0, child.stderr[-2000:]
    (file,) = tmp_path.glob("transfers-*.json")
    expected = {"bytes_posted": 4096 + 2048 + 4096, "transfers": 2}
    assert json.loads(file.read_text()) == expected
    assert "MC_FORCE_TCP is set" in child.stderr


def test_without_a_stats_directory_nothing_is_written(run_child, environment, tmp_path):
    source = f"import os; os.chdir({str(tmp_path)!r})\n" + MOVE
    child = run_child(source, **environment)
    assert child.returncode == 0, child.stderr[-2000:]
    assert not list(tmp_path.iterdir())
