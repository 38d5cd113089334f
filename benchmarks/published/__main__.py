"""Measures the tables of papers; see `benchmarks.published`."""

from __future__ import annotations

from importlib import import_module

from benchmarks.common import Rows, arguments
from benchmarks.published import PAPERS
from benchmarks.published.paper import Paper


def main() -> None:
    parser = arguments("Tables of papers, measured here.")
    parser.add_argument("--only", nargs="+", choices=list(PAPERS), default=list(PAPERS), help="papers (all)")
    parser.add_argument("--windows", type=int, help="test windows of 1,024 tokens (each paper has its own number)")
    parser.add_argument("--parts", nargs="+", help="parts of a paper, where its file names some (all)")
    args = parser.parse_args()
    rows = Rows("published", args.json)
    for name in args.only:
        import_module(f"benchmarks.published.{name}").run(Paper(name, rows, args))
    rows.main_exit()


if __name__ == "__main__":
    main()
