"""Runs vLLM in a process of its own, with vLLM's Python: `vllm_job.py JOB RESULT`, both files of JSON.

A job has `llm`, arguments of vllm.LLM; `connector`, settings of the connector, or none; and `rounds`: prompts that are
sent at once, as token ids, with a number of new tokens. The result has what came of each, and vLLM's counters.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def transfer(settings: dict[str, Any]) -> dict[str, Any]:
    """The `--kv-transfer-config` of a server that keeps its caches in a store."""
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore.integrations.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }


def run(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    given = {"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 8, "enforce_eager": True, **job["llm"]}
    if job.get("connector"):
        given["kv_transfer_config"] = transfer(job["connector"])
    begin = time.perf_counter()
    llm = LLM(disable_log_stats=False, **given)
    result: dict[str, Any] = {"rounds": [], "start_s": time.perf_counter() - begin}
    for one in job["rounds"]:
        if one.get("forget"):  # vLLM's own prefix cache
            assert llm.reset_prefix_cache()
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in one["prompts"]],
            SamplingParams(temperature=0, max_tokens=one["new"]),
            use_tqdm=False,
        )
        result["rounds"].append(
            [
                {"text": x.outputs[0].text, "cached": x.num_cached_tokens, "ttft_s": x.metrics.first_token_latency}
                for x in outputs
            ]
        )
        time.sleep(one.get("rest_s", 0))
    metrics = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    result["metrics"] = {k.removeprefix("vllm:"): v for k, v in metrics.items() if "kvstore" in k or "preempt" in k}
    llm.llm_engine.engine_core.shutdown()
    return result


if __name__ == "__main__":
    faulthandler.dump_traceback_later(280, exit=True)
    try:
        done = run(json.loads(Path(sys.argv[1]).read_text()))
    except Exception as error:
        done = {"error": type(error).__name__, "message": str(error)}
    Path(sys.argv[2]).write_text(json.dumps(done))
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads may hold up the end
