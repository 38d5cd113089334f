"""A store behind the models of other libraries: `make frameworks` installs them beside and runs this.

For each library: the same prompts without and with `kvstore.attach`, the one line. Prints the share of the shared
tokens that the second prompt reused, and whether the texts are the same; ends with 1 if a share is below 0.9 or a text
differs. Shared is what the two prompts begin with as the model gets them, with the library's own words and template. A
library that is not installed is named and left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import kvstore
from kvstore import KVStore, ModelIdentity

SHARED = "You are a careful assistant. Answer in one sentence, and say so if you do not know. " * 12
QUESTIONS = ("What is a cache?", "Why do models keep keys and values of what they read?")
NEW_TOKENS = 12
Ask = Callable[[str], str]


def of_transformers(model: Any, tokenizer: Any, folder: str) -> Ask:
    from transformers import pipeline

    ask = pipeline("text-generation", model=model, tokenizer=tokenizer)
    return lambda text: str(ask(text, max_new_tokens=NEW_TOKENS, do_sample=False, return_full_text=False))


def of_smolagents(model: Any, tokenizer: Any, folder: str) -> Ask:
    from smolagents import TransformersModel

    made = TransformersModel(model_id=folder, max_new_tokens=NEW_TOKENS, device_map="cpu", do_sample=False)
    made.model = model
    return lambda text: str(made([{"role": "user", "content": [{"type": "text", "text": text}]}]).content)


def of_langchain(model: Any, tokenizer: Any, folder: str) -> Ask:
    from langchain_huggingface import HuggingFacePipeline
    from transformers import pipeline

    ask = pipeline("text-generation", model=model, tokenizer=tokenizer, max_new_tokens=NEW_TOKENS, do_sample=False)
    return HuggingFacePipeline(pipeline=ask).invoke


def of_llama_index(model: Any, tokenizer: Any, folder: str) -> Ask:
    from llama_index.llms.huggingface import HuggingFaceLLM

    made = HuggingFaceLLM(
        model=model, tokenizer=tokenizer, max_new_tokens=NEW_TOKENS, generate_kwargs={"do_sample": False}
    )
    return lambda text: str(made.complete(text))


LIBRARIES = {
    "transformers": of_transformers,
    "smolagents": of_smolagents,
    "langchain-huggingface": of_langchain,
    "llama-index-llms-huggingface": of_llama_index,
}


def _remember(given: list[list[int]], _model: Any, args: Any, kwargs: Any) -> None:
    """Keep the tokens of prompts; a pass over one token is one of the answer."""
    ids = args[0] if args else kwargs["input_ids"]
    if ids.shape[1] > 1:
        given.append(ids[0].tolist())


def tried(make: Callable[[Any, Any, str], Ask], model: Any, tokenizer: Any, folder: str) -> dict[str, Any]:
    """What a library's two answers were, without and with a store."""
    prompts = [SHARED + question for question in QUESTIONS]
    ask = make(model, tokenizer, folder)
    given: list[list[int]] = []
    hook = model.register_forward_pre_hook(partial(_remember, given), with_kwargs=True)
    before = [ask(prompt) for prompt in prompts]
    hook.remove()
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*given, strict=False)))
    with tempfile.TemporaryDirectory() as place:
        with KVStore(place, ModelIdentity.from_transformers(model, tokenizer)) as store:
            kvstore.attach(model, tokenizer, store)
            after = [ask(prompt) for prompt in prompts]
            report = store.last_request
            kvstore.detach(model)
    assert report is not None
    return {
        "prompt_tokens": report.prompt_tokens,
        "shared_tokens": shared,
        "reused_tokens": report.reused_tokens,
        "share": round(report.reused_tokens / shared, 3),
        "same_text": before == after,
        "why": report.why,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="Folder of a checkpoint with its tokenizer.")
    parser.add_argument("--json", type=Path, help="Also write all rows to this file.")
    args = parser.parse_args()
    folder = args.model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    good, rows = True, []
    for name, make in LIBRARIES.items():
        try:
            row = {"version": version(name), **tried(make, model, tokenizer, folder)}
        except ModuleNotFoundError as error:  # of the library, or of what it needs
            row = {"left_out": str(error)}
        good &= "left_out" in row or (row["share"] >= 0.9 and row["same_text"])
        rows.append({"library": name, **row})
        print(json.dumps(rows[-1]), flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
