"""The learner of a store: one thread that fits a profile to the stored blocks and recodes cold ones, in idle time."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from queue import Empty, SimpleQueue

from kvstore.calibration.predictive.cholesky import SINGULAR
from kvstore.codecs.donor.codec import DonorCodec
from kvstore.codecs.donor.model import SECTION as DIFFERENCES
from kvstore.codecs.predictive.codec import PredictiveCodec
from kvstore.codecs.predictive.linear_model import rotated_half
from kvstore.codecs.profile import Profile
from kvstore.config import StoreConfig
from kvstore.core import learning_status as status
from kvstore.core.heap import give_back_freed
from kvstore.core.identity import ModelIdentity
from kvstore.core.layout import KVLayout
from kvstore.core.learning_status import LearningStatus
from kvstore.core.rope import frequencies
from kvstore.core.workers import Task
from kvstore.errors import ConfigError, ProfileError
from kvstore.learning import differences
from kvstore.learning.members import MemberReader
from kvstore.learning.pace import Pace, Stopped, lower_priority
from kvstore.learning.recode import ColdRecoder
from kvstore.learning.seen import BlocksGone
from kvstore.learning.trial import MOST_BYTES, MOST_TOKENS, Progress, Sections, Trial, choose, run
from kvstore.metrics import Metric
from kvstore.read.stored_block import BlockReader
from kvstore.tiers.codecs import LateCodecs
from kvstore.tiers.disk.budget import BESIDE_BYTES, LEAST_SEGMENTS
from kvstore.tiers.profiles import Profiles
from kvstore.version import versions

LEAST_GAIN = 0.05
"""Held-out payloads must fall by this share, and by as much as the profile takes of the disk's budget."""
_TICK_S = 2.0
_BEGIN_S = 30.0  # after opening: a program that ends before could not finish, and would read the blocks in vain
_AGAIN_S, _REST = 60.0, 20  # until the next look at what was hot, or found no room; or so many times what it took
_MOST_WAIT_S = 10.0  # `close` waits so long for the step under way; most take some tens of milliseconds
_LEARNS = (status.WAITING, status.NOT_WORTH, status.OFF)
_RECODES = (status.RECODING, status.ADOPTED)


def silent(_what: str, _done: int, _total: int) -> None:
    """A `Progress` that tells nobody."""


class Learner:
    """Learns from one store. Thread-safe: what it does, it does on one thread of its own, which alone changes it.

    Args:
        identity: of the store.
        config: its settings.
        reader: gives blocks.
        codecs: of new records; they adopt what was learned.
        first: what is known when the store is opened, see `status_at_open`.
        next_record: gives the number of the next new record.
        idle_s: see `Pace`.
    """

    def __init__(
        self,
        identity: ModelIdentity,
        config: StoreConfig,
        reader: BlockReader,
        codecs: LateCodecs,
        first: LearningStatus,
        next_record: Callable[[], int],
        idle_s: Callable[[], float],
    ) -> None:
        self.status = first
        self._identity, self._config, self._reader, self._codecs = identity, config, reader, codecs
        self._next_record = next_record
        self._pace = Pace(idle_s)
        self._recoder = ColdRecoder(reader, self._pace.step)
        self._begins_at = time.monotonic() + _BEGIN_S
        self._recodes_at = -math.inf
        self._wanted_tokens = MOST_TOKENS  # that the disk must hold before the next trial
        self._members = MemberReader(reader)
        self._wanted_record = 0  # below it differences are not looked at again
        self._tasks: SimpleQueue[Task[None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if config.learn == "auto" and first.state != status.UNSUITED:
            self._start()

    def now(self, progress: Progress = silent) -> LearningStatus:
        """Learn and recode at once, without waiting for idle time; return when that is done.

        If the wait is interrupted, the work goes on.

        Raises:
            ConfigError: the store's settings or its caches leave nothing to learn.
        """
        if self.status.state == status.UNSUITED:
            raise ConfigError(f"learn: {self.status.why}")
        self._pace.waits = False
        try:
            self._start()
            task = Task(self._work, progress, True)
            self._tasks.put(task)
            task.result()
        finally:
            self._pace.waits = True
        return self.status

    def close(self) -> None:
        """End the thread, at the latest after the step under way. Idempotent."""
        self._pace.stop()
        self._tasks.put(None)
        if self._thread is not None:
            self._thread.join(_MOST_WAIT_S)

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None:
            # A daemon: Python waits for the other threads before it lets stores end themselves.
            self._thread = threading.Thread(target=self._run, name="kvstore-learn", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        lower_priority()
        while True:
            try:
                task = self._tasks.get(timeout=_TICK_S)
                if task is None:
                    return
                task()
            except Empty:
                if self._config.learn == "auto" and time.monotonic() >= self._begins_at:
                    self._work(silent, at_once=False)

    def _work(self, progress: Progress, at_once: bool) -> None:
        """One turn. What goes wrong is counted and told by the status."""
        residency, before = self._reader.residency, self.status
        try:
            if self.status.state in _LEARNS or (at_once and self.status.state == status.FAILED):
                self._learn(progress, at_once)
            if self.status.state in _RECODES:
                self._learn_differences(progress)
                self._recode(progress, at_once)
        except Stopped:
            pass
        except BlocksGone:
            self.status = self.status.now(status.WAITING, "blocks left while they were looked at")
        except SINGULAR:
            self._wanted_tokens = 2 * residency.disk.tokens if residency.disk is not None else 0
            self.status = before.now(status.NOT_WORTH, "the blocks are too much alike to fit a predictor to them")
        except (ProfileError, ValueError) as error:
            self.status = self.status.now(status.UNSUITED, f"caches of this model are not predicted: {error}")
        except Exception as error:
            residency.metrics.add(Metric.LEARNING_FAILED, because=error)
            self.status = self.status.now(status.FAILED, repr(error))
        finally:
            if self.status is not before:
                give_back_freed()

    def _learn(self, progress: Progress, at_once: bool) -> None:
        if not at_once and self._reader.disk.tokens < self._wanted_tokens:
            return
        self._pace.step()
        before = self.status
        self.status = before.now(status.LEARNING)
        sample = choose(self._reader, self._next_record(), self._pace.step)
        if sample is None:
            self.status = before.now(status.WAITING, "there are too few blocks that stand alone")
            self._wanted_tokens = 2 * self._reader.disk.tokens
            return
        trial = run(self._reader, self._identity, sample, self._codecs.disk, self._pace.step, progress)
        if 1 - trial.after / trial.before >= LEAST_GAIN:
            trial = replace(trial, sections=self._with_differences(trial.sections, progress))
        self._judge(trial)

    def _with_differences(self, sections: Sections, progress: Progress) -> Sections:
        """The sections of a profile that is to be, with differences where the store has members to learn them from."""
        sample = self._sample_of_members()
        if sample is None:
            return sections
        profile = Profile.new(self._identity, sections)
        now = DonorCodec.from_profile(PredictiveCodec.from_profile(profile), profile)
        trial = differences.learn(self._members, sample, now, MOST_BYTES, self._pace.step, progress)
        nbytes = sum(array.nbytes for array in trial.arrays.values())
        pays = trial.pays(nbytes, self._reader.disk.budget)
        return {**sections, DIFFERENCES: trial.arrays} if pays else sections

    def _learn_differences(self, progress: Progress) -> None:
        """Adopts what was learned before with differences, once there are members to learn them from."""
        described, now = self._reader.profiles.described, self._codecs.donor
        if described is None or now is None or DIFFERENCES in described.sections:
            return
        sample = self._sample_of_members()
        known = self._reader.profiles.current if sample is not None else None
        if sample is None or known is None:
            return
        trial = differences.learn(self._members, sample, now, MOST_BYTES, self._pace.step, progress)
        sections = {name: known.section(name) for name in known.sections} | {DIFFERENCES: trial.arrays}
        profile = Profile.new(self._identity, sections, known.report, versions("numpy", "torch"))
        if trial.pays(profile.nbytes, self._reader.disk.budget) and self._adopt(profile):
            self.status = replace(self.status, profile_bytes=profile.nbytes)
            gain = f"members fall by {1 - trial.after / trial.before:.1%}"
            self._reader.residency.metrics.add(Metric.LEARNED_PROFILES, because=gain)

    def _sample_of_members(self) -> differences.MemberSample | None:
        below = self._next_record()
        if below < self._wanted_record or self._codecs.donor is None:
            return None
        self._wanted_record = 2 * below
        return differences.choose(self._members, below, self._pace.step)

    def _adopt(self, profile: Profile) -> bool:
        """Whether the disk keeps the profile; it is what new records are coded with then."""
        self._pace.step()
        disk = self._reader.disk
        with disk.paused():  # nobody takes the room that is made
            return disk.keep_budget(beside=profile.nbytes) and self._codecs.adopt(profile)

    def _judge(self, trial: Trial) -> None:
        """Adopts what was fitted, if it is worth that."""
        found = LearningStatus(
            status.RECODING,
            blocks=trial.blocks,
            held_out=trial.held_out,
            before=trial.raw / trial.before,
            after=trial.raw / trial.after,
            adopted_at=int(time.time()),
        )
        profile = Profile.new(self._identity, trial.sections, found.as_report(), versions("numpy", "torch"))
        disk, gain = self._reader.disk, 1 - trial.after / trial.before
        fits = profile.nbytes + LEAST_SEGMENTS * self._config.segment_bytes + BESIDE_BYTES <= disk.budget
        if gain < LEAST_GAIN + profile.nbytes / disk.budget or not fits:
            self._wanted_tokens = 2 * disk.tokens
            why = f"payloads fall by {gain:.1%}, and the profile has {profile.nbytes} bytes"
            self.status = replace(found, adopted_at=0).now(status.NOT_WORTH, why)
            return
        if not self._adopt(profile):
            self.status = replace(found, adopted_at=0).now(status.FAILED, "the disk did not keep the profile")
            self._reader.residency.metrics.add(Metric.LEARNING_FAILED, because=self.status.why)
            return
        self.status = replace(found, profile_bytes=profile.nbytes)
        self._reader.residency.metrics.add(Metric.LEARNED_PROFILES, because=f"payloads fall by {gain:.1%}")

    def _recode(self, progress: Progress, at_once: bool) -> None:
        if not at_once and time.monotonic() < self._recodes_at:
            return
        self.status = self.status.now(status.RECODING)
        begin, below = time.monotonic(), self._next_record()
        done = self._recoder.run(self._codecs.disk, below, lambda at, stop: progress("recoding blocks", at, stop))
        end = time.monotonic()
        self._recodes_at = end + max(_AGAIN_S, _REST * (end - begin))
        if done:
            self._recoder.at = 1
            why = f"{self._recoder.hot} records are in memory, and are recoded later" if self._recoder.hot else ""
            self.status = self.status.now(status.ADOPTED, why)
            self._recodes_at = self._recodes_at if self._recoder.hot else math.inf
        else:
            self.status = self.status.now(status.RECODING, "the disk has no room for further copies now")


def status_at_open(config: StoreConfig, identity: ModelIdentity, profiles: Profiles) -> LearningStatus:
    """Return what is known when a store is opened: whether it may learn, and what it has learned."""
    layout, why = identity.layout, ""
    if config.disk.codec != "auto" or config.profile is not None:
        why = "the settings name the disk's codec, or a profile"
    elif layout.states or layout.dtype != "bfloat16" or identity.codec_family != "exact":
        why = "only exact caches of bfloat16 without states are predicted"
    else:
        parts = [group.layout for group in layout.groups] if layout.is_grouped else [layout]
        why = next(filter(None, map(_why_not_rotated, parts)), "")
    if why:
        return LearningStatus(status.UNSUITED, why)
    described = profiles.described
    if described is not None:
        known = LearningStatus.of_report(described.report, described.nbytes, profiles.adopted_at)
        return known or LearningStatus(status.UNSUITED, "the store has a profile that was made by calibration")
    return LearningStatus(status.WAITING if config.learn == "auto" else status.OFF)


def _why_not_rotated(layout: KVLayout) -> str:
    try:
        rotated_half(layout, "learn")
        frequencies(layout.rope, layout.layers[0].key_dim)
    except (ProfileError, ValueError) as error:
        return f"caches of this model are not predicted: {error}"
    return ""
