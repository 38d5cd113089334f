"""vLLM (docs/vllm.md): a connector by which a server keeps its prefix caches in a store.

`connector` is what vLLM loads, and the only module besides `stats` that imports it. The rest is plain: what the
scheduler decides (`scheduler`), what a worker does (`worker`), where tokens lie in vLLM's memory (`paged`).
"""
