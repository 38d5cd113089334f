"""Valkey and Redis, one server or a cluster, over sockets of our own.

Values go straight between the socket and the caller's buffers: nothing is joined or copied, and Python's lock is free
meanwhile. `stream` moves bytes until a deadline, `replies` reads what a server says, `connection` is one of a `pool`,
`node` asks one server; `engine` is a `RemoteEngine` of one node, `cluster` of several.
"""
