"""SGLang 0.5.23: a store behind HiCache, as its storage backend "dynamic" (docs/sglang.md)."""
