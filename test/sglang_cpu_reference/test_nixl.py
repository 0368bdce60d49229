from __future__ import annotations

import json

import pytest

pytest.importorskip("nixl")
pytest.importorskip("sglang.srt")

# A KV buffer is announced as VRAM, written to a second agent and read back.
MOVE = """
import time, torch
from sglang.srt.platforms import current_platform
assert current_platform.is_out_of_tree()
from nixl._api import nixl_agent, nixl_agent_config
a, b = (nixl_agent(n, nixl_agent_config()) for n in "ab")
x, y = torch.arange(4096, dtype=torch.float32), torch.zeros(4096)
for agent, t in ((a, x), (b, y)):
    agent.register_memory([(t.data_ptr(), t.nbytes, 0, "")], "VRAM")
a.add_remote_agent(b.get_agent_metadata())
pieces = lambda t: [(t.data_ptr() + at, 4096, 0) for at in (0, 8192)]
local = a.get_xfer_descs(pieces(x), "VRAM")
remote = a.get_xfer_descs(pieces(y), "VRAM")
handle = a.initialize_xfer("WRITE", local, remote, "b", b"done")
state = a.transfer(handle)
end = time.monotonic() + 30
while state == "PROC" and time.monotonic() < end:
    state = a.check_xfer_state(handle)
assert state == "DONE", state
assert torch.equal(y[:1024], x[:1024]) and torch.equal(y[2048:3072], x[2048:3072])
assert not y[1024:2048].any()
a.check_xfer_state(handle)
# Two of them in one process, NIXL's and the system's, end it with signal 11 at exit.
assert "libibverbs" not in open("/proc/self/maps").read()
start = time.process_time()
time.sleep(1)
print("busy", time.process_time() - start)
"""


def test_vram_descriptors_move_host_memory_and_bytes_are_counted(run_child, tmp_path):
    child = run_child(
        MOVE,
        SGLANG_PLATFORM="cpu_reference",
        SGLANG_CPU_REFERENCE_STATS_DIR=str(tmp_path / "stats"),
    )
    assert child.returncode == 0, child.stderr[-2000:]
    (file,) = (tmp_path / "stats").glob("transfers-*.json")
    assert json.loads(file.read_text()) == {"bytes_posted": 8192, "transfers": 1}
    # Two progress threads; unpaced, each would burn the whole second.
    assert float(child.stdout.split("busy")[1]) < 0.5


def test_without_a_stats_directory_nothing_is_written(run_child, tmp_path):
    source = f"import os; os.chdir({str(tmp_path)!r})\n" + MOVE
    child = run_child(source, SGLANG_PLATFORM="cpu_reference")
    assert child.returncode == 0, child.stderr[-2000:]
    assert not list(tmp_path.rglob("transfers-*.json"))
