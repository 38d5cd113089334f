"""How soon a vLLM server gives its first token: computed, from a store in a new process, from its own prefix cache.

`python -m benchmarks.vllm --python build/vllm/bin/python [--lengths 605 2000] [--prompts 5]`, with the environment that
`make test-vllm` makes. Three processes, one after the other: vLLM without a store computes each prompt, then answers it
again from its own prefix cache; vLLM with a store fills it and ends; a new one answers from the store. Each first
answers another prompt, for its warm-up is nobody's first token. Prompts are pieces of held-out conversations that share
nothing. The time is vLLM's own `first_token_latency`, in process, one request at a time.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.common import Rows, arguments, drop_page_cache, scratch
from benchmarks.conversations import CHECKPOINT, load_tokenizer, measured_text

ROOT = Path(__file__).parents[1]
NEW_TOKENS = 16


def main() -> None:
    parser = arguments("Time to the first token of vLLM: computed, from a store, from its own prefix cache.")
    parser.add_argument("--python", type=Path, default=ROOT / "build/vllm/bin/python", help="that has vLLM")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="N", help="tokens of the prompts (605 2000)")
    parser.add_argument("--prompts", type=int, default=5, metavar="N", help="prompts of each length (5)")
    parser.add_argument("--dir", type=Path, help="where the store is made (default: build/scratch)")
    args = parser.parse_args()
    if not args.python.exists():
        raise SystemExit(f"--python: {args.python} is missing; `make test-vllm` makes it")
    rows, ok = Rows("vllm", args.json), True
    lengths = args.lengths or ([605] if args.quick else [605, 2000])
    tokenizer = load_tokenizer()
    needed = (args.prompts + 1) * max(lengths)
    ids = tokenizer(measured_text(args.text, 8 * needed), verbose=False).input_ids
    for length in lengths:
        pieces = [ids[i * length : (i + 1) * length] for i in range(args.prompts + 1)]
        if len(pieces[-1]) < length:
            raise SystemExit(f"--text: {len(ids)} tokens are fewer than {needed}")
        with scratch("vllm", args.dir) as folder:
            ok &= measure(rows, args, folder, length, pieces)
    rows.main_exit(ok)


def measure(rows: Rows, args: Any, folder: Path, length: int, pieces: list[list[int]]) -> bool:
    """Adds the rows of one length; whether all texts are the same."""
    path = folder / "store"
    connector = {"path": str(path), "config": {"learn": "off"}}
    warm, each = pieces[:1], [[piece] for piece in pieces[1:]]
    plain = run(args, folder, None, [warm, *each, *each])
    filled = run(args, folder, connector, [warm, *each])
    drop_page_cache(path)
    again = run(args, folder, connector, [[piece[::-1] for piece in warm], *each])
    count = len(each)
    cases = {
        "computed": plain["rounds"][1 : 1 + count],
        "computed-and-stored": filled["rounds"][1:],
        "own-prefix-cache": plain["rounds"][1 + count :],
        "store": again["rounds"][1:],
    }
    computed = statistics.median(one[0]["ttft_s"] for one in cases["computed"])
    texts = [one[0]["text"] for one in cases["computed"]]
    same = True
    for name, rounds in cases.items():
        median = statistics.median(one[0]["ttft_s"] for one in rounds)
        peer = None if name == "computed" else "computed"
        rows.add(f"{name}/{length}", "ttft_s", median, "s", peer, computed / median if peer else None)
        rows.add(f"{name}/{length}", "cached_tokens", min(one[0]["cached"] for one in rounds), "tokens")
        equal = sum(one[0]["text"] == text for one, text in zip(rounds, texts, strict=True))
        rows.add(f"{name}/{length}", "equal_texts", equal / count, "share")
        same &= equal == count
    return same


def run(args: Any, folder: Path, connector: dict[str, Any] | None, rounds: list[list[list[int]]]) -> Any:
    """The result of `tools/vllm_job.py`."""
    job, result, link = folder / "job.json", folder / "result.json", folder / "path"
    link.mkdir(exist_ok=True)
    if not (link / "kvstore").exists():
        (link / "kvstore").symlink_to(ROOT / "kvstore")
    longest = max(len(prompt) for prompts in rounds for prompt in prompts)
    llm = {
        "model": str((args.model or CHECKPOINT).resolve()),
        "max_model_len": longest + 64,
        "max_num_batched_tokens": longest + 64,
    }
    told = [{"prompts": prompts, "new": NEW_TOKENS} for prompts in rounds]
    job.write_text(json.dumps({"llm": llm, "connector": connector, "rounds": told}))
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    settings |= {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": str(link)}
    command = [str(args.python), str(ROOT / "tools/vllm_job.py"), str(job), str(result)]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    told_back = (
        json.loads(result.read_text()) if result.exists() else {"error": done.stdout[-2000:] + done.stderr[-2000:]}
    )
    if "error" in told_back:
        raise SystemExit(f"vLLM failed: {told_back}")
    result.unlink()
    return told_back


if __name__ == "__main__":
    main()
