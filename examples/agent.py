"""An agent with tools, in forty lines; each of its turns starts from the cache of the turn before.

    python examples/agent.py [--model DIR]

An agent calls the model again after every tool, each time with a longer transcript. The store is one line,
`kvstore.attach`. The same agent runs without it first, and the table compares.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from smollm2 import load
from stopwatch import Stopwatch

import kvstore
from kvstore import KVStore, ModelIdentity, RequestReport

# ---- the agent -------------------------------------------------------------------------------------------------------

PRICES = {"table": 89, "lamp": 24, "desk": 120, "chair": 45}
DAYS = {"Madrid": 4, "Berlin": 2, "Oslo": 5}
TOOLS: dict[str, Callable[[str], str]] = {
    "price": lambda item: f"{item} costs {PRICES.get(item.rstrip('s'), 'an unknown number of')} euros",
    "stock": lambda item: f"{3 * len(item)} {item} are in the shop",
    "delivery": lambda city: f"a parcel reaches {city} in {DAYS.get(city, 7)} days",
}
SYSTEM = """You work in a shop for furniture and answer its customers. Be short, friendly and exact. Never guess a price
or a number or a day: call a tool, wait for its result, then answer with what it says. Call one tool at a time, on a
line of its own. Prices are in euros and include taxes. Parcels leave the shop on the day after the order; they take as
many days as the tool says. What a customer sends back within thirty days is taken back, if it was not used.

Tools:
price(item) - what an item costs
stock(item) - how many of an item are in the shop
delivery(city) - how many days a parcel to a city takes

Question: How much is a lamp?
Action: price(lamp)
Result: lamp costs 24 euros
Answer: A lamp costs 24 euros.

Question: How many chairs do you have?
Action: stock(chairs)
Result: 18 chairs are in the shop
Answer: We have 18 chairs in the shop.

Question: When does a parcel reach Berlin?
Action: delivery(Berlin)
Result: a parcel reaches Berlin in 2 days
Answer: A parcel reaches Berlin in 2 days.
"""
QUESTIONS = (
    "How much is a table?",
    "How many chairs do you have?",
    "When does a parcel reach Madrid?",
    "How much is a desk?",
    "When does a parcel reach Oslo?",
    "How many desks do you have?",
)


class Agent:
    """Asks the model, runs the tool that it names and shows it the result, until it answers."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer, self.transcript = model, tokenizer, SYSTEM
        self.first_token_s: list[float] = []  # of each turn

    def ask(self, question: str, most_turns: int = 3) -> str:
        self.transcript += f"\nQuestion: {question}\n"
        line = ""
        for _ in range(most_turns):
            line = self.turn()
            self.transcript += line + "\n"
            call = re.fullmatch(r"Action: (\w+)\((.*)\)", line)
            if call is None:
                break
            tool = TOOLS.get(call[1], lambda _: "there is no such tool")
            self.transcript += f"Result: {tool(call[2])}\n"
        return line.removeprefix("Answer: ")

    def turn(self) -> str:
        ids = self.tokenizer(self.transcript, return_tensors="pt").input_ids
        watch = Stopwatch()
        ends = {"max_new_tokens": 20, "stop_strings": ["\n"], "tokenizer": self.tokenizer}
        out = self.model.generate(ids, do_sample=False, streamer=watch, **ends)
        self.first_token_s.append(watch.first_token)
        return str(self.tokenizer.decode(out[0, ids.shape[1] :])).partition("\n")[0]


# ---- without the store, and with it ----------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", metavar="DIR", help="a checkpoint; default: the installed SmolLM2")
    parser.add_argument("--quick", action="store_true", help="two questions instead of six")
    given = parser.parse_args(arguments)
    questions = QUESTIONS[:2] if given.quick else QUESTIONS
    model, tokenizer = load(given.model)

    plain = Agent(model, tokenizer)
    before = [plain.ask(question) for question in questions]

    reports: list[RequestReport] = []
    agent = Agent(model, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        with KVStore(folder, ModelIdentity.from_transformers(model, tokenizer)) as store:
            kvstore.attach(model, tokenizer, store, on_request=reports.append)  # this line is all
            after = [agent.ask(question) for question in questions]
            kvstore.detach(model)

    for question, answer in zip(questions, after, strict=True):
        print(f"Question: {question}\n  Answer: {answer}")
    print("\nturn  prompt tokens  computed with the store  first token with the store  without")
    for turn, (report, seconds) in enumerate(zip(reports, agent.first_token_s, strict=True)):
        without = f"{plain.first_token_s[turn]:5.2f} s" if turn < len(plain.first_token_s) else "-"
        print(f"{turn + 1:4}  {report.prompt_tokens:13}  {report.computed_tokens:23}  {seconds:24.2f} s  {without}")
    prompt, computed = (sum(getattr(each, name) for each in reports) for name in ("prompt_tokens", "computed_tokens"))
    same = "the same" if before == after else "others, for bfloat16 rounds by how a prompt is split"
    print(f"\n{computed} of {prompt} prompt tokens were computed, {prompt - computed} came from the store.")
    print(f"Time to the first token, all turns: {sum(agent.first_token_s):.1f} s with the store, ", end="")
    print(f"{sum(plain.first_token_s):.1f} s without. The answers are {same}.")


if __name__ == "__main__":
    main()
