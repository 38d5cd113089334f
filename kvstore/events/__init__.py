"""Which blocks a store has, told to routers as vLLM tells it: msgpack over ZMQ (docs/fleet.md).

`wire` needs nothing; `publish` needs the extra `kvstore-lm[events]`.
"""
