"""The `cpd-ray` command as a person uses it, against the HTTP face with the fake behind it on a real server; and checks of configurations."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import yaml
from rich.console import Console

from actors.cli import views
from actors.cli.api import Api
from actors.cli.chatting import Conversation
from actors.cli.checking import check_file
from actors.cli.checkout import benchmarks, run_module
from actors.cli.main import main
from actors.http.app import HttpSettings, build_app
from actors.http.face import ModelCard
from actors.http.fake_face import FakeFace, Script
from actors.http.identity import KeyRing
from actors.models.facts import ModelFacts
from actors.models.tiny import TinySpec, write_tiny
from actors.text.codec import TextCodec
from cpd_ray.config import CPDConfig
from cpd_ray.errors import ConfigError, ModelUnavailable, Unavailable

REPOSITORY = Path(__file__).resolve().parents[2]
LOCAL = REPOSITORY / "configs" / "local.yaml"
DOCUMENT = "All work and no play makes Jack a dull boy. " * 4


@dataclass(frozen=True)
class Served:
    url: str
    face: FakeFace


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextCodec]:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(TinySpec(), folder)
    codec = TextCodec.load(folder)
    yield codec
    codec.close()


@contextlib.contextmanager
def serving(codec: TextCodec, script: Script | None = None, keys: KeyRing | None = None) -> Iterator[Served]:
    """The face behind a real server in a thread; nothing is left running when it ends."""
    face = FakeFace(codec, (ModelCard("fake", 4096, codec.vocab_size),), script)
    config = uvicorn.Config(build_app(face, HttpSettings(keys=keys)), log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        yield Served(f"http://127.0.0.1:{listening.getsockname()[1]}", face)
        server.should_exit = True
        thread.join()
    face.check()


@pytest.fixture(scope="module")
def served(codec: TextCodec) -> Iterator[Served]:
    with serving(codec) as served:
        yield served


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


class Command:
    """Runs `cpd-ray` in this process, in a wide terminal; the output of its children counts too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capture = capture
        for name, value in {"COLUMNS": "200", "NO_COLOR": "1", "PYTHONPATH": str(REPOSITORY)}.items():
            monkeypatch.setenv(name, value)

    def __call__(self, *arguments: str, stdin: str = "", **env: str) -> Done:
        with self._monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", StringIO(stdin))
            for name, value in env.items():
                patch.setenv(name, value)
            self._capture.readouterr()
            with pytest.raises(SystemExit) as ended:
                main(arguments)
        out, err = self._capture.readouterr()
        code = ended.value.code
        return Done(code if isinstance(code, int) else int(code is not None), out, err)


@pytest.fixture
def cpd_ray(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capfd)


# -- help --------------------------------------------------------------------------------------------------------------


def test_the_help_names_every_command_and_loads_nothing_heavy(cpd_ray: Command) -> None:
    told = cpd_ray("--help")
    assert told.returncode == 0
    for command in ("serve", "deploy", "status", "plan", "warm", "chat", "demo", "bench", "config"):
        assert command in told.stdout
        text = cpd_ray(command, "--help")
        assert text.returncode == 0, text.stderr
        assert "usage" in text.stdout.lower() or command == "bench"
    heavy = ("ray", "torch", "transformers", "httpx", "pydantic", "rich.live")
    loads = f"import sys, actors.cli.main; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", loads], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_serve_keeps_its_own_options_and_exit_codes(cpd_ray: Command, tmp_path: Path) -> None:
    told = cpd_ray("serve", "--help")
    assert "--dashboard" in told.stdout
    refused = cpd_ray("serve", "--config", str(tmp_path / "none.yaml"))
    assert refused.returncode == 2
    assert "none.yaml" in refused.stdout


# -- talking to a system -------------------------------------------------------------------------------------------------


def test_status_is_shown_and_told_as_json(cpd_ray: Command, served: Served) -> None:
    shown = cpd_ray("status", "--url", served.url)
    assert shown.returncode == 0, shown.stderr
    for text in ("0 in flight", "prefill-0", "node-0"):
        assert text in shown.stdout
    told = cpd_ray("status", "--json", CPD_URL=served.url)
    assert json.loads(told.stdout) == httpx.get(f"{served.url}/v1/cpd/status").json()


def test_watching_draws_anew_at_each_tick_and_outlives_a_missing_answer(served: Served) -> None:
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=200)
    ticks = [None] * 3
    with Api(served.url) as api:
        views.watch(api, ticks, console)
    assert out.getvalue().count("prefill-0") >= 3
    with Api(f"http://127.0.0.1:{closed_port()}") as api:
        views.watch(api, ticks, console)
    assert out.getvalue().count("nothing answers on") >= 3


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_warming_documents_makes_plans_warm(cpd_ray: Command, served: Served, tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    document.write_text(DOCUMENT)
    before = cpd_ray("plan", f"@{document}", "--url", served.url)
    assert before.returncode == 0, before.stderr
    assert "cold" in before.stdout
    warmed = cpd_ray("warm", str(document), "--no-chat", "--ttl-s", "60", "--url", served.url)
    assert warmed.returncode == 0, warmed.stderr
    assert "pinned for 60 s" in warmed.stdout
    after = cpd_ray("plan", "-", "--url", served.url, "--json", stdin=DOCUMENT)
    assert json.loads(after.stdout)["route"] == "warm"
    assert cpd_ray("warm", str(document), str(tmp_path / "none.txt"), "--url", served.url).returncode == 2


def test_what_goes_wrong_is_one_line_and_an_exit_code(cpd_ray: Command, served: Served) -> None:
    silent = cpd_ray("status", "--url", f"http://127.0.0.1:{closed_port()}")
    assert (silent.returncode, silent.stdout) == (1, "")
    assert "cpd-ray serve" in silent.stderr
    assert len(silent.stderr.splitlines()) == 1
    assert "http://" in cpd_ray("status", "--url", "nonsense").stderr
    long = cpd_ray("plan", "x" * 5000, "--url", served.url)
    assert long.returncode == 1
    assert "400" in long.stderr
    assert cpd_ray("plan").returncode == 2


def test_a_key_is_sent_and_its_lack_is_explained(cpd_ray: Command, codec: TextCodec) -> None:
    secret = "a key of the tenant"
    keys = KeyRing.parse(f"tenant:{hashlib.sha256(secret.encode()).hexdigest()}")
    with serving(codec, keys=keys) as served:
        refused = cpd_ray("status", "--url", served.url)
        assert refused.returncode == 1
        assert "--key" in refused.stderr
        assert cpd_ray("status", "--url", served.url, CPD_API_KEY=secret).returncode == 0


# -- chatting ------------------------------------------------------------------------------------------------------------


def test_a_chat_streams_and_says_what_was_cached(cpd_ray: Command, served: Served) -> None:
    done = cpd_ray(
        "chat", "--system", DOCUMENT, "--max-tokens", "20", "--url", served.url, stdin="hello\nand again\n/reset\nanew\n/exit\n"
    )
    assert done.returncode == 0, done.stderr
    costs = [line for line in done.stdout.splitlines() if line.startswith("first token after")]
    assert len(costs) == 3
    assert all("20 tokens" in line for line in costs)
    assert ": 0 of " not in costs[1]
    assert "prompt tokens cached (pool" in costs[1]


class Typist:
    """Asks these, then ends the input."""

    def __init__(self, *lines: str) -> None:
        self._lines = iter(lines)

    def __call__(self) -> str:
        try:
            return next(self._lines)
        except StopIteration:
            raise EOFError from None


def conversation(api: Api, *lines: str) -> tuple[Conversation, StringIO]:
    out = StringIO()
    console = Console(file=out, width=200)
    return Conversation(api, "", {"max_tokens": 8}, console=console, ask=Typist(*lines), now_s=time.monotonic), out


def test_a_conversation_grows_by_its_turns_and_begins_anew(served: Served) -> None:
    with Api(served.url) as api:
        talk, _ = conversation(api, "one", "", "two")
        talk.run()
        assert [m["role"] for m in talk.messages] == ["user", "assistant"] * 2
        assert [m["content"] for m in talk.messages[::2]] == ["one", "two"]
        again, _ = conversation(api, "one", "/reset", "two", "/reset")
        again.run()
        assert again.messages == []


def test_a_broken_off_answer_ends_in_the_system_and_is_forgotten(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(codec) as served, Api(served.url) as api:
        talk, out = conversation(api, "go on", "next")
        shown = talk._console.print
        interrupts = iter([KeyboardInterrupt])

        def interrupted(*what: Any, **how: Any) -> None:
            shown(*what, **how)
            if how.get("end") == "" and what[0]:
                for interrupt in interrupts:
                    raise interrupt

        monkeypatch.setattr(talk._console, "print", interrupted)
        talk.run()
        assert "(broken off)" in out.getvalue()
        assert [m["content"] for m in talk.messages if m["role"] == "user"] == ["next"]


def test_a_failure_in_the_middle_is_said_and_the_chat_goes_on(codec: TextCodec) -> None:
    script = Script()
    with serving(codec, script) as served, Api(served.url) as api:

        class Breaking(Typist):
            def __call__(self) -> str:
                line = super().__call__()
                script.fail_with = Unavailable("no worker is left") if line == "two" else None
                script.fail_after = 2
                return line

        talk, out = conversation(api)
        talk._ask = Breaking("one", "two", "three")
        talk.run()
        assert "error: no worker is left" in out.getvalue()
        assert [m["content"] for m in talk.messages if m["role"] == "user"] == ["one", "three"]


# -- configurations ------------------------------------------------------------------------------------------------------

FACTS = ModelFacts("llama", 30, 576, 9, 3, 64, 49_152, 8192, (2,), "bfloat16", (None,) * 30)


def facts(config: CPDConfig) -> ModelFacts:
    return FACTS


def written(folder: Path, content: Any) -> Path:
    file = folder / "config.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return file


@pytest.fixture
def local() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(LOCAL.read_text())
    return copy.deepcopy(loaded)


def test_the_configurations_of_the_project_are_right() -> None:
    for file in sorted(LOCAL.parent.glob("*.yaml")):
        checked = check_file(file, with_model=False)
        assert checked.problems == (), file
        assert {a.is_system for a in checked.applications} == {True, False}


def test_a_right_one_shows_what_it_comes_to(local: dict[str, Any], tmp_path: Path) -> None:
    local["applications"].append({"name": "mine", "import_path": "my.app:app", "route_prefix": "/mine"})
    local["applications"][1]["deployments"][0]["user_config"]["admission"]["max_in_flight"] = 7
    checked = check_file(written(tmp_path, local), facts_of=facts)
    assert (checked.problems, checked.others) == ((), ("mine",))
    out = StringIO()
    Console(file=out, width=160).print(views.config_view(checked))
    text = out.getvalue()
    bytes_per_token = 30 * 2 * 3 * 64 * 2
    for expected in (
        "9 query and 3 KV heads",
        f"{64 * bytes_per_token} bytes each",
        "pre_prefill",
        "16384",
        "at most 7 requests",
        "mine",
    ):
        assert expected in text, expected
    assert f"room for {int(0.5 * 2**30 // bytes_per_token)} tokens" in text


def test_every_problem_is_named_by_its_path(local: dict[str, Any], tmp_path: Path) -> None:
    kv, system = local["applications"]
    kv["args"]["cache"] = {"block_tokens": 32, "pool_tokens": 16384}
    system["name"] = "other"
    system["args"]["model"] = {"id": "smollm2", "dtipe": "float32"}
    problems = check_file(written(tmp_path, local), facts_of=facts).problems
    assert any("applications.1.args.model.dtipe: unknown key" in p for p in problems)
    system["args"]["model"] = kv["args"]["model"]
    system["args"]["roles"]["prefill"]["tensor_parallel"] = 2
    system["deployments"][0]["user_config"] = {"routing": {"policy": "best"}, "admission": {"max_in_flight": 0}}
    system["deployments"][1]["name"] = "preprefill"
    system["deployments"][2]["user_config"] = "fast"
    problems = check_file(written(tmp_path, local), facts_of=facts).problems
    for expected in (
        "applications.1.name: other",
        "applications.1.deployments.0.user_config.routing.policy",
        "applications.1.deployments.0.user_config.admission.max_in_flight",
        "applications.1.deployments.1.name: 'preprefill'",
        "applications.1.deployments.2.user_config",
        "roles.prefill.tensor_parallel: 2 ranks do not divide",
        "cache.block_tokens: 64 in application other, but 32",
    ):
        assert any(expected in p for p in problems), (expected, problems)


def test_what_serve_and_the_model_refuse_is_named_too(local: dict[str, Any], tmp_path: Path) -> None:
    local["applications"][1]["deployments"][0]["num_replicas"] = -1
    assert any("num_replicas" in p for p in check_file(written(tmp_path, local), facts_of=facts).problems)

    def missing(config: CPDConfig) -> ModelFacts:
        raise ModelUnavailable("the hub can't be reached")

    local = yaml.safe_load(LOCAL.read_text())
    problems = check_file(written(tmp_path, local), facts_of=missing).problems
    assert problems == tuple(f"application {name}: the hub can't be reached" for name in ("cpd-kv", "cpd"))
    assert check_file(written(tmp_path, local), with_model=False).problems == ()
    foreign = {"applications": [{"name": "mine", "import_path": "my.app:app"}]}
    assert "nothing here is for this project" in check_file(written(tmp_path, foreign)).problems[0]


@pytest.mark.parametrize("content", ["a: [", "applications: []", "just text", "- 1"])
def test_what_is_no_configuration_is_refused_in_one_line(content: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        check_file(written(tmp_path, content))
    assert "\n" not in refused.value.message


def test_config_check_and_deploy_refuse_the_same_file(cpd_ray: Command, local: dict[str, Any], tmp_path: Path) -> None:
    local["applications"][1]["args"]["roles"]["decode"]["replicas"] = 0
    file = written(tmp_path, local)
    checked = cpd_ray("config", "check", "--no-model", str(file))
    assert checked.returncode == 2
    assert "decode.replicas is 0" in checked.stderr
    deployed = cpd_ray("deploy", str(file), "--address", f"http://127.0.0.1:{closed_port()}")
    assert deployed.returncode == 2
    assert "decode.replicas is 0" in deployed.stderr


def test_deploy_says_when_no_cluster_is_there(cpd_ray: Command) -> None:
    done = cpd_ray("deploy", str(LOCAL), "--no-check", "--address", f"http://127.0.0.1:{closed_port()}")
    assert done.returncode == 1
    assert "ray start --head" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# -- a checkout's programs -----------------------------------------------------------------------------------------------


def test_benchmarks_are_found_by_name_and_run_with_their_options(cpd_ray: Command) -> None:
    known = benchmarks(REPOSITORY)
    assert known["sim"].module == "bench.sim"
    assert all(benchmark.about for benchmark in known.values())
    listed = cpd_ray("bench")
    assert listed.returncode == 0
    assert all(name in listed.stdout for name in known)
    assert cpd_ray("bench", "nothing").returncode == 2
    told = cpd_ray("bench", "sim", "--help")
    assert told.returncode == 0
    assert "--seeds" in told.stdout


def test_outside_of_a_checkout_there_is_nothing_to_run(tmp_path: Path) -> None:
    assert benchmarks(tmp_path) == {}
    with pytest.raises(Unavailable, match="checkout"):
        run_module("bench.demo", [], tmp_path)
