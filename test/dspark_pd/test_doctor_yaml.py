"""The doctor and YAML: manifests, compose files, and the file of ``--config``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from doctor_bench import QWEN, Bench, command, dspark
from dspark_pd.doctor_command import Command, NotArguments
from dspark_pd.doctor_files import parse
from dspark_pd.doctor_inputs import read_engine
from dspark_pd.doctor_yaml import config_flags, documents
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


def engine(**container: object) -> dict:
    """A pod whose one container starts SGLang with --model-path /m and these flags."""
    args = ["--model-path", "/m", *container.pop("flags", [])]
    fields = {"name": "e", "command": ["sglang", "serve"], "args": args, **container}
    return {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [fields]}}


def env(**values: object) -> list[dict]:
    return [{"name": name, "value": value} for name, value in values.items()]


def read(document: object, role: str = "prefill") -> Command:
    return parse(json.dumps(document), role)


@pytest.mark.parametrize("indent", [None, 1, "\t"])
def test_json_of_a_manifest_and_a_list_of_them(indent: object) -> None:
    pod = engine(flags=["--tp", "2"], image="own/engine:1")
    everything = {"kind": "List", "apiVersion": "v1", "items": [pod]}
    texts = [json.dumps(document, indent=indent) for document in (pod, everything)]
    texts += [f'{{"apiVersion": "v1", "kind": "Secret"}}\n---\n{json.dumps(pod)}']
    for text in [*texts, "\ufeff" + texts[0]]:
        found = parse(text, "decode")
        assert found.args == {"model_path": "/m", "tp_size": 2}
        assert found.release is None


def test_server_arguments_are_no_manifest() -> None:
    document = {"server_args": {"tp_size": 2, "kind": "services:"}, "version": "0.5.23"}
    assert parse(json.dumps(document, indent=1), "decode").args["tp_size"] == 2


@pytest.mark.parametrize(
    ("image", "release"),
    [
        ("lmsysorg/sglang:v0.5.23-cu129-amd64", "0.5.23"),
        ("registry:5000/lmsysorg/sglang-rocm:0.5.22.post1", "0.5.22.post1"),
        ("sglang:v0.5.23rc1", "0.5.23rc1"),
        ("registry.corp/ml/sglang.dspark:0.1.4", None),
        ("nvcr.io/ai-dynamo/my-sglang:0.8.0", None),
        ("registry.corp/ml/sglang-dspark:0.1.4", None),
        ("sglang.corp/base/vllm:1.2.3", None),
        ("lmsysorg/sglang:latest", None),
    ],
)
def test_the_release_is_that_of_sglangs_own_image(image: str, release: str) -> None:
    assert read(engine(image=image)).release == release


def test_variables_of_a_container() -> None:
    variables = [
        *env(TP="4", COPY="$(TP)", ESCAPED="$$(TP)"),
        {"name": "GPUS", "valueFrom": {"resourceFieldRef": {}}},
        *env(SIZE="$(GPUS)", ON=True, NOTHING=None),
        None,
        "odd",
    ]
    flags = ["--tp=$(COPY)", "--pp", "$(SIZE)", "--page-size", "$(NOBODY)", "--x$(TP)"]
    found = read(engine(flags=flags, env=variables))
    assert found.args["tp_size"] == 4
    assert found.args["x4"] is True
    assert found.unread["pp_size"] == "$(SIZE)"
    assert found.unread["page_size"] == "$(NOBODY)"
    expected = {"TP": "4", "COPY": "4", "ESCAPED": "$(TP)", "ON": "true", "NOTHING": ""}
    assert {name: found.environ[name] for name in expected} == expected
    assert found.unread["GPUS"] == "$(a value from elsewhere)"
    assert found.unread["SIZE"] == "$(GPUS)"


def test_a_shell_in_a_container() -> None:
    script = "set -e; exec sglang serve --model-path /m --tp $TP --page-size $NOBODY"
    shell = {"command": ["bash", "-c"], "args": [script], "env": env(TP="4")}
    found = read(engine(**shell))
    assert found.args["tp_size"] == 4
    assert set(found.unread) == {"page_size"}


@pytest.mark.parametrize(
    ("variables", "known"),
    [
        ({"env": [{"name": "PAGE", "valueFrom": {}}]}, False),
        ({"envFrom": [{"configMapRef": {"name": "c"}}]}, False),
        ({"env": env(PAGE="16")}, True),
        ({"env": env(OTHER="16")}, True),
        ({}, True),
    ],
)
def test_a_default_counts_where_nothing_else_may(variables: dict, known: bool) -> None:
    script = "sglang serve --model-path /m --page-size ${PAGE:-1}"
    found = read(engine(command=["bash", "-c"], args=[script], **variables))
    assert ("page_size" in found.unread) is not known
    if known:
        given = "PAGE" in json.dumps(variables)
        assert found.args["page_size"] == (16 if given else 1)


def test_a_shell_that_hands_its_arguments_on() -> None:
    shell = ["bash", "-c", 'exec sglang serve --host 0.0.0.0 "$@"', "bash"]
    found = read(engine(command=shell, args=["--model-path", "/a b", "--tp=$(NO)"]))
    assert (found.args["model_path"], found.unread) == ("/a b", {"tp_size": "$(NO)"})
    script = 'A=(--model-path /m --tp 2); exec python -m sglang.launch_server "${A[@]}"'
    found = read(engine(command=["bash", "-c", script], args=[]))
    assert found.args == {"model_path": "/m", "tp_size": 2}


def test_one_word_in_place_of_two_is_not_taken_for_a_flag() -> None:
    found = read(engine(flags=["--tp 8", "--pp", "2"]))
    assert (found.unread, found.args["pp_size"]) == ({"tp_size": "--tp 8"}, 2)


# -- what is an engine, and where -------------------------------------------------------


def test_a_script_of_a_config_map_has_its_containers_variables() -> None:
    line = "exec sglang serve --model-path /m --tp $TP"
    mounted = {"apiVersion": "v1", "kind": "ConfigMap", "data": {"start.sh": line}}
    runs = engine(
        command=["bash", "/s/start.sh"],
        args=[],
        env=env(TP="4", **{CAPTURE: "1"}),
        image="lmsysorg/sglang:v0.5.23",
    )
    both = {"apiVersion": "v1", "items": [mounted, runs]}
    found = read(both)
    assert (found.args["tp_size"], found.release) == (4, "0.5.23")
    assert found.environ == {"TP": "4", CAPTURE: "1"}
    for unclear in (mounted, {"apiVersion": "v1", "items": [mounted, runs, runs]}):
        unclear = json.loads(json.dumps(unclear))
        found = read(unclear)
        assert found.open_environ
        assert found.sources == ["source its container's variables"]
        assert set(found.unread) == {"tp_size"}


def test_what_a_manifest_says_elsewhere_is_no_engine() -> None:
    """Copies of what was applied, notes, and pieces that anchors are made of."""
    old = "sglang serve --model-path /m --page-size 64"
    pod = engine(command=["bash", "-c"], args=[old.replace("64", "1")])
    pod["metadata"] = {"annotations": {"last-applied-configuration": old, "b": "it's"}}
    pod["status"] = {"message": old}
    assert read(pod).args["page_size"] == 1
    composed = {"services": {"e": {"image": "i", "command": old}}, "x-c": old + "0"}
    assert read(composed).args["page_size"] == 64


@pytest.mark.parametrize(
    "place",
    [
        {"runner": "HERE"},
        {"decoderConfig": {"runner": "HERE"}},
        {"services": {"Decode": {"extraPodSpec": {"mainContainer": "HERE"}}}},
        {
            "leaderWorkerTemplate": {
                "leaderTemplate": {"spec": {"containers": ["HERE"]}}
            }
        },
    ],
)
def test_containers_of_other_resources(place: dict) -> None:
    container = {
        "image": "lmsysorg/sglang:v0.5.23",
        "args": ["sglang serve --model-path /m --tp 4"],
        "command": ["/bin/bash", "-c"],
        "env": env(**{CAPTURE: "1"}),
    }
    text = json.dumps({"apiVersion": "x/v1", "spec": place})
    found = parse(text.replace('"HERE"', json.dumps(container)), "decode")
    assert (found.args["tp_size"], found.environ) == (4, {CAPTURE: "1"})


def test_other_programs_of_the_pod_are_none_of_the_doctors() -> None:
    pod = engine(flags=["--page-size", "1", "--disaggregation-mode", "$(ROLE)"])
    containers = pod["spec"]["containers"]
    containers.insert(0, {"name": "otel", "args": ["--config=/etc/otel.yaml"]})
    containers.insert(0, {"name": "p", "command": ["other", "--model-path", "/x"]})
    compiles = ["python3", "-m", "sglang.compile_deep_gemm", "--model-path", "/m"]
    pod["spec"]["initContainers"] = [{"name": "i", "command": [*compiles, "--tp", "8"]}]
    found = read(pod)
    assert (found.args["page_size"], found.count) == (1, 1)
    assert found.unread == {"disaggregation_mode": "$(ROLE)"}
    script = f"{' '.join(compiles)} --tp 8; exec sglang serve --model-path /m --tp 4"
    found = read(engine(command=["bash", "-c", script], args=[]))
    assert (found.args["tp_size"], found.count) == (4, 1)


def test_one_text_that_cannot_be_read_is_not_the_end() -> None:
    pod = engine(flags=["--tp", "4"])
    pod["spec"]["containers"].insert(
        0, {"name": "s", "command": ["sh", "-c", "echo sglang --tp 8 don't"]}
    )
    assert read(pod).args["tp_size"] == 4
    broken = engine(command=["sh", "-c", "sglang serve --tp 8 don't"], args=[])
    with pytest.raises(ValueError, match="quote"):
        read(broken)
    odd = {"image": "i", "command": "echo don't"}
    composed = {"services": {"a": odd, "e": {"command": "sglang serve --tp 2"}}}
    assert read(composed).args["tp_size"] == 2
    odd["command"] = "sglang serve --tp 2 don't"
    with pytest.raises(ValueError, match="quote"):
        read({"services": {"a": odd}})


def test_the_engine_of_the_asked_role_counts() -> None:
    both = (
        DEPLOYMENT
        + "---"
        + DEPLOYMENT.replace("        - prefill\n", "        - decode\n").replace(
            '"8"', '"2"'
        )
    )
    assert parse(both, "prefill").args["tp_size"] == 8
    found = parse(both, "decode")
    assert (found.args["tp_size"], found.count) == (2, 2)
    assert parse(both, "prefill").environ == {"TP": "8", CAPTURE: "1"}


def test_variables_from_elsewhere_are_open(bench: Bench) -> None:
    found = read(engine(envFrom=[{"secretRef": {"name": "all"}}]))
    assert (found.open_environ, found.sources) == (True, ["source envFrom"])
    composed = {"services": {"a": {"image": "i", "command": "sglang serve --tp 2"}}}
    assert not read(composed).open_environ
    composed["services"]["a"]["env_file"] = "x"
    assert read(composed).open_environ


# -- compose ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "service",
    [
        """
    command: >
      sglang serve --model-path "/with space" --tp ${TP_OF_NOBODY:-4}
      --disaggregation-mode decode
    environment:
      SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS: ${ROWS_OF_NOBODY-31}
""",
        """
    entrypoint: [sglang, serve]
    command: [--model-path, /with space, --tp, "${TP_OF_NOBODY:-${ALSO:-4}}",
              "--disaggregation-mode", "decode"]
    environment: [SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS=31]
""",
    ],
)
def test_a_compose_file(service: str) -> None:
    text = f"services:\n  decode:\n    image: lmsysorg/sglang:v0.5.22.post1{service}"
    found = parse(text, "decode")
    assert found.args == {
        "model_path": "/with space",
        "tp_size": 4,
        "disaggregation_mode": "decode",
    }
    assert (found.environ, found.release) == ({TAIL: "31"}, "0.5.22.post1")


def test_compose_takes_values_from_its_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_SHELL", "7")
    monkeypatch.setenv("EMPTY", "")
    flags = {
        "--x1": "${FROM_SHELL}",
        "--x2": "$FROM_SHELL",
        "--x3": "${PAGE:-64}",  # the service's own is for its container
        "--x4": "${EMPTY:-3}${EMPTY-4}",
        "--x5": "${FROM_SHELL:+5}${EMPTY:+6}",
        "--x6": "$$HOME",
    }
    words = [word for pair in flags.items() for word in pair]
    unknown = [
        "--page-size",
        "${NOBODY}",
        "--tp",
        "${NOBODY:?say it}",
        "--pp",
        "$NOBODY",
    ]
    service = {
        "image": "i",
        "entrypoint": ["sglang", "serve", "--model-path", "/m"],
        "command": [*words, *unknown],
        "environment": {"PAGE": "1", "FROM_SHELL": None, "NOBODY_HAS": None},
    }
    found = read({"services": {"e": service}})
    values = {"x1": 7, "x2": 7, "x3": 64, "x4": 3, "x5": 5, "x6": "$HOME"}
    assert {name: found.args[name] for name in values} == values
    for name in ("page_size", "tp_size", "pp_size"):
        assert found.unread[name] == "$(NOBODY)"
    assert found.environ == {"PAGE": "1", "FROM_SHELL": "7"}
    assert "NOBODY_HAS" in found.unread


def test_compose_reads_the_env_file_beside_it(bench: Bench) -> None:
    bench.file(".env", "# sizes\nPAGE=64\nexport NAME = 'a b'\nnothing\n")
    command = "sglang serve --model-path ${NAME} --page-size ${PAGE:-1}"
    text = json.dumps({"services": {"e": {"image": "i", "command": command}}})
    assert parse(text, "decode", bench.folder).args["page_size"] == 64
    assert parse(text, "decode").args["page_size"] == 1
    engine = read_engine("decode", bench.file("compose.json", text), 1.0)
    assert engine.args["page_size"] == 64


def test_one_service_alone() -> None:
    text = f"environment:\n  {TAIL}: ${{NO:-31}}\ncommand: sglang serve --tp 2\n"
    found = parse(text, "decode")
    assert (found.args, found.environ) == ({"tp_size": 2}, {TAIL: "31"})


def test_a_shell_of_a_service_sees_the_services_variables() -> None:
    script = "sglang serve --model-path /m --tp $$TP"
    service = {"command": ["bash", "-c", script], "environment": ["TP=2"]}
    assert read({"services": {"e": service}}).args["tp_size"] == 2


def test_a_service_that_extends_another() -> None:
    base = {
        "image": "lmsysorg/sglang:v0.5.23",
        "command": "sglang serve --model-path /m --tp 2",
        "environment": {CAPTURE: "1", TAIL: "8"},
    }
    service = {"extends": {"service": "base"}, "environment": [f"{TAIL}=31"]}
    services = {"e": {**service, "command": base.pop("command")}, "base": base}
    found = read({"services": services})
    assert found.environ == {CAPTURE: "1", TAIL: "31"}
    assert (found.release, found.open_args) == ("0.5.23", False)
    services["e"]["extends"] = {"file": "other.yaml", "service": "base"}
    found = read({"services": services})
    assert (found.open_args, found.open_environ) == (True, True)
    assert "source extends" in found.sources
    services["e"]["extends"] = "e"
    assert read({"services": services}).open_args


# -- what cannot be read ----------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "apiVersion: v1\nkind: Service\nspec: {ports: [{port: 80}]}",
        "services:",
        "services: {web: {image: nginx, command: nginx -g}}",
        "spec: {containers: [1, null, {command: 5}, {args: [[]], env: {a: [1]}}]}",
        "containers: 3",
        "services: {a: {extends: [x], command: ls}, b: {extends: {service: [x]}}}",
        "spec: &a [*a]",
    ],
)
def test_a_manifest_without_an_engine_is_refused(
    bench: Bench, run: Run, text: str
) -> None:
    with pytest.raises(NotArguments, match="without an engine"):
        parse(text, "prefill")
    path = bench.file("other.yaml", text)
    outcome = run("doctor", "--prefill", path, "--decode", path)
    assert (outcome.code, outcome.codes) == (2, ["U004"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("apiVersion: v1\nspec: {{ .Values.spec }}\n", "a template; render it first"),
        ("{{- if .Values.on }}\nspec: {}\n{{- end }}\n", "a template; render it first"),
        ("apiVersion: v1\nspec:\n  a: {\n", "in line 4"),
        ("# note\n---\nservices:\n\ta: b\n", "cannot start any token in line 4"),
        ("spec: !!bool maybe", "a bad value"),
        ("spec: " + "x" * 2_000_000, "YAML of 2000006 characters"),
    ],
)
def test_yaml_that_cannot_be_read_is_named(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse(text, "prefill")


def test_values_of_a_template_are_unknown() -> None:
    flags = ["--tp", "{{ .Values.tp }}", "--pp", "2"]
    found = read(engine(flags=flags))
    assert found.unread == {"tp_size": "$({{ .Values.tp }})"}
    assert found.args["pp_size"] == 2
    flags[1] = "{{ 'tp size' | quote }}"
    service = {"image": "i", "command": " ".join(["sglang serve", *flags])}
    found = read({"services": {"e": service}})
    assert found.unread == {"tp_size": "$({{ tp size quote }})"}
    assert found.args["pp_size"] == 2


def test_containers_that_say_nothing_but_their_command() -> None:
    flags = ["sglang", "serve", "--tp", "2"]
    assert read({"spec": {"containers": [{"args": flags}]}}).args == {"tp_size": 2}
    assert read({"services": {"e": {"command": flags}}}).args == {"tp_size": 2}


def test_own_tags_and_a_bare_list_of_containers() -> None:
    tagged = "services:\n  e:\n    image: i\n    command: !override\n"
    items = "    - sglang\n    - serve\n    - --tp=2\n"
    assert parse(tagged + items, "prefill").args == {"tp_size": 2}
    text = "- name: e\n  args: [sglang, serve, --tp, '2']\n"
    assert parse(text, "prefill").args == {"tp_size": 2}


def test_a_bomb_of_aliases_goes_off_unheard() -> None:
    lines = ["spec:", "  a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    lines += ["  containers:", "  - {name: e, args: *a11, env: *a11}"]
    with pytest.raises(NotArguments):
        parse("\n".join(lines), "prefill")
    flags = "\n".join(["tp: 2", *(line[2:] for line in lines[1:-2])])
    with pytest.raises(NotArguments):
        parse(flags, "prefill")


@pytest.mark.parametrize(
    "text",
    [
        "sglang serve --x 'spec: 1'",
        "cat <<E\nspec: 1\nE\nsglang serve --tp 2",
        "[Unit]\nspec: 1",
        "--tp 2",
        '{"tp_size": 2}',
        "",
        "while :\ndo sglang serve --tp 2; done",
        "trap : TERM INT\nsglang serve --tp 2",
        "serve: build\n\tsglang serve --tp 2",
        "a: {",
    ],
)
def test_what_is_no_yaml_is_left_to_others(text: str) -> None:
    assert documents(text) is None


def test_what_is_yaml_by_chance_is_read_as_a_script() -> None:
    """A recipe, whose continued line YAML would fold."""
    recipe = "prefill:\n    sglang serve --tp 2 \\\n      --page-size 16\n"
    found = parse(recipe, "prefill")
    assert (found.args["tp_size"], found.args["page_size"]) == (2, 16)
    for nothing in ("name: value", "- name: a", "a: &a [*a]"):
        with pytest.raises(NotArguments, match="no flag of an engine"):
            parse(nothing, "prefill")


def test_a_pair_of_manifests(bench: Bench, run: Run) -> None:
    model = bench.model("qwen", QWEN)
    draft = dspark(bench).split()
    paths = {}
    for role, flags in (("prefill", ["--page-size", "16"]), ("decode", draft)):
        args = ["--model-path", model, "--disaggregation-mode", role, *flags]
        args += ["--disaggregation-transfer-backend", "nixl"]
        container = {"name": "e", "image": "lmsysorg/sglang:v0.5.23", "args": args}
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
since: {day: 2026-11-30}
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
        "since": '{"day": "2026-11-30"}',
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


def test_a_config_file_may_be_given_itself(bench: Bench) -> None:
    found = parse("# flags\n" + CONFIG.replace("since:", "dtype:"), "decode")
    assert (found.args["tp_size"], found.args["page_size"]) == (4, 64)
    chart = "model: /m\nreplicas: 2\nprefill: {tp: 4}\n"
    with pytest.raises(NotArguments, match="values of a chart"):
        parse(chart, "decode")
    assert parse("tp-sizes: 2\ntp: 2\n", "decode").misspelt == {}


@pytest.mark.parametrize("text", ["- a\n", "a: {", "\x00", "a: !!bool x", "3: 4\n- a"])
def test_a_config_file_that_is_none_is_not_read(bench: Bench, text: str) -> None:
    place = bench.file("c.yaml", text)
    read = parse(f"sglang serve --config {place}", "decode")
    assert (read.open_args, read.sources) == (True, [f"--config {place}"])


def test_a_folder_is_no_config_file(tmp_path: Path) -> None:
    assert config_flags(str(tmp_path)) is None
