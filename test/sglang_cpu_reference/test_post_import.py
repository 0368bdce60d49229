from __future__ import annotations

import importlib
import sys

import pytest

from sglang_cpu_reference import post_import


@pytest.fixture
def module_dir(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("watched_"):
            del sys.modules[name]


def test_callback_runs_before_the_importer_sees_the_module(module_dir):
    (module_dir / "watched_a.py").write_text("value = 1\n")
    (module_dir / "watched_b.py").write_text("from watched_a import value\n")
    post_import.watch(
        "watched_a", lambda: setattr(sys.modules["watched_a"], "value", 2)
    )
    assert importlib.import_module("watched_b").value == 2


def test_an_imported_module_is_served_at_once():
    served = []
    post_import.watch("json", lambda: served.append("json"))
    assert served == ["json"]


def test_a_module_being_imported_is_served_when_it_is_complete(module_dir):
    (module_dir / "watched_c.py").write_text(
        "from sglang_cpu_reference import post_import\n"
        "import sys\n"
        "seen = []\n"
        "me = sys.modules[__name__]\n"
        "post_import.watch(__name__, lambda: seen.append(hasattr(me, 'last')))\n"
        "last = True\n"
    )
    (module_dir / "watched_d.py").write_text("")
    module = importlib.import_module("watched_c")
    assert module.seen == []
    importlib.import_module("watched_d")
    assert module.seen == [True]


def test_a_failing_callback_fails_the_import(module_dir):
    (module_dir / "watched_e.py").write_text("")

    def refuse():
        raise RuntimeError("does not fit")

    post_import.watch("watched_e", refuse)
    with pytest.raises(RuntimeError, match="does not fit"):
        importlib.import_module("watched_e")


def test_the_loader_still_answers_for_the_module(module_dir):
    import inspect

    (module_dir / "watched_f.py").write_text("def f():\n    return 5\n")
    post_import.watch("watched_f", lambda: None)
    module = importlib.import_module("watched_f")
    assert "return 5" in inspect.getsource(module.f)
