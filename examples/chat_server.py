"""Many conversations and little memory: each is resumed from disk, after it left memory and after a restart.

    python examples/chat_server.py [--model DIR] [--users 12]

The server gives the store 32 MiB of memory. The caches of its users take five times as much, so most of them are on
disk when the next message comes. In the third round another process answers; it knows the folder and nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from smollm2 import load, passages
from stopwatch import Stopwatch

import kvstore
from kvstore import KVStore, ModelIdentity, StoreConfig, TierConfig

MIB, GIB = 1 << 20, 1 << 30
# gate="off": what is stored is loaded, also where this machine computes it as fast, so that the figures show the store.
CONFIG = StoreConfig(host=TierConfig(32 * MIB, "splitzip"), disk=TierConfig(4 * GIB), gate="off")
QUESTIONS = ("What is this page about?", "Say it in other words.", "Now as one short sentence.")


class ChatServer:
    """Answers messages of many users. What was said it keeps as token ids, as a server keeps its conversations; what
    the model made of them is the store's to keep."""

    def __init__(self, folder: Path, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.store = KVStore(folder / "cache", ModelIdentity.from_transformers(model, tokenizer), CONFIG)
        self.attachment = kvstore.attach(model, tokenizer, self.store)
        self.file = folder / "conversations.json"
        self.said: dict[str, list[int]] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def say(self, user: str, message: str) -> float:
        """Answer a message. Returns the seconds to the first token."""
        ids = self.asked(user, message)
        watch = Stopwatch()
        with self.attachment.using(session=user):
            answer = self.model.generate(ids, do_sample=False, max_new_tokens=6, streamer=watch)
        self.said[user] = answer[0].tolist()
        return watch.first_token

    def asked(self, user: str, message: str) -> torch.Tensor:
        """The conversation with one more message, `[1, tokens]`."""
        said = self.said.get(user, [])
        turn = f"{'<|im_end|>' if said else ''}<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"
        return torch.tensor([said + self.tokenizer(turn).input_ids])

    def close(self) -> None:
        self.file.write_text(json.dumps(self.said))
        self.attachment.detach()
        self.store.close()  # from here on everything is on disk


def talk(server: ChatServer, texts: Sequence[str], turn: int) -> None:
    """Every user says one thing. Prints what was reused, and the time to the first token."""
    reports, seconds = [], []
    for number, text in enumerate(texts):
        page = f"Read this page.\n{text}\n" if turn == 0 else ""
        seconds.append(server.say(f"user-{number}", page + QUESTIONS[turn]))
        reports.append(server.store.last_request)
    tokens, tiers = 0, Counter[str]()
    for report in reports:
        assert report is not None
        tokens += report.prompt_tokens
        tiers.update(report.tiers)
    disk, memory = tiers["disk"], tiers["host"] + tiers["queue"] + tiers["device"]
    host = server.store.stats()["host"]["bytes"] / MIB
    print(
        f"round {turn + 1}: {tokens:6} prompt tokens, {memory:6} from memory, {disk:6} from disk,"
        f" {tokens - memory - disk:6} computed; first token {statistics.median(seconds):.2f} s;"
        f" memory of the store {host:.0f} MiB",
        flush=True,
    )


def compare(server: ChatServer, texts: Sequence[str]) -> None:
    """The same conversations without the store: what every message would cost."""
    server.attachment.detach()
    seconds = []
    for number in range(0, len(texts), 4):
        watch = Stopwatch()
        server.model.generate(server.asked(f"user-{number}", "Go on."), max_new_tokens=1, streamer=watch)
        seconds.append(watch.first_token)
    print(f"without the store all of these tokens are computed; first token {statistics.median(seconds):.2f} s")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", metavar="DIR", help="a checkpoint; default: the installed SmolLM2")
    parser.add_argument("--users", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="two users, short pages")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of the second process
    given = parser.parse_args(arguments)
    model, tokenizer = load(given.model)
    texts = passages(2, 300) if given.quick else passages(given.users, 2000)
    if given.folder is not None:
        server = ChatServer(given.folder, model, tokenizer)
        talk(server, texts, 2)
        server.close()
        compare(server, texts)
        return
    with tempfile.TemporaryDirectory() as folder:
        server = ChatServer(Path(folder), model, tokenizer)
        raw = server.store.identity.layout.bytes_per_token / MIB
        for turn in (0, 1):
            talk(server, texts, turn)
        tokens = sum(map(len, server.said.values()))
        server.close()
        print(f"the caches of {len(texts)} users are {tokens * raw:.0f} MiB raw; the server ends, another one begins")
        again = [sys.executable, __file__, *(sys.argv[1:] if arguments is None else arguments), "--folder", folder]
        subprocess.run(again, check=True)


if __name__ == "__main__":
    main()
