"""A pipeline of transformers with a store behind its model: one line, the same text, the shared prompt reused."""

from __future__ import annotations

from pathlib import Path

import calibrated
from transformers import pipeline

import kvstore
from kvstore import KVStore, ModelIdentity


def test_a_pipeline_reuses_what_two_prompts_share(tmp_path: Path) -> None:
    model, tokenizer = calibrated.model(eos_token_id=None, pad_token_id=0).float(), calibrated.tokenizer()
    base = calibrated.text(300)
    prompts = [base + "who is it?", base + "what is it, and why?"]
    ask = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": 6, "do_sample": False}
    want = [ask(prompt, **options) for prompt in prompts]
    with KVStore(tmp_path, ModelIdentity.from_transformers(model, tokenizer)) as store:
        kvstore.attach(model, tokenizer, store)
        got = [ask(prompt, **options) for prompt in prompts]
        report = store.last_request
        assert report is not None
        assert report.served, report.why
        shared = len(tokenizer(base).input_ids)
        assert report.reused_tokens >= 0.9 * shared
        ask(prompts[0], session="alice", **options)
        assert store.session("alice").exists
        kvstore.detach(model)
    assert got == want
