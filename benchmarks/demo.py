"""`make demo`: conversations through the store, SIGKILL, a new process, the conversations go on.

Three processes. The conductor (this command) starts `live`, which talks with the model through the store,
flushes, says so, and is killed while it puts more; then `resumed`, which opens the same store, resumes every
session, compares each cache bit for bit with what `live` had in memory, and goes on generating. The last line
on stdout is one JSON object; the exit status is 0 only if caches and texts are equal.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import MIB, arguments, drop_page_cache, scratch

IN_FLIGHT = b"in flight"  # namespace of the puts that the kill interrupts
SESSIONS, TURNS, NEW_TOKENS = 6, 2, 16  # turns that the model answers; what came before them is given
HISTORY, QUESTION = 7000, 300  # characters of a conversation before those turns, of its last message


def main() -> None:
    parser = arguments("Conversations survive a kill: bit-identical caches, equal text, faster first token.")
    parser.add_argument("--phase", choices=("live", "resumed"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase == "live":
        live(args)
    elif args.phase == "resumed":
        resumed(args)
    else:
        sys.exit(conduct(args))


# -- the conductor
# ---------------------------------------------------------------------------------------------


def conduct(args: argparse.Namespace) -> int:
    """Runs both processes, shows what they report, prints the result. Returns the exit status."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with scratch("demo") as folder, Progress(*columns, console=console) as progress:
        steps = progress.add_task("loading the model", total=None)
        process = _start(args, folder, "live")
        for event in _events(process):
            if event["event"] == "acknowledged":
                time.sleep(0.05)  # into the middle of the next put
                os.kill(process.pid, signal.SIGKILL)
                break
            progress.update(steps, description=event["text"], total=event["of"], completed=event["done"])
        if process.wait() != -signal.SIGKILL:
            console.print(f"the first process ended by itself with status {process.returncode}", style="red")
            return 1
        console.print("killed the process (SIGKILL) after its flush, in the middle of another put")
        steps = progress.add_task("a new process loads the model", total=None)
        process = _start(args, folder, "resumed")
        report: dict[str, Any] = {}
        for event in _events(process):
            if event["event"] == "report":
                report = event
            else:
                progress.update(steps, description=event["text"], total=event["of"], completed=event["done"])
        if process.wait() != 0 or not report:
            console.print(f"the second process failed with status {process.returncode}", style="red")
            return 1
    _show(report)
    result = report["result"]
    if args.json is not None:
        args.json.write_text(json.dumps(result) + "\n")
    print(json.dumps(result), flush=True)
    return 0 if result["bit_identical"] and result["continued_text_equal"] else 1


def _start(args: argparse.Namespace, folder: Path, phase: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.demo", "--phase", phase, "--folder", str(folder)]
    command += ["--quick"] * args.quick
    for name in ("model", "text"):
        value = getattr(args, name)
        command += [f"--{name}", str(value)] if value is not None else []
    # Idle threads sleep instead of spinning: on a busy machine spinning made single tokens ten times slower.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def _events(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Sessions resumed by a new process after SIGKILL; times are those to the first token")
    for name in ("session", "tokens", "cache", "text", "recompute", "resume", "speedup"):
        table.add_column(name, justify="left" if name == "session" else "right")
    for row in report["rows"]:
        table.add_row(
            row["session"],
            f"{row['tokens']:,}",
            "identical" if row["identical"] else "DIFFERENT",
            "equal" if row["equal"] else "DIFFERENT",
            f"{row['recompute_s'] * 1000:,.0f} ms",
            f"{row['resume_s'] * 1000:,.0f} ms",
            f"{row['recompute_s'] / row['resume_s']:.1f}x",
        )
    console = Console()
    console.print(table)
    result = report["result"]
    console.print(
        f"{result['tokens']:,} tokens of {result['sessions']} sessions; shared prefixes stored once: "
        f"{result['dedup_ratio']:.2f}x; on disk {result['stored_bytes'] / MIB:.1f} MiB of "
        f"{result['raw_bytes'] / MIB:.1f} MiB raw: {result['ratio']:.2f}x; "
        f"page cache {'dropped' if report['dropped'] else 'not dropped (not permitted)'}; "
        f"opening the store took {report['open_s'] * 1000:.0f} ms"
    )
    if report["made"]:
        console.print(f"The model is in {report['made']}, for a program of your own: README.md has one to begin with.")
    console.print("All of this in one line of JSON:")


# -- the process that is killed
# --------------------------------------------------------------------------------


def live(args: argparse.Namespace) -> None:
    """Talks in several sessions, flushes, records what a correct resume must give, and puts until it is
    killed."""
    from benchmarks.conversations import load_model
    from kvstore import KVStore, ModelIdentity, StoreConfig, TierConfig
    from kvstore.config import GIB
    from kvstore.integrations.transformers import cache_layers, generate

    sessions, turns = (2, 2) if args.quick else (SESSIONS, TURNS)
    model, tokenizer = load_model(args.model)
    config = StoreConfig(disk=TierConfig(8 * GIB, "entropy"))
    store = KVStore(args.folder / "store", ModelIdentity.from_transformers(model, tokenizer), config)
    expected: dict[str, Any] = {}
    last: Any = None
    for number, (history, messages) in enumerate(_dialogues(args, sessions, turns + 1)):
        name = f"conversation-{number}"
        tokens: list[int] = []
        for turn, message in enumerate(messages[:turns]):
            _say(f"{name}, turn {turn + 1} of {turns}", number * turns + turn, sessions * turns)
            prompt = tokens + _turn(tokenizer, message, tokens, history)
            output = generate(
                model,
                _row(prompt),
                store=store,
                session=name,
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                return_dict_in_generate=True,
            )
            tokens, last = output.sequences[0].tolist(), output.past_key_values
        held = last.get_seq_length()
        ids = tokens + _turn(tokenizer, messages[turns], tokens, history)
        digests = _digests(cache_layers(last))
        # The same split as the resumed process will have: the held tokens from the cache, the rest computed.
        text = _continue(model, ids, last)
        expected[name] = {"tokens": tokens, "held": held, "digests": digests, "ids": ids, "continued": text}
    store.flush()
    with open(args.folder / "expected.json", "w") as file:
        json.dump(expected, file)
        file.flush()
        os.fsync(file.fileno())
    _say("flushed", sessions * turns, sessions * turns)
    print(json.dumps({"event": "acknowledged"}), flush=True)
    first = next(iter(expected.values()))
    tokens = first["tokens"][: first["held"]]
    layers = tuple((k[:, :, : len(tokens)], v[:, :, : len(tokens)]) for k, v in cache_layers(last))
    for number in itertools.count():  # until the kill
        store.put(_in_flight(number, layers[0][0].shape[-2]), layers, namespace=IN_FLIGHT)


def _dialogues(args: argparse.Namespace, sessions: int, turns: int) -> Iterator[tuple[list[Any], list[str]]]:
    """Long conversations as (messages so far, the last `turns` messages of the user)."""
    from benchmarks.conversations import held_out_conversations

    found = 0
    for messages in held_out_conversations(args.text, min_turns=turns + 1, max_characters=2000):
        history, rest = messages[: -2 * turns], messages[-2 * turns :]
        asked = [message["content"] for message in rest if message["role"] == "user"]
        if found == sessions:
            return
        if HISTORY // 2 < sum(len(m["content"]) for m in history) < HISTORY and len(asked[-1]) < QUESTION:
            found += 1
            yield history, asked


def _turn(tokenizer: Any, message: str, before: list[int], history: list[Any]) -> list[int]:
    """Token ids of one user message, from the end of the tokens `before` it to where the answer starts;
    without any before, of the system prompt and the conversation so far too. Each turn is encoded on its own,
    so that what is already in the cache is never encoded anew, and differently."""
    from benchmarks.conversations import SYSTEM_PROMPT

    if not before:
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, *history]
        head = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    else:  # an answer that was cut at its length has no end mark yet
        head = "\n" if before[-1] == tokenizer.eos_token_id else "<|im_end|>\n"
    ids = tokenizer(f"{head}<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n").input_ids
    return [int(token) for token in ids]


def _row(ids: list[int]) -> Any:
    import torch

    return torch.tensor([ids])


def _continue(model: Any, ids: list[int], cache: Any) -> list[int]:
    """The new tokens that greedy decoding adds to `ids` from a copy of `cache`."""
    import torch

    from kvstore.integrations.transformers import cache_layers
    from kvstore.integrations.transformers.cache import cache_from_layers

    row = _row(ids)
    output = model.generate(
        row,
        past_key_values=cache_from_layers(cache_layers(cache)),
        attention_mask=torch.ones_like(row),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
    )
    return [int(token) for token in output[0, len(ids) :]]


def _digests(layers: Any) -> list[list[str]]:
    """SHA-256 of the bytes of K and of V of every layer."""
    import torch

    return [
        [hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for t in pair]
        for pair in layers
    ]


def _in_flight(number: int, length: int) -> Any:
    import numpy as np

    return np.random.default_rng(number).integers(0, 1 << 15, length, dtype=np.uint32)


def _say(text: str, done: int, of: int) -> None:
    print(json.dumps({"event": "progress", "text": text, "done": done, "of": of}), flush=True)


# -- the process that resumes
# ----------------------------------------------------------------------------------


def resumed(args: argparse.Namespace) -> None:
    """Resumes every session from disk, compares, times, and goes on."""
    from benchmarks.conversations import CHECKPOINT, load_model
    from kvstore import KVStore, ModelIdentity
    from kvstore.integrations.transformers import generate

    path = args.folder / "store"
    expected: dict[str, Any] = json.loads((args.folder / "expected.json").read_text())
    model, tokenizer = load_model(args.model)
    identity = ModelIdentity.from_transformers(model, tokenizer)
    rows: list[dict[str, Any]] = []
    opened = []
    for number, (name, want) in enumerate(expected.items()):
        _say(f"resuming {name}", number, 2 * len(expected))
        dropped = drop_page_cache(path)
        _first_token(model, list(range(64)), None)  # brings back the libraries' own pages, none of the store's
        start = time.perf_counter()
        with KVStore(path, identity) as store:  # anew each time: nothing is left in memory from the last one
            opened.append(time.perf_counter() - start)
            start = time.perf_counter()
            hit = store.session(name).resume()
            found = 0 if hit is None else hit.tokens
            token = _first_token(model, want["ids"], hit)
            resume_s = time.perf_counter() - start
            start = time.perf_counter()
            _first_token(model, want["ids"], None)
            recompute_s = time.perf_counter() - start
            identical = found == want["held"] and store.session(name).tokens.tolist() == want["tokens"]
            identical = identical and hit is not None and _digests(hit.layers) == want["digests"]
        row = {"session": name, "tokens": want["held"], "identical": identical}
        rows.append(row | {"resume_s": resume_s, "recompute_s": recompute_s, "first": token})
    with KVStore(path, identity) as store:
        _delete_in_flight(store, min(row["tokens"] for row in rows))
        store.flush()
        stored = store.stats()
        for number, (row, want) in enumerate(zip(rows, expected.values(), strict=True)):
            _say(f"{row['session']} goes on", len(expected) + number, 2 * len(expected))
            ids = want["ids"]
            text = generate(
                model,
                _row(ids),
                store=store,
                session=row["session"],
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
            )[0, len(ids) :].tolist()
            equal = tokenizer.decode(text) == tokenizer.decode(want["continued"])
            row["equal"] = equal and text == want["continued"] and text[0] == row["first"]
    result = _result(rows, stored, identity.layout.bytes_per_token)
    made = str(CHECKPOINT) if args.model is None else ""
    report = {"event": "report", "rows": rows, "result": result, "dropped": dropped, "made": made}
    print(json.dumps(report | {"open_s": statistics.median(opened)}), flush=True)


def _first_token(model: Any, ids: list[int], hit: Any) -> int:
    """Greedy next token of `ids`, from the hit's cache where there is one."""
    import torch

    with torch.inference_mode():
        cache, known = (None, 0) if hit is None else (hit.cache(), hit.tokens)
        output = model(_row(ids[known:]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())


def _delete_in_flight(store: Any, length: int) -> None:
    """Removes what the killed process was putting, whole or in part, so that the figures are those of the
    sessions."""
    for number in itertools.count():
        tokens = _in_flight(number, length)
        held = store.contains(tokens, namespace=IN_FLIGHT)
        if not held:
            return
        store.delete(tokens[:held], namespace=IN_FLIGHT)


def _result(rows: list[dict[str, Any]], stored: dict[str, Any], bytes_per_token: int) -> dict[str, Any]:
    tokens = sum(row["tokens"] for row in rows)
    recompute = statistics.median(row["recompute_s"] for row in rows)
    resume = statistics.median(row["resume_s"] for row in rows)
    raw, kept = stored["disk"]["raw_bytes"], stored["disk"]["bytes"]
    return {
        "bit_identical": all(row["identical"] for row in rows),
        "continued_text_equal": all(row["equal"] for row in rows),
        "sessions": len(rows),
        "tokens": tokens,
        "ttft_recompute_s": round(recompute, 4),
        "ttft_resume_s": round(resume, 4),
        "speedup": round(recompute / resume, 2),
        "raw_bytes": raw,
        "stored_bytes": kept,
        "ratio": round(raw / kept, 4),
        "dedup_ratio": round(tokens * bytes_per_token / raw, 4),
    }


if __name__ == "__main__":
    main()
