from __future__ import annotations

import dataclasses
import importlib

import pytest

pytest.importorskip("torch")
pytest.importorskip("sglang.srt")

from sglang_cpu_reference import adapting
from sglang_cpu_reference.adaptations import TABLE
from sglang_cpu_reference.nixl_build import NIXL_BUILDS

# Modules of wheels that a machine may lack; their own tests import them.
TRANSPORTS = (*NIXL_BUILDS, "mooncake")
SGLANG_ENTRIES = [a for a in TABLE if a.module.startswith("sglang.")]
ASSIGN = next(a for a in TABLE if a.name == "assign_req_to_token_pool_func")


@pytest.mark.parametrize("entry", SGLANG_ENTRIES, ids=lambda a: a.target)
def test_target_exists_with_the_expected_parameters(entry):
    importlib.import_module(entry.module)
    adapting.verify_parameters(entry, adapting.resolve_target(entry))


@pytest.mark.parametrize("entry", TABLE, ids=lambda a: a.target)
def test_every_entry_says_why_and_which_seam_is_missing(entry):
    assert entry.why and entry.seam


def test_a_changed_signature_is_refused():
    changed = dataclasses.replace(ASSIGN, params=("other",))
    importlib.import_module(changed.module)
    with pytest.raises(
        adapting.AdaptationError, match=r"parameters \('other',\).*found"
    ):
        adapting.install(changed)


def test_a_missing_target_is_refused():
    gone = dataclasses.replace(ASSIGN, name="no_such_function")
    importlib.import_module(gone.module)
    with pytest.raises(adapting.AdaptationError, match="the target to exist"):
        adapting.install(gone)


def test_an_adaptation_steps_aside_for_the_seam_it_waits_for():
    served = dataclasses.replace(ASSIGN, params=("other",), unless="json:dumps")
    adapting.install(served)
    waiting = dataclasses.replace(served, unless="json:no_such_seam")
    with pytest.raises(adapting.AdaptationError):
        adapting.install(waiting)


def test_an_adaptation_waits_for_the_need_it_came_with():
    later = dataclasses.replace(ASSIGN, params=("other",), since="json:not_yet")
    adapting.install(later)
    with pytest.raises(adapting.AdaptationError):
        adapting.install(dataclasses.replace(later, since="json:dumps"))


def test_a_parameter_some_releases_lack_is_optional():
    newer = dataclasses.replace(
        ASSIGN, params=(*ASSIGN.params, "extra"), optional=("extra",)
    )
    adapting.verify_parameters(newer, adapting.resolve_target(ASSIGN))


def test_a_constant_of_another_type_is_refused():
    module = importlib.import_module("sglang.srt.mem_cache.pool_host.base")
    reserve = next(a for a in TABLE if a.name == "HICACHE_HOST_MEMORY_RESERVE_BYTES")
    wrong = dataclasses.replace(reserve, hook="sys:version")
    before = module.HICACHE_HOST_MEMORY_RESERVE_BYTES
    with pytest.raises(adapting.AdaptationError, match="a constant of type str"):
        adapting.install(wrong)
    assert before == module.HICACHE_HOST_MEMORY_RESERVE_BYTES


FRESH_PROCESS = """
import sys, importlib
from sglang.srt.platforms import current_platform
assert current_platform.is_out_of_tree(), current_platform
assert "sglang.srt.managers.scheduler" not in sys.modules, "activation is not cheap"
from sglang_cpu_reference import adaptations, adapting
from sglang_cpu_reference.nixl_build import NIXL_BUILDS
for entry in adaptations.TABLE:
    if entry.module.split(".")[0] in (*NIXL_BUILDS, "mooncake"):
        continue
    importlib.import_module(entry.module)
    if adapting.is_needless(entry):
        continue
    target = adapting.resolve_target(entry)
    if entry.kind == "constant":
        assert target == adapting.pkgutil.resolve_name(entry.hook), entry.target
    else:
        assert target.__wrapped__ is not None, entry.target
    print("adapted", entry.target)
"""


def test_a_process_that_names_the_platform_is_adapted_on_import(run_child):
    child = run_child(FRESH_PROCESS, SGLANG_PLATFORM="cpu_reference")
    assert child.returncode == 0, child.stderr[-2000:]
    adapted = child.stdout.count("adapted ")
    here = [a for a in TABLE if a.module.split(".")[0] not in TRANSPORTS]
    assert adapted == len([a for a in here if not adapting.is_needless(a)])
