"""The doctor and YAML: manifests, compose files, and the file of ``--config``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from doctor_bench import QWEN, Bench, command, dspark
from dspark_pd.doctor_command import NotArguments
from dspark_pd.doctor_files import parse
from dspark_pd.doctor_yaml import config_flags, scripts
from outcome import Run

pytestmark = pytest.mark.unit

CAPTURE = "SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE"
TAIL = "SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS"
DEPLOYMENT = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: prefill}
spec:
  template:
    spec:
      initContainers:
      - {name: fetch, image: busybox, command: [sh, -c, "wget --spider model"]}
      containers:
      - name: engine
        image: lmsysorg/sglang:v0.5.23-cu129
        command: [python3, -m, sglang.launch_server]
        args:
        - --model-path
        - /models/with space
        - --tp-size=$(TP)
        - --page-size
        - 64
        - --disaggregation-mode
        - prefill
        - --speculative-draft-model-path
        - $(DRAFT)
        env:
        - {name: TP, value: "8"}
        - {name: SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE, value: "1"}
        - name: SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS
          valueFrom: {configMapKeyRef: {name: tails, key: rows}}
        readinessProbe: {exec: {command: [curl, --fail, "http://localhost/health"]}}
"""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_deployment() -> None:
    read = parse(DEPLOYMENT, "prefill")
    assert read.release == "0.5.23"
    assert read.environ == {"TP": "8", CAPTURE: "1"}
    assert read.unread == {
        TAIL: "$(a value from elsewhere)",
        "speculative_draft_model_path": "$(DRAFT)",
    }
    expected = {
        "model_path": "/models/with space",
        "tp_size": 8,
        "page_size": 64,
        "disaggregation_mode": "prefill",
    }
    assert {name: read.args[name] for name in expected} == expected
    assert (read.count, read.open_args, read.open_environ) == (1, False, False)


def test_json_of_a_manifest_and_a_list_of_them() -> None:
    container = {"image": "own/engine:1", "args": ["--model-path=/m", "--tp", "2"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [container]}}
    everything = {"apiVersion": "v1", "kind": "List", "items": [pod]}
    for document in (pod, everything):
        read = parse(json.dumps(document), "decode")
        assert read.args == {"model_path": "/m", "tp_size": 2}
        assert read.release is None


def test_server_arguments_are_no_manifest() -> None:
    document = {"server_args": {"tp_size": 2, "kind": "services:"}, "version": "0.5.23"}
    assert parse(json.dumps(document, indent=1), "decode").args["tp_size"] == 2


def test_a_shell_in_a_container_and_a_script_in_a_config_map() -> None:
    line = "exec sglang serve --model-path /m --tp $TP --page-size $NOBODY_SET_IT"
    shell = {
        "containers": [
            {
                "command": ["bash", "-c"],
                "args": [f"set -e; {line}"],
                "env": [{"name": "TP", "value": "4"}],
            }
        ]
    }
    mounted = {"apiVersion": "v1", "kind": "ConfigMap", "data": {"start.sh": line}}
    read = parse(json.dumps(shell), "decode")
    assert read.args["tp_size"] == 4
    assert set(read.unread) == {"page_size"}
    read = parse(json.dumps(mounted), "decode")
    assert set(read.unread) == {"page_size", "tp_size"}


def test_the_engine_of_the_asked_role_counts() -> None:
    both = (
        DEPLOYMENT
        + "---"
        + DEPLOYMENT.replace("        - prefill\n", "        - decode\n").replace(
            '"8"', '"2"'
        )
    )
    assert parse(both, "prefill").args["tp_size"] == 8
    read = parse(both, "decode")
    assert (read.args["tp_size"], read.count) == (2, 2)
    assert parse(both, "prefill").environ == {"TP": "8", CAPTURE: "1"}


@pytest.mark.parametrize(
    "service",
    [
        """
    command: >
      sglang serve --model-path /m --tp ${TP_OF_NOBODY:-4}
      --disaggregation-mode decode
    environment:
      SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS: 31
""",
        """
    entrypoint: [sglang, serve]
    command: ["--model-path", "/m", "--tp", "4", "--disaggregation-mode", "decode"]
    environment: [SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS=31]
""",
    ],
)
def test_a_compose_file(service: str) -> None:
    text = f"services:\n  decode:\n    image: lmsysorg/sglang:v0.5.22.post1{service}"
    read = parse(text, "decode")
    assert read.args == {
        "model_path": "/m",
        "tp_size": 4,
        "disaggregation_mode": "decode",
    }
    assert (read.environ, read.release) == ({TAIL: "31"}, "0.5.22.post1")


def test_variables_from_elsewhere_are_open(bench: Bench) -> None:
    container = {
        "args": ["--model-path", bench.model("qwen", QWEN)],
        "envFrom": [{"secretRef": {"name": "all"}}],
    }
    read = parse(json.dumps({"containers": [container]}), "prefill")
    assert (read.open_environ, read.sources) == (True, ["source envFrom"])
    composed = {"services": {"a": {"command": "sglang serve --tp 2", "env_file": "x"}}}
    assert parse(json.dumps(composed), "prefill").open_environ


@pytest.mark.parametrize(
    "text",
    [
        "apiVersion: v1\nkind: Service\nspec: {ports: [{port: 80}]}",
        "services:",
        "services: {web: {image: nginx, command: nginx -g}}",
        "spec: {containers: [1, null, {command: 5}, {args: [[]], env: {a: [1]}}]}",
        "containers: 3",
    ],
)
def test_a_manifest_without_an_engine_is_refused(
    bench: Bench, run: Run, text: str
) -> None:
    with pytest.raises(NotArguments, match="manifest without an engine"):
        parse(text, "prefill")
    path = bench.file("other.yaml", text)
    outcome = run("doctor", "--prefill", path, "--decode", path)
    assert (outcome.code, outcome.codes) == (2, ["U004"])


@pytest.mark.parametrize(
    "text",
    [
        "apiVersion: v1\nspec: {{ .Values.spec }}\n",
        "sglang serve --x 'spec: 1'",
        "cat <<E\nspec: 1\nE\nsglang serve --tp 2",
    ],
)
def test_what_is_no_yaml_is_left_to_the_shell(text: str) -> None:
    assert scripts(text) is None


def test_a_pair_of_manifests(bench: Bench, run: Run) -> None:
    model = bench.model("qwen", QWEN)
    draft = dspark(bench).split()
    paths = {}
    for role, flags in (("prefill", ["--page-size", "16"]), ("decode", draft)):
        args = ["--model-path", model, "--disaggregation-mode", role, *flags]
        args += ["--disaggregation-transfer-backend", "nixl"]
        container = {"image": "lmsysorg/sglang:v0.5.23", "args": args}
        pod = {"apiVersion": "v1", "spec": {"containers": [container]}}
        paths[role] = bench.file(f"{role}.json", json.dumps(pod))
    outcome = run("doctor", "--prefill", paths["prefill"], "--decode", paths["decode"])
    codes = [finding["code"] for finding in outcome.data["findings"]]
    assert "PD-COLD-DRAFT" in codes
    assert outcome.code == 1


# -- the file of --config ---------------------------------------------------------------

CONFIG = """
tp-size: 4
page_size: 64
model-path: /m
disable-radix-cache: true
enable-hisparse: false
dtype: null
json-model-override-args: {a: 1}
cuda-graph-bs: [1, 2]
revision: 7
"""


def test_the_flags_of_a_config_file(bench: Bench) -> None:
    assert config_flags(bench.file("c.yaml", CONFIG)) == {
        "tp_size": 4,
        "page_size": 64,
        "model_path": "/m",
        "disable_radix_cache": True,
        "dtype": "None",
        "json_model_override_args": '{"a": 1}',
        "cuda_graph_bs": [1, 2],
        "revision": "7",
    }
    assert config_flags(bench.file("empty.yaml", "")) == {}


def test_flags_of_the_command_go_before_those_of_the_file(bench: Bench) -> None:
    place = bench.file("c.yaml", CONFIG)
    read = parse(f"sglang serve --config {place} --page-size 1 --tp 2", "decode")
    assert (read.args["page_size"], read.args["tp_size"]) == (1, 2)
    assert (read.args["model_path"], read.open_args, read.sources) == ("/m", False, [])
    assert read.misspelt == {}


def test_what_a_config_file_says_is_compared(bench: Bench) -> None:
    place = bench.file("c.yaml", "page-size: 16\n")
    model = bench.model("qwen", QWEN)
    paged = command(model, "prefill", f"--config {place}")
    codes = bench.codes(paged, command(model, "decode", "--page-size 1"))
    assert "PD-PAGE-SIZE" in codes
    assert "DOC-ARGS" not in codes


@pytest.mark.parametrize("text", ["- a\n", "a: {", "\x00"])
def test_a_config_file_that_is_none_is_not_read(bench: Bench, text: str) -> None:
    place = bench.file("c.yaml", text)
    read = parse(f"sglang serve --config {place}", "decode")
    assert (read.open_args, read.sources) == (True, [f"--config {place}"])


def test_a_folder_is_no_config_file(tmp_path: Path) -> None:
    assert config_flags(str(tmp_path)) is None
