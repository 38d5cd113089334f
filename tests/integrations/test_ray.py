"""Warm-up on a Ray cluster of this machine: `make test-ray` runs this with Ray installed beside."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import calibrated
import pytest
from typer.testing import CliRunner
from warmupcases import CONFIG, facts, holds_what_it_would_compute, product

from kvstore import KVStore, KVStoreError, ModelIdentity, stored_identity
from kvstore.calibration.calibrate import load_model
from kvstore.cli import app
from kvstore.integrations.transformers import warmup

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # what Ray warns of is Ray's


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def test_ray_fills_the_same_store(tmp_path: Path, llama: Any) -> None:
    from kvstore.integrations.ray import RayWorkers

    prompts, identity = product(3, 3, 3), ModelIdentity.from_transformers(llama)
    with KVStore(tmp_path / "a", identity, CONFIG) as apart, KVStore(tmp_path / "b", identity, CONFIG) as whole:
        report = warmup(apart, llama, prompts, workers=RayWorkers(tasks=4), namespace=b"a", pin=True)
        plain = warmup(whole, llama, prompts, namespace=b"a", pin=True)
        assert plain.computed_tokens <= report.computed_tokens < 1.2 * plain.computed_tokens
        assert facts(apart) == facts(whole)
        assert all(holds_what_it_would_compute(apart, llama, prompt, b"a") for prompt in prompts)
        assert apart.check(deep=True).ok
    assert not (tmp_path / "a.parts").exists()


def test_there_are_as_many_parts_as_the_cluster_has_room_for() -> None:
    from kvstore.integrations.ray import RayWorkers

    assert RayWorkers().count() == 2
    assert RayWorkers(cpus=2).count() == 1
    assert ray.is_initialized(), "a connection that was there stays"


def test_a_task_that_fails_is_told(tmp_path: Path, llama: Any) -> None:
    from kvstore.integrations.ray import RayWorkers

    with KVStore(tmp_path / "a", ModelIdentity.from_transformers(llama), CONFIG) as store:
        with pytest.raises(KVStoreError, match="a task of the warm-up failed"):
            warmup(store, llama, product(2, 2), workers=RayWorkers(tasks=2, load=_no_model))
        with pytest.raises(ValueError, match="dtype: expected"):
            warmup(store, llama, product(2, 2), workers=RayWorkers(tasks=2, load=partial(load_model, tmp_path, "int8")))
        assert len(store) == 0
    assert not (tmp_path / "a.parts").exists()


def _no_model() -> Any:
    raise OSError("the disk of the model is not here")


def test_the_command(tmp_path: Path) -> None:
    model = calibrated.checkpoint(tmp_path / "model")
    (tmp_path / "prompts").write_text("be kind and patient\nbe kind and brief\nwho are you\nwhat is this\n")
    given = ["warmup", str(tmp_path / "store"), "--model", str(model), "--prompts", str(tmp_path / "prompts")]
    done = CliRunner().invoke(app, [*given, "--workers", "ray", "--tasks", "2", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["prompts"] == 4
    again = json.loads(CliRunner().invoke(app, [*given, "--json"]).stdout)
    assert (again["computed_tokens"], again["stored_tokens"]) == (0, report["tokens"])
    with KVStore(tmp_path / "store", stored_identity(tmp_path / "store"), read_only=True) as store:
        assert len(store.inventory().sequences) == 4
