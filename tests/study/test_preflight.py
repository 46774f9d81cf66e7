"""What the endpoint takes is found out for each API that the prompts use."""

from __future__ import annotations

from pathlib import Path

from pitfalls.running import Silent
from servetune.sim import Script, serve_process, uniform
from servetune.spec import Load, Target
from servetune.study import BenchSpec, bench
from servetune.traffic import Prompt


def test_prompts_of_both_apis_each_get_their_fields(tmp_path: Path) -> None:
    """`prompt` is a field of completions alone, so each API is asked by itself."""
    prompts = [
        Prompt(messages=({"role": "user", "content": "one two"},)),
        Prompt(text="three four"),
        Prompt(ids=(5, 6)),
    ]
    with serve_process(
        Script(replies=(uniform(5, ttft_ms=5, gap_ms=2, ids=True),)), keep_bodies=True
    ) as server:
        result = bench(BenchSpec(Target.parse(server.url), prompts, [Load(slots=1)], "t"), Silent())
        log = server.log()
    assert result.windows[0].requests.ok == 3
    measured = [(record.path, "messages" in record.body) for record in log.records[-3:]]
    chat, completions = ("/v1/chat/completions", True), ("/v1/completions", False)
    assert measured == [chat, completions, completions]
    probed = {record.path for record in log.records[:2]}
    assert probed == {chat[0], completions[0]}
