"""The connector inside of vLLM's engine: small blocks, chunks, preemption, damage, and other models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import vllmruns

pytestmark = pytest.mark.slow
STORE = {"disk": {"bytes": 1 << 28}, "learn": "off"}


def damage(path: Path, first_page: int) -> None:
    """Change a byte in every page of the segments from one on."""
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.stat().st_size >= 1 << 21:
            data = bytearray(file.read_bytes())
            for place in range(first_page * 4096 + 2000, len(data), 4096):
                data[place] ^= 0x55
            file.write_bytes(data)


def test_blocks_of_other_sizes_chunks_and_preemption(tmp_path: Path, prompt: list[int], plain: Any) -> None:
    """Blocks of 32 tokens in vLLM and of 48 in the store, chunks of 200 tokens, and memory that two requests outgrow:
    of four requests some are preempted, and go on from the store."""
    settings = {"path": str(tmp_path / "store"), "config": {**STORE, "block_tokens": 48}}
    small = {"block_size": 32, "max_num_batched_tokens": 200, "num_gpu_blocks_override": 40, "max_num_seqs": 4}
    others = [[prompt[i], *prompt] for i in (10, 20, 30)]  # another first token: nothing is shared
    rounds = [
        {"prompts": [prompt], "new": 60, "rest_s": 1},
        {"prompts": [prompt], "new": 60, "forget": True},
        {"prompts": [prompt, *others], "new": 60, "forget": True},
    ]
    done = vllmruns.run(tmp_path, rounds, settings, **small)
    first, again, crowd = done["rounds"]
    assert first[0]["text"] == again[0]["text"] == crowd[0]["text"] == plain[0][0]
    assert (first[0]["cached"], again[0]["cached"]) == (0, 576)  # 12 blocks of 48 are 18 of 32
    assert all(one["text"].startswith("8 has the colour blue. Item 69 has") for one in crowd)
    assert done["metrics"]["num_preemptions"] > 0
    assert done["metrics"].get("kvstore_failed_blocks", 0) == 0


def test_damaged_blocks_are_computed_and_stored_anew(tmp_path: Path, prompt: list[int], plain: Any) -> None:
    path = tmp_path / "store"
    settings = {"path": str(path), "config": STORE}
    ask = [{"prompts": [prompt], "new": 60, "rest_s": 1}]
    vllmruns.run(tmp_path, ask, settings)
    damage(path, first_page=400)
    hurt = vllmruns.run(tmp_path, ask, settings)
    assert hurt["rounds"][0][0]["text"] == plain[0][0]
    assert hurt["metrics"]["kvstore_failed_blocks"] >= 1
    assert hurt["metrics"]["kvstore_stored_tokens"] >= 64
    mended = vllmruns.run(tmp_path, ask, settings)
    assert mended["rounds"][0][0] == {**mended["rounds"][0][0], "text": plain[0][0], "cached": 512}
    assert mended["metrics"].get("kvstore_failed_blocks", 0) == 0
    other = vllmruns.run(tmp_path, ask, settings, hf_overrides={"rms_norm_eps": 1e-3})
    assert other["error"] == "IdentityMismatch", other
    assert "config: stored" in other["message"]
