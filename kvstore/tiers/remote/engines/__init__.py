"""What speaks to servers: `memory`, `folder`, `resp` (Valkey, Redis), `s3`; `faulty` makes any of them fail.

Sockets are opened here and nowhere else. Each engine meets `RemoteEngine` (`kvstore/tiers/remote/engine.py`).
"""
