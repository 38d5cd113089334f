"""What every test needs: one thread per test process, so that two workers do not fight over two cores; seeds; marks;
and an end of the run that names what was skipped."""

import gc
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import kills
import kinds
import pytest
import seeds
import skips
from hypothesis import HealthCheck, settings

# A limit of time, and the check that examples are made quickly, would fail on a loaded machine alone.
settings.register_profile(
    "kvstore",
    derandomize=seeds.SEED == 0,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvstore")


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is freed is freed by the last reference to it, and not by the collector of circles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Locks are asserted; modules are compiled once, not in every worker and every process that a test starts; and
    `make test-asan` must not pass because the ordinary build was imported."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    from kvstore.core.guard import Guard

    Guard.enforced = True
    if seeds.SEED:
        config.option.hypothesis_seed = seeds.SEED
    if os.environ.get("KVSTORE_EXPECT_SANITIZED") == "1":
        from kvstore.codecs import _native
        from kvstore.codecs.aqua import _aqua
        from kvstore.codecs.donor import _donor, _donor_groups, _donor_steps
        from kvstore.codecs.predictive import _lossy, _predict
        from kvstore.codecs.rans import _rans
        from kvstore.trie import _content, _trie

        for module in (_aqua, _donor, _donor_groups, _donor_steps, _lossy, _native, _predict, _rans, _content, _trie):
            path = Path(str(module.__file__))
            if b"__asan_init" not in path.read_bytes():
                raise RuntimeError(f"{path} is not built with AddressSanitizer")


def pytest_report_header() -> str:
    return f"seed of the run: KVSTORE_SEED={seeds.SEED}"


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks what depends on chance, on threads or on processes, for `make test-repeat`."""
    for kind in kinds.kinds_of(item):
        item.add_marker(kind)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest first: a build of a minute that begins last would leave the other workers idle."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """What is there now stays to the end: the garbage collector need not walk through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    seeds.fix(item.name)


# ---- what was skipped ------------------------------------------------------------------------------------------------


def _reasons(config: pytest.Config) -> list[str]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter is not None else []
    return [skips.reason_of(report.longrepr[2]) for report in skipped]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Under xdist the workers have no reporter; the process that starts them has all reports."""
    gc.unfreeze()
    if session.exitstatus == pytest.ExitCode.OK and skips.not_allowed(_reasons(session.config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.collectonly:
        return
    reasons = _reasons(config)
    terminalreporter.write_line(skips.summary(reasons))
    for line in kills.summary(report for found in terminalreporter.stats.values() for report in found):
        terminalreporter.write_line(line)
    for reason in skips.not_allowed(reasons):
        terminalreporter.write_line(f"ERROR: a test was skipped for a reason that is not allowed: {reason}", red=True)
    if seeds.SEED and terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"KVSTORE_SEED={seeds.SEED} makes this run again")


# Of the gate, which goes by what was timed.
TIMED = ("gate", "test_worth.py", "test_gate.py", "test_docs.py")


@pytest.fixture(autouse=True)
def _gets_do_not_depend_on_how_fast_this_machine_is(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate concludes nothing from how long passes of a model take here, so all that is stored is loaded."""
    if not {request.path.name, request.path.parent.name} & set(TIMED):
        monkeypatch.setattr("kvstore.gate.prefill.ENOUGH_S", math.inf)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the clock is ahead."""
    ahead, real = [0.0], time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead[0])
    return ahead
