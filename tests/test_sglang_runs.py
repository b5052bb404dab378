"""Whole runs on real SGLang servers, and servers that are not what the configuration says."""

import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from learner_steps import pair_config
from sglang_servers import KEY, sglang_python, spec_of, started
from test_end_to_end import launch, rows, start

from megatron_hacpo.config import yaml12
from megatron_hacpo.megatron.convert import hf_to_megatron
from megatron_hacpo.megatron.runtime import Layout
from megatron_hacpo.rollout.sglang import ports as ports_module
from megatron_hacpo.rollout.sglang.client import ServerClient
from megatron_hacpo.rollout.sglang.loop import LoopThread
from megatron_hacpo.rollout.sglang.ports import FIRST, LAST, Ports
from megatron_hacpo.rollout.sglang.server import ManagedServer

pytestmark = pytest.mark.sglang


def managed() -> list[str]:
    """Settings of a run that starts its servers itself."""
    return [
        "rollout.engine=sglang",
        f"rollout.sglang.python={sglang_python()}",
        "rollout.sglang.cache_tokens=8192",
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A in two pipeline stages of two tensor-parallel ranks, with a server of two; B from a checkpoint."""
    folder = tmp_path_factory.mktemp("runs")
    hf_to_megatron(Path("examples/tiny/B").absolute(), folder / "B", layout=Layout())
    layout = "agents.A.parallel={tensor: 2, pipeline: 2}"
    server = "agents.A.rollout={sglang: {tensor: 2}}"
    model = f"agents.B.model={folder / 'B'}"
    return launch(folder, "servers", *managed(), layout, server, model, "checkpoint.every=1")


@pytest.mark.parametrize("agent", ["A", "B"])
def test_servers_compute_what_the_trainer_computes_after_each_sync(agent: str, run: Path) -> None:
    steps = rows(run, agent)
    assert [row["step"] for row in steps] == [1, 2, 3]
    for row in steps:
        assert row["logprob/engine_trainer_max_abs_diff"] < 1e-4
        assert row["ratio/own/first_update_max_abs_dev"] == 0.0
        assert row["reward/count"] == 32
    assert len({row["grad_norm"] for row in steps}) == 3  # the weights did change


def test_a_resumed_run_replays_its_responses_and_gives_servers_the_weights(run: Path) -> None:
    """Servers draw without seeds: only from the disk can a step be what it was."""
    run_dir = Path(shutil.copytree(run, run.with_name("resumed")))
    settings = yaml12.parse((run / "config.yaml").read_text())["agents"]
    agents = [f"agents.{name}={json.dumps(agent)}" for name, agent in settings.items()]
    done = start(
        run.parent,
        "resumed",
        *managed(),
        *agents,
        "checkpoint.every=1",
        "run.steps=4",
        options=["--from-step", "2"],
    )
    assert done.returncode == 0, done.stderr
    assert "steps 3 to 3 are replayed" in done.stdout
    for agent in "AB":
        before, after = rows(run, agent), rows(run_dir, agent)
        assert [row["step"] for row in after] == [1, 2, 3, 4]
        for old, new in zip(before, after, strict=False):
            assert {k: v for k, v in new.items() if not k.startswith("time/")} == {
                k: v for k, v in old.items() if not k.startswith("time/")
            }
        assert after[3]["logprob/engine_trainer_max_abs_diff"] < 1e-4


def test_no_server_and_no_key_outlives_the_run(run: Path) -> None:
    for process in psutil.process_iter():
        try:
            assert str(run) not in " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
    assert (run / "logs" / "A.server0.log").is_file()
    assert not list((run / "logs").glob("*.key.yaml"))


@pytest.fixture(scope="module")
def server_of_a(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagedServer]:
    """Somebody's server: it serves agent A's model. Proxies of the environment must not be asked."""
    loop = LoopThread()
    log = tmp_path_factory.mktemp("external") / "server.log"
    server = started(spec_of(pair_config().agents["A"]), log, loop)
    yield server
    server.kill()


def external(*addresses: str, agent: str = "A") -> list[str]:
    listed = ", ".join(addresses)
    other = "B" if agent == "A" else "A"
    return [
        f"agents.{agent}.rollout={{engine: sglang, sglang: {{addresses: [{listed}]}}}}",
        f"agents.{other}=null",
    ]


def test_run_on_somebodys_server_behind_a_proxy_setting(
    server_of_a: ManagedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HACPO_SGLANG_KEY", KEY)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    done = launch(tmp_path, "external", *external(server_of_a.client.url), "run.steps=1")
    assert rows(done, "A")[0]["logprob/engine_trainer_max_abs_diff"] < 1e-4
    assert server_of_a.alive()


def error_line(tmp_path: Path, *overrides: str) -> str:
    """What a launch says that ends as a user's mistake."""
    done = start(tmp_path, "wrong", *overrides)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_wrong_address_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert f"rollout.sglang: {url}/server_info: Cannot connect" in error_line(tmp_path, *external(url))


def test_wrong_key_is_one_line(
    server_of_a: ManagedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HACPO_SGLANG_KEY", "wrong")
    line = error_line(tmp_path, *external(server_of_a.client.url))
    assert f"{server_of_a.client.url}/server_info: wrong API key; give the server's own" in line


def test_wrong_model_is_one_line(
    server_of_a: ManagedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HACPO_SGLANG_KEY", KEY)
    line = error_line(tmp_path, *external(server_of_a.client.url, agent="B"))
    assert re.search(r"serves .*/examples/tiny/A, the agent is .*examples/tiny/B; start it with that", line)


def test_too_short_a_context_is_one_line(
    server_of_a: ManagedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HACPO_SGLANG_KEY", KEY)
    short = "rollout.max_response_tokens=100"
    line = error_line(tmp_path, *external(server_of_a.client.url), short, "batch.microbatch_tokens=512")
    assert "has a context of 128 tokens, sequences need 140" in line


@contextmanager
def other_version(version: str) -> Iterator[str]:
    """The address of something that says it is an SGLang of this version."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f'{{"version": "{version}"}}'.encode())

        def log_message(self, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_server_of_another_version_is_one_line(tmp_path: Path) -> None:
    with other_version("0.4.9") as url:
        line = error_line(tmp_path, *external(url))
        assert f"{url} has SGLang 0.4.9; install one from 0.5.21 on and below 0.6.0 there" in line


def test_a_server_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    wrong = "rollout.sglang.arguments=[--no-such-option]"
    done = start(tmp_path, "wrong", *managed(), wrong, "agents.B=null")
    assert done.returncode == 1
    assert re.search(
        r"SGLang server http://127.0.0.1:\d+ ended while it was starting; its log is ", done.stderr
    )
    assert "no-such-option" in done.stderr


def test_without_any_server_left_the_run_ends_with_its_weights_saved(tmp_path: Path) -> None:
    settings = [*managed(), "agents.A=null", "run.steps=1000", "rollout.sglang.restarts=0"]
    metrics = tmp_path / "lost" / "B" / "metrics.jsonl"

    def strike() -> None:
        while not metrics.is_file() or not metrics.read_text():
            time.sleep(0.2)
        for process in psutil.process_iter(["cmdline"]):
            if f"{tmp_path}/lost/logs/B.server0.key.yaml" in " ".join(process.info["cmdline"] or []):
                process.kill()

    striker = threading.Thread(target=strike, daemon=True)
    striker.start()
    done = start(tmp_path, "lost", *settings)
    assert done.returncode == 1
    saved = f"all SGLang servers are lost; the weights of agent B are in {tmp_path}/lost/B/hf"
    assert saved in done.stderr
    assert (tmp_path / "lost/B/hf/model.safetensors").is_file()


def test_a_port_is_given_out_once() -> None:
    held = [Ports("127.0.0.1", 2) for _ in range(50)]
    assert len({ports.first for ports in held}) == 50
    assert all(FIRST <= ports.first < LAST for ports in held)
    for ports in held:
        ports.release()


def test_a_port_of_another_program_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports_module, "LAST", FIRST + 4)  # two places to choose from
    with socket.socket() as other:
        other.bind(("127.0.0.1", FIRST + 1))
        other.listen()
        only = Ports("127.0.0.1", 2)
        assert only.first == FIRST + 2
        with pytest.raises(RuntimeError, match="no 2 free ports between"):
            Ports("127.0.0.1", 2)
        only.release()


def test_client_names_the_server_that_does_not_answer() -> None:
    loop = LoopThread()
    client = ServerClient("http://127.0.0.1:1", None)
    assert loop.run(client.unhealthy(1.0)) is not None
    loop.close()
