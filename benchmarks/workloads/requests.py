"""Made traces of requests, each a path of block numbers from the root. Seeds are fixed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import accumulate, count

Trace = list[list[int]]


def sessions(requests: int, scans: bool = False, seed: int = 0) -> Trace:
    """Sessions of 1 to 8 turns behind one of 20 system prompts of 1 to 6 blocks, chosen by Zipf's law; a turn adds 1 to
    12 blocks and, as a prompt ends within a block, replaces the last one. 60 sessions are open at once. With `scans`
    every third request is a long prompt that never comes back."""
    chance = random.Random(seed)
    fresh = iter(range(1, 1 << 40))
    prompts = [[next(fresh) for _ in range(chance.randint(1, 6))] for _ in range(20)]
    weights = [1 / rank for rank in range(1, 21)]
    opened: list[tuple[list[int], int]] = []
    trace: Trace = []
    while len(trace) < requests:
        if scans and len(trace) % 3 == 2:
            trace.append([next(fresh) for _ in range(40)])
            continue
        if len(opened) < 60:
            opened.append((chance.choices(prompts, weights)[0], chance.choice((0, 0, 0, 1, 2, 4, 7))))
        path, left = opened.pop(chance.randrange(len(opened)))
        path = path + [next(fresh) for _ in range(chance.randint(1, 12))]
        trace.append(path)
        if left:
            opened.append((path[:-1], left - 1))
    return trace


def agents(requests: int, seed: int = 1) -> Trace:
    """Agents: a tool list of 5 to 15 blocks out of 12, then 5 to 40 steps of 1 to 4 blocks each, of which the last
    block is replaced by the next step. Eight run at a time, in bursts; one in five of the runs is forked at a step."""
    chance = random.Random(seed)
    fresh = count(1)
    tools = [[next(fresh) for _ in range(chance.randint(5, 15))] for _ in range(12)]
    running: list[tuple[list[int], int]] = []
    trace: Trace = []
    while len(trace) < requests:
        while len(running) < 8:
            running.append((chance.choices(tools, [1 / rank for rank in range(1, 13)])[0], chance.randint(5, 40)))
        path, left = running.pop(int(chance.random() ** 2 * len(running)))
        path = path + [next(fresh) for _ in range(chance.randint(1, 4))]
        trace.append(path)
        if left:
            running.insert(0, (path[:-1], left - 1))
            if chance.random() < 0.01:
                running.append((path[:-1], left - 1))
    return trace


def documents(requests: int, seed: int = 2) -> Trace:
    """Questions about documents: one system prompt of 2 blocks, one of 800 documents of 10 to 60 blocks by Zipf's law
    (exponent 0.8, and every 500 requests other ones come to be popular), a question of 1 or 2 blocks of its own."""
    chance = random.Random(seed)
    fresh = count(1)
    system = [next(fresh), next(fresh)]
    texts = [[next(fresh) for _ in range(chance.randint(10, 60))] for _ in range(800)]
    weights = list(accumulate(rank**-0.8 for rank in range(1, 801)))
    trace: Trace = []
    while len(trace) < requests:
        if len(trace) % 500 == 499:
            for _ in range(40):
                a, b = chance.randrange(60), chance.randrange(800)
                texts[a], texts[b] = texts[b], texts[a]
        text = chance.choices(texts, cum_weights=weights)[0]
        trace.append([*system, *text, *(next(fresh) for _ in range(chance.randint(1, 2)))])
    return trace


def batches(requests: int, seed: int = 3) -> Trace:
    """Jobs that go over the same texts again and again in one order, 120 texts of 15 to 30 blocks four times with
    another instruction behind, between chats that are used by recency."""
    chance = random.Random(seed)
    fresh = count(1 << 20)
    chats = iter(sessions(requests, seed=seed))
    trace: Trace = []

    def job() -> Iterator[list[int]]:
        while True:
            texts = [[next(fresh) for _ in range(chance.randint(15, 30))] for _ in range(120)]
            for _ in range(4):
                for text in texts:
                    yield [*text, next(fresh)]

    steps = job()
    while len(trace) < requests:
        trace.append(next(steps) if chance.random() < 0.4 else next(chats))
    return trace


def templates(requests: int, seed: int = 4) -> Trace:
    """A service: a third of the requests are one of 30 templates of 3 to 14 blocks with 1 to 4 blocks of their own, a
    third are chats, a fifth questions about documents, the rest long prompts of 10 to 60 blocks that come once; by the
    hour (every 700 requests) the shares change places."""
    chance = random.Random(seed)
    fresh = count(1 << 30)
    forms = [[next(fresh) for _ in range(chance.randint(3, 14))] for _ in range(30)]
    chats, texts = iter(sessions(requests, seed=seed)), iter(documents(requests, seed=seed))
    kinds: list[Callable[[], list[int]]] = [
        lambda: [
            *chance.choices(forms, [1 / rank for rank in range(1, 31)])[0],
            *(next(fresh) for _ in range(chance.randint(1, 4))),
        ],
        lambda: next(chats),
        lambda: [block + (1 << 25) for block in next(texts)],
        lambda: [next(fresh) for _ in range(chance.randint(10, 60))],
    ]
    shares = [0.33, 0.33, 0.2, 0.14]
    trace: Trace = []
    while len(trace) < requests:
        if len(trace) % 700 == 699:
            chance.shuffle(shares)
        trace.append(chance.choices(kinds, shares)[0]())
    return trace


MADE: dict[str, Callable[[int], Trace]] = {
    "sessions": sessions,
    "scan": lambda requests: sessions(requests, scans=True),
    "agents": agents,
    "documents": documents,
    "batches": batches,
    "templates": templates,
}
"""All by name; the argument is the number of requests. `templates` was looked at by nobody who chose a constant."""
