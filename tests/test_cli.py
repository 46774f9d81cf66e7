"""The command line: exit codes, words for each mistake, and what goes to which output."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from raw_server import EVENTS, serving_raw, whole
from servetune.cli import run
from servetune.sim import Reply, Script, ServerProcess, Stream, error_reply, serve_process, uniform

GOOD = uniform(4, 10, 5)
CLOSED = "http://127.0.0.1:9"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serve_process(Script((GOOD,))) as running:
        yield running


@pytest.fixture
def traffic(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n} words of a prompt"}) + "\n" for n in range(4)))
    return path


def bench(endpoint: str, traffic: Path, *more: str) -> int:
    return run(["bench", "--endpoint", endpoint, "--traffic", str(traffic), "--quiet", *more])


def refused(capsys: Capture, traffic: Path, *more: str, endpoint: str = CLOSED) -> str:
    """The words with which a command line is refused before anything starts."""
    assert bench(endpoint, traffic, *more) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("servetune: ")
    return shown.err


def not_usable(capsys: Capture, endpoint: str, traffic: Path, *more: str) -> str:
    """The words with which an endpoint is given up."""
    assert bench(endpoint, traffic, *more) == 3
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Traceback" not in shown.err
    return shown.err.removeprefix("servetune: ")


def test_a_bench_and_its_report(
    server: ServerProcess, traffic: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "out"
    code = bench(server.url, traffic, "--out", str(out), "--json", str(tmp_path / "result.json"))
    shown = capsys.readouterr()
    assert code in (0, 1)  # 1 only if this machine is so busy that a gate says so
    stored = json.loads((out / "bench.json").read_bytes())
    assert json.loads((tmp_path / "result.json").read_bytes()) == stored
    assert code == 1 - stored["valid"]
    assert stored["windows"][0]["requests"]["ok"] == 4
    assert "serial" in shown.out
    assert run(["report", str(out)]) == code
    again = capsys.readouterr().out
    assert "serial" in again
    assert bench(server.url, traffic, "--out", str(out)) == 2
    assert "holds a bench already" in capsys.readouterr().err


def test_json_to_standard_output_is_all_of_it(server: ServerProcess, traffic: Path, capsys: Capture) -> None:
    for form in (["--json", "-"], ["--json=-"]):
        code = bench(server.url, traffic, *form)
        shown = capsys.readouterr()
        result = json.loads(shown.out)
        assert code == 1 - result["valid"]
        assert result["schema"] == "servetune-bench/1"
        assert "serial" in shown.err


def test_failures_give_exit_code_1(traffic: Path, capsys: Capture) -> None:
    replies = (GOOD, GOOD, GOOD, GOOD, GOOD, error_reply(503, "busy"), GOOD, GOOD)
    with serve_process(Script(replies)) as running:
        assert bench(running.url, traffic, "--warm-up", "0") == 1
    assert "503" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--load", "concurency=4"], "did you mean concurrency?"),
        (["--load", "rate=5,arrivals=poison"], "did you mean poisson?"),
        (["--load", "4"], "write serial, concurrency=N"),
        (["--load", "concurrency=2.5"], "whole number"),
        (["--load", "concurrency=-3"], "above zero"),
        (["--load", "rate=inf"], "above zero"),
        (["--load", "serial", "--load", "concurrency=1"], "once"),
        (["--load", "rate=2", "--load", "rate=2"], "once"),
        (["--load", "rate=2", "--load", "rate=2.0000001"], "once"),
        (["--load", "rate=2,rate=3"], "once"),
        (["--load", "concurrency=1000000"], "nofile"),
        (["--requests", "-5"], "--requests"),
        (["--requests", "0"], "--requests must be a number above zero"),
        (["--requests", "2.5"], "--requests"),
        (["--seconds", "-1"], "--seconds"),
        (["--seconds", "inf"], "--seconds"),
        (["--warm-up", "-1"], "--warm-up"),
        (["--workers", "0"], "--workers"),
        (["--timeout", "5 parsecs"], "'5 parsecs' is not a duration"),
        (["--stall-timeout", "0s"], "above zero"),
        (["--output-tokens", "5", "--max-output-tokens", "5"], "either"),
        (["--output-tokens", "-5"], "output tokens must be at least 1"),
        (["--temperature", "warm"], "--temperature"),
        (["--api", "chats"], "chat"),
        (["--extra-body", "[1]"], "--extra-body is not a JSON object"),
        (["--extra-body", "{"], "--extra-body is not a JSON object"),
        (["--api-key", "sécret"], "cannot stand in an HTTP header"),
        (["--proxy", "https://127.0.0.1:1"], "proxy"),
        (["--ca-file", "/no/such.pem"], "no such file"),
        (["--json", "/no/such/folder/x.json"], "no such folder"),
        (["--json", "/"], "--json /"),
        (["--request", "5"], "--requests"),  # the nearest one is named
        (["--concurrency", "5"], "--concurrency"),
        (["--output-token", "5"], "--output-tokens"),
        (["--max-output-tokens", "99999999999999999999"], "absurd"),
        (["--temperature", "nan"], "--temperature"),
        (["--load", "rate=5", "--arrival-seed", "-1"], "--arrival-seed"),
        (["--workers", "1000000"], "--workers must be at most"),
        (["--tokenizer", "/no/such/tokenizer.json"], "no such file"),
        (["--tokenizer", __file__], "--tokenizer"),
        (["stray"], "stray"),
    ],
)
def test_wrong_usage_is_told_in_words(more: list[str], words: str, traffic: Path, capsys: Capture) -> None:
    said = refused(capsys, traffic, *more)
    assert words in said
    assert "sécret" not in said


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("127.0.0.1:8000", "not a URL"),
        ("ftp://127.0.0.1", "write http://HOST:PORT"),
        ("http://", "not a URL"),
        ("http://127.0.0.1:0", "port 0"),
        ("http://127.0.0.1:99999", "endpoint"),
        ("http://me:pass1234@127.0.0.1:8000", "user and password"),
        ("http://127.0.0.1:8000/v1?key=5", "query"),
        ("", "not a URL"),
    ],
)
def test_wrong_endpoints(endpoint: str, words: str, traffic: Path, capsys: Capture) -> None:
    said = refused(capsys, traffic, endpoint=endpoint)
    assert words in said
    assert "pass1234" not in said


@pytest.mark.parametrize("host", ["日本.invalid", "a" * 300, "\udce4"])
def test_hosts_that_no_name_can_have_are_not_usable(host: str, traffic: Path, capsys: Capture) -> None:
    assert bench(f"http://{host}:1", traffic) in (2, 3)
    assert capsys.readouterr().err.startswith("servetune: ")


def test_a_full_disk_is_told_in_a_line_after_the_figures(traffic: Path, capsys: Capture) -> None:
    with serve_process(Script((GOOD,))) as running:
        assert bench(running.url, traffic, "--json", "/dev/full") == 1
    said = capsys.readouterr()
    assert "success rate" in said.out
    assert said.err.splitlines()[-1].startswith("servetune: ")
    assert "No space left" in said.err


def test_a_schedule_that_no_window_can_hold_is_refused(traffic: Path, capsys: Capture) -> None:
    with serve_process(Script((GOOD,))) as running:
        assert bench(running.url, traffic, "--load", "rate=1000000", "--seconds", "3600") == 2
    assert "at most 10,000,000" in capsys.readouterr().err


def test_required_options_are_named(traffic: Path, capsys: Capture) -> None:
    assert run(["bench", "--traffic", str(traffic)]) == 2
    assert "--endpoint" in capsys.readouterr().err
    assert run(["bench", "--endpoint", CLOSED]) == 2
    assert "--traffic" in capsys.readouterr().err
    assert run(["bnech"]) == 2
    assert "bench" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["no prompts"]),
        (b"\n \n", ["no prompts"]),
        (b'{"prompt":"a"}\n{broken\n{"prompt":"b"}\n', ["1 of 3 rows", "line 2:"]),
        (b'{"prompt":""}\n\n{"text":"b"}\n', ["2 of 2 rows", "line 1:", "line 3:", "'messages' or 'prompt'"]),
        (b'{"prompt":5}\n[]\n"x"\nnull\n5\n', ["5 of 5 rows", "line 5:"]),
        (b'{"prompt":"a","max_tokens":0}\n', ["line 1:", "max_tokens"]),
        (b'{"prompt":"a","max_tokens":"9"}\n', ["line 1:", "max_tokens"]),
        (b'{"messages":[]}\n{"messages":["x"]}\n', ["line 1:", "line 2:", "role"]),
        (b'{"prompt":[1,-2]}\n', ["line 1:", "token ids"]),
        (b'{"prompt":"a","messages":[]}\n', ["line 1:"]),
        (b'{"prompt":5}\n' * 9, ["9 of 9 rows", "line 5:", "and 4 more"]),
        (b"\x00\x9f\xff\xfe" * 9, ["prompts.jsonl"]),
        (b'{"a":' * 100_000, ["line 1:"]),
        (b'{"prompt":[100000000000000000000000]}\n', ["line 1:", "token ids"]),
        (b'{"prompt":"a","max_tokens":100000000000000000000000}\n', ["line 1:", "max_tokens"]),
    ],
)
def test_wrong_prompt_files_name_their_lines(
    content: bytes, words: list[str], traffic: Path, capsys: Capture
) -> None:
    traffic.write_bytes(content)
    said = refused(capsys, traffic)
    for word in words:
        assert word in said
    assert len(said) < 2_000


def test_prompt_files_that_cannot_be_read(tmp_path: Path, capsys: Capture) -> None:
    assert "no-such.jsonl" in refused(capsys, tmp_path / "no-such.jsonl")
    assert "directory" in refused(capsys, tmp_path).lower()


def test_an_out_folder_that_cannot_be(traffic: Path, capsys: Capture) -> None:
    assert "--out" in refused(capsys, traffic, "--out", str(traffic))
    assert "--out" in refused(capsys, traffic, "--out", "/proc/nothing")


def test_reports_of_nothing(tmp_path: Path, capsys: Capture) -> None:
    assert run(["report", str(tmp_path)]) == 2
    assert "is not a bench folder" in capsys.readouterr().err
    (tmp_path / "bench.json").write_text("{}")
    assert run(["report", str(tmp_path)]) == 2
    assert "is not a bench folder" in capsys.readouterr().err
    assert run(["report"]) == 2


def test_an_endpoint_that_is_not_there(traffic: Path, capsys: Capture) -> None:
    said = not_usable(capsys, CLOSED, traffic)
    assert CLOSED in said
    assert "refused" in said
    said = not_usable(capsys, "http://no-such-host.invalid:8000", traffic)
    assert "no-such-host.invalid" in said


def test_an_endpoint_that_is_something_else(traffic: Path, capsys: Capture) -> None:
    page = whole(b"<html><body>It works!</body></html>", kind="text/html")
    with serving_raw(lambda _: (page,), lambda _: b"<html>") as web:
        assert "--model" in not_usable(capsys, web.url, traffic)
        assert "without a single token" in not_usable(capsys, web.url, traffic, "--model", "m")
    missing = whole(b"nothing here", "404 Not Found", "text/plain")
    with serving_raw(lambda _: (missing,)) as web:
        assert "404 nothing here" in not_usable(capsys, web.url, traffic, "--model", "m")
    with serving_raw(lambda _: (b"SSH-2.0-OpenSSH_9.6\r\n",)) as web:
        assert not_usable(capsys, web.url, traffic)
    with serving_raw(lambda _: (whole(b"[" * 100_000, kind="application/json"),)) as web:
        assert "not an OpenAI answer" in not_usable(capsys, web.url, traffic)
    with serving_raw(lambda _: (whole(EVENTS),), lambda _: b"[" * 100_000) as web:
        assert "--model" in not_usable(capsys, web.url, traffic)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (error_reply(404, "The model `x` does not exist."), "404 The model `x` does not exist."),
        (error_reply(400, "prompt too long"), "400 prompt too long"),
        (Stream(), "without a single token"),
        (Reply(status=200), "without a single token"),
        (uniform(4, 1, 1, error_at=0), "scripted"),
    ],
)
def test_an_endpoint_that_refuses_the_probe(
    reply: Stream | Reply, words: str, traffic: Path, capsys: Capture
) -> None:
    with serve_process(Script((reply,))) as running:
        said = not_usable(capsys, running.url, traffic)
    assert words in said
    assert running.url in said


def test_a_wrong_key(traffic: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_process(Script((GOOD,)), expected_key="sk-right-key") as running:
        assert "refused the key (401)" in not_usable(capsys, running.url, traffic)
        said = not_usable(capsys, running.url, traffic, "--api-key", "sk-wrong-key")
        assert "refused the key" in said
        assert "sk-wrong-key" not in said
        monkeypatch.setenv("SERVETUNE_API_KEY", "sk-right-key")
        assert bench(running.url, traffic) in (0, 1)
    shown = capsys.readouterr()
    assert "sk-right-key" not in shown.out + shown.err


def test_help_and_version(capsys: Capture) -> None:
    assert run(["--help"]) == 0
    assert "bench" in capsys.readouterr().out
    assert run(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    for option in ("--endpoint", "--traffic", "--load", "--output-tokens", "--api-key", "--stall-timeout"):
        assert option in text
    assert run(["report", "--help"]) == 0
    capsys.readouterr()
    assert run(["--version"]) == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\n", capsys.readouterr().out)
    assert run([]) == 0


def test_the_key_of_the_environment_is_not_in_the_help(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVETUNE_API_KEY", "sk-of-the-environment")
    run(["bench", "--help"])
    assert "sk-of-the-environment" not in capsys.readouterr().out
    run(["bench", "--unknown"])
    shown = capsys.readouterr()
    assert "sk-of-the-environment" not in shown.out + shown.err
