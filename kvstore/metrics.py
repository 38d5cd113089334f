"""Counters of one store, and the closed list of their names.

Every name is a member of `Metric` and says what it counts; ARCHITECTURE.md shows the same list, and a test compares the
two. Counters only grow. A fallback, a drop or a damaged entry that is not counted here is a bug. What means a loss or a
fallback is also logged; `NOTICES` has the words.
"""

from __future__ import annotations

import threading
from collections import Counter
from enum import StrEnum
from logging import ERROR, INFO, WARNING

from kvstore.log import EventLog, Notice
from kvstore.spans import Spans
from kvstore.timing import Timings


class Metric(StrEnum):
    """The name of a counter, as `KVStore.stats()["counters"]` shows it. `meaning` says what it counts.

    Example:
        >>> Metric.GET_HITS.value, Metric.GET_HITS.meaning
        ('get_hits', 'gets that returned a prefix')
    """

    meaning: str

    def __new__(cls, name: str, meaning: str) -> Metric:
        member = str.__new__(cls, name)
        member._value_ = name
        member.meaning = meaning
        return member

    __hash__ = str.__hash__  # that of enumerations is a call into Python, at each look-up

    # ---- get
    GET_HITS = "get_hits", "gets that returned a prefix"
    GET_MISSES = "get_misses", "gets that returned nothing"
    GET_TOKENS = "get_tokens", "tokens that gets asked for"
    GET_HIT_TOKENS_DEVICE = "get_hit_tokens_device", "tokens returned from the device tier"
    GET_HIT_TOKENS_QUEUE = "get_hit_tokens_queue", "tokens returned from blocks that were not written yet"
    GET_HIT_TOKENS_HOST = "get_hit_tokens_host", "tokens returned from the host tier"
    GET_HIT_TOKENS_DISK = "get_hit_tokens_disk", "tokens returned from the disk tier"
    GET_HIT_TOKENS_REMOTE = "get_hit_tokens_remote", "tokens returned from the remote tier"
    GET_HIT_TOKENS_DONORS = "get_hit_tokens_donors", "tokens that other sequences stood in for (approximate gets)"
    GET_HIT_TOKENS_OTHER = "get_hit_tokens_other", "tokens returned from a tier that has no counter of its own"
    GET_WITHHELD_TOKENS = (
        "get_withheld_tokens",
        "tokens that are stored and were left to be computed, for loading them takes longer",
    )
    GET_SAVED_S = "get_saved_s", "seconds that gets took less than computing the same, as far as that is known"
    GET_APPROXIMATE = "get_approximate", "gets answered with an approximate cache"
    APPROXIMATE_UNKNOWN = "approximate_unknown", "approximate gets answered exactly: the profile lacks the estimates"
    APPROXIMATE_REFUSED = "approximate_refused", "approximate caches that turned out worse than was asked for; not used"
    APPROXIMATE_FAILED = "approximate_failed", "approximate gets whose donors left meanwhile; answered exactly"
    ARCHIVE_HITS = "archive_hits", "archives whose cache was computed again, is what was archived, and was put"
    ARCHIVE_MISSES = (
        "archive_misses",
        "archives that gave no cache: damaged, another model's, or computed otherwise here",
    )
    PROMOTED_RECORDS = "promoted_records", "records from disk that the host tier took in"

    # ---- why a get ended where it did: one count for each get that returned less than it was asked for
    SHORT_NEVER_PUT = "short_never_put", "gets that ended where nothing is stored and nothing is known to have been"
    SHORT_EVICTED = "short_evicted", "gets that ended at a block that was evicted"
    SHORT_EXPIRED = "short_expired", "gets that ended at a block whose time to live was over"
    SHORT_DELETED = "short_deleted", "gets that ended at a block that was deleted"
    SHORT_DAMAGED = "short_damaged", "gets that ended at a block that was damaged, now or before"
    SHORT_DROPPED = "short_dropped", "gets that ended at a block that could not be written and left memory"
    SHORT_UNREADABLE = "short_unreadable", "gets that ended at a block that is stored and cannot be read here and now"
    SHORT_UNREACHABLE = (
        "short_unreachable",
        "gets that ended at a block that is stored, for the catalog could not be read",
    )
    SHORT_GONE = "short_gone", "gets that ended at a block that was stored once; why it left is not remembered"
    SHORT_REMOTE = "short_remote", "gets that ended at a block that the remote tier has, and did not give in time"
    SHORT_NO_WINDOW = (
        "short_no_window",
        "gets that ended before tokens that are stored, for windows there are missing",
    )
    SHORT_NO_STATE = (
        "short_no_state",
        "gets that ended before tokens that are stored, for no states are stored nearer to their end",
    )
    SHORT_NOT_WORTH = (
        "short_not_worth",
        "gets that ended before tokens that are stored, for computing them is expected to be faster",
    )

    # ---- all calls
    SLOW_CALLS = "slow_calls", "calls that took longer than slow_call_s"

    # ---- put
    PUT_TOKENS = "put_tokens", "tokens that puts were given"
    PUT_NEW_TOKENS = "put_new_tokens", "tokens among them that were not stored before"
    PUT_GAPS = "put_gaps", "puts with a start that stored nothing, for something before it was not stored (any more)"
    PUT_WAIT_S = "put_wait_s", "seconds that puts waited for room in the write queue"
    DROPPED_QUEUE_FULL = "dropped_queue_full", "blocks that a put dropped, for the write queue stayed full"
    DROPPED_NO_ROOM = (
        "dropped_no_room",
        "blocks that a put dropped, for the store cannot hold them beside what is pinned",
    )
    REFUSED_PINS = "refused_pins", "pins that were refused, for pinned sequences take all of their share"
    DROPPED_QUOTA = "dropped_quota", "blocks of a namespace that found no room within its quota"
    DROPPED_NO_SPACE = "dropped_no_space", "blocks that found no space on disk"
    DROPPED_WRITE_ERROR = "dropped_write_error", "blocks that the disk refused to write"
    DROPPED_CATALOG_ERROR = "dropped_catalog_error", "blocks that the catalog refused"
    DROPPED_ENCODING = "dropped_encoding", "blocks that could not be encoded, for memory ran out or a codec failed"
    DROPPED_SESSIONS = "dropped_sessions", "changes of sessions that could not be written"
    DROPPED_NO_MEMORY = "dropped_no_memory", "blocks that no memory tier had room for, in a store without a disk"

    # ---- what left a tier
    MEMORY_EVICTED_RECORDS = "memory_evicted_records", "records that the device or host tier gave up"
    DISK_EVICTED_RECORDS = "disk_evicted_records", "records that the disk tier gave up"
    EXPIRED_RECORDS = "expired_records", "records whose time to live was over"
    EVICTED_SESSIONS = "evicted_sessions", "sessions that were forgotten, for all of them took more than they may"
    EXPIRED_SESSIONS = "expired_sessions", "sessions that were forgotten, for their time to live was over"
    ERASES = "erases", "times that all bytes which nothing names were overwritten"
    ERASES_RESUMED = "erases_resumed", "erases among them that had been cut short, and were finished by an open"
    DELETED_RECORDS = "deleted_records", "records that `delete` removed"
    HOST_FULL = "host_full", "records that did not fit the host tier"
    DEVICE_FULL = "device_full", "blocks that the device had no memory for"

    # ---- disk
    DISK_WRITTEN_RECORDS = "disk_written_records", "records written to disk"
    DISK_WRITTEN_BYTES = "disk_written_bytes", "bytes of those records, whole pages"
    DISK_WRITTEN_RAW_BYTES = "disk_written_raw_bytes", "raw bytes of the same blocks"
    DISK_WRITTEN_MEMBER_BYTES = "disk_written_member_bytes", "bytes among them of blocks coded against others"
    DISK_WRITTEN_MEMBER_RAW_BYTES = "disk_written_member_raw_bytes", "raw bytes of those blocks"
    DISK_MOVED_RECORDS = "disk_moved_records", "records moved to empty a segment"
    DISK_RECLAIMS = "disk_reclaims", "times that a segment had to be freed before a write"
    DISK_READ_ERRORS = "disk_read_errors", "reads that the disk refused"
    DISK_WRITE_ERRORS = "disk_write_errors", "writes that the disk refused"
    DISK_FULL = "disk_full", "times that the file system was full before the budget was"
    CATALOG_ERRORS = "catalog_errors", "reads and writes that the catalog refused"
    CATALOG_REOPENED = "catalog_reopened", "times that the catalog was opened anew after a failed write"
    CATALOG_COMPACTED = "catalog_compacted", "times that opening wrote the catalog anew, for its file had grown"
    STALE_READERS = "stale_readers", "readers that died while they read the catalog, and no longer hold its pages"
    CATALOG_LOST = "catalog_lost", "times that it could not be opened anew: nothing is written any more"

    # ---- remote
    REMOTE_READ_RECORDS = "remote_read_records", "records that came from the remote tier, and are what was asked for"
    REMOTE_READ_BYTES = "remote_read_bytes", "bytes of those records"
    REMOTE_READ_PROFILES = "remote_read_profiles", "profiles that came from the remote tier"
    REMOTE_GONE = "remote_gone", "blocks that were taken to be in the remote tier and were not"
    REMOTE_LATE = "remote_late", "blocks in the remote tier that did not come before a get's deadline"
    REMOTE_DAMAGED = "remote_damaged", "values in the remote tier that are not the record asked for; misses"
    REMOTE_EXPIRED = "remote_expired", "values in the remote tier that are past their time; misses"
    REMOTE_UNLISTED = (
        "remote_unlisted",
        "values not asked for in the remote tier, for they were not there when it was listed",
    )
    REMOTE_SKIPPED = "remote_skipped", "blocks not asked for in the remote tier, for it did not answer before"
    REMOTE_READ_ERRORS = "remote_read_errors", "reads that the remote tier refused, or did not answer"
    REMOTE_WRITE_ERRORS = "remote_write_errors", "writes that the remote tier refused, or did not answer"
    REMOTE_BREAKS = "remote_breaks", "times that a server of the remote tier was no longer asked, for it did not answer"
    REMOTE_MENDS = "remote_mends", "times that such a server answered again"
    REMOTE_KEPT_RECORDS = "remote_kept_records", "records from the remote tier that this store keeps from then on"
    REMOTE_NOT_KEPT = (
        "remote_not_kept",
        "records from the remote tier that are not kept, for the disk refused their profile",
    )
    REMOTE_WRITTEN_RECORDS = "remote_written_records", "values written to the remote tier"
    REMOTE_WRITTEN_BYTES = "remote_written_bytes", "bytes of those values"
    REMOTE_WRITTEN_PARCELS = (
        "remote_written_parcels",
        "parcels of such values written to the remote tier",
    )
    REMOTE_WRITTEN_PROFILES = "remote_written_profiles", "profiles written to the remote tier"
    REMOTE_PRESENT = "remote_present", "values that were not written to the remote tier, for another store had done so"
    REMOTE_RECODED_MEMBERS = "remote_recoded_members", "members that were coded anew to stand alone in the remote tier"
    REMOTE_RECODED_ENDS = (
        "remote_recoded_ends",
        "beginnings of blocks that were coded as blocks of their own for the remote tier, for sequences end there",
    )
    REMOTE_REPLACED = "remote_replaced", "values in the remote tier that were written anew, for they lived too short"
    REMOTE_TOUCHED = "remote_touched", "values in the remote tier that were used, and live longer for it"
    REMOTE_ERASED = "remote_erased", "values that erases removed from the remote tier"
    REMOTE_TOLD = "remote_told", "changes of values in the remote tier that its server told of"
    DROPPED_REMOTE_QUEUE = "dropped_remote_queue", "blocks not written to the remote tier, for too many wait for it"
    DROPPED_REMOTE_ERROR = "dropped_remote_error", "blocks not written to the remote tier, for it refused"
    DROPPED_REMOTE_LEFT = (
        "dropped_remote_left",
        "blocks not written to the remote tier, for they left this store before",
    )
    DROPPED_REMOTE_CLOSE = "dropped_remote_close", "blocks not written to the remote tier, for the store was closed"
    DROPPED_EVENTS = "dropped_events", "changes that routers were not told of, for too many waited; all is told anew"

    # ---- damage
    QUARANTINED_RECORDS = "quarantined_records", "records removed because they, or what they need, are damaged"
    DAMAGED_MAGIC = "damaged_magic", "records that do not begin as a record does"
    DAMAGED_VERSION = "damaged_version", "records of a format version that is not known"
    DAMAGED_LENGTH = "damaged_length", "records whose lengths do not fit what was read"
    DAMAGED_HEADER_SUM = "damaged_header_sum", "records whose header does not match its checksum"
    DAMAGED_PAYLOAD_SUM = "damaged_payload_sum", "records whose payload does not match its checksum"
    DAMAGED_KEY = "damaged_key", "whole records of another block than the one asked for"
    DAMAGED_FIELD = "damaged_field", "records with a field out of range"
    DAMAGED_CODEC = "damaged_codec", "records whose payload the codec refused"
    DAMAGED_UNREADABLE = "damaged_unreadable", "records that the disk could not read"
    DAMAGED_DONOR = "damaged_donor", "records that left because a record they are coded against is damaged or gone"
    STALE_READS = "stale_reads", "reads that came too late: the record had been removed or moved meanwhile"
    UNKNOWN_CODEC = (
        "unknown_codec",
        "reads of records in a codec that this version does not know; they stay until their tokens are put again",
    )
    UNKNOWN_PROFILE = (
        "unknown_profile",
        "reads of records whose profile is not here; they stay until their tokens are put again",
    )
    REPLACED_UNREADABLE = (
        "replaced_unreadable",
        "records that could not be decoded here when their tokens were put again",
    )
    DAMAGED_PROFILES = "damaged_profiles", "profiles, given or copies, or the note of the newest, that are damaged"
    DAMAGED_ESTIMATES = "damaged_estimates", "opens that found the estimates of the gate damaged, and measured anew"

    # ---- what opening found
    FORMAT_UPGRADED = "format_upgraded", "opens that made a store of an older format one of today's"
    UNREACHABLE_RECORDS = "unreachable_records", "records on disk whose parents are gone"
    CATALOG_DAMAGED = "catalog_damaged", "times that opening found the catalog's structure damaged"
    CATALOG_REBUILT = "catalog_rebuilt", "times that the catalog was rebuilt from the records"
    CATALOG_REBUILT_RECORDS = "catalog_rebuilt_records", "records that such a rebuild found"
    CATALOG_REBUILT_SESSIONS = "catalog_rebuilt_sessions", "sessions that such a rebuild found"
    DAMAGED_ENTRIES = "damaged_entries", "catalog entries that do not match their checksum"
    MENDED_ENTRIES = "mended_entries", "entries among them that were made anew from their records"
    LOST_ENTRIES = "lost_entries", "entries that name space which does not exist or belongs to another"
    DAMAGED_SEGMENTS = "damaged_segments", "segment files that are not segments of this store"

    # ---- records coded against others
    MEMBER_RECORDS = "member_records", "blocks that were coded against other records"
    MEMBER_BYTES = "member_bytes", "bytes that those take"
    MEMBER_RAW_BYTES = "member_raw_bytes", "raw bytes of the same blocks"
    DONORS_REJECTED = "donors_rejected", "blocks that stand alone after all, for coding against others saved too little"
    RECODED_MEMBERS = "recoded_members", "members that were coded anew so that they stand alone"
    DROPPED_MEMBERS = "dropped_members", "members that left together with a record they need"
    LOST_MEMBERS = "lost_members", "members whose donors were gone when the store was opened"

    # ---- learning
    LEARNED_PROFILES = "learned_profiles", "profiles that were fitted to the store's own blocks and adopted"
    LEARNING_FAILED = "learning_failed", "attempts to learn that ended with an error"
    AGED_RECORDS = "aged_records", "records on disk that were coded with loss when they were recent no longer"
    RECODED_RECORDS = "recoded_records", "records that were written anew with what was learned"
    RECODED_BYTES = "recoded_bytes", "bytes that those took before, whole pages"
    RECODED_SAVED_BYTES = "recoded_saved_bytes", "bytes of these that are free now"
    RECODING_REFUSED = (
        "recoding_refused",
        "records left as they are, for what replaces them did not decode to the same",
    )

    # ---- fallbacks
    FALLBACK_PROFILE = (
        "fallback_profile",
        "opens that coded without the profile, for the disk did not keep it or it is damaged",
    )
    FALLBACK_DEVICE_CODEC = "fallback_device_codec", "blocks on a device that the CPU coded or decoded instead of it"
    FALLBACK_RAW_CHUNKS = "fallback_raw_chunks", "parts of payloads stored raw, for coding did not make them smaller"
    SLOW_CODEC = "slow_codec", "opens whose disk is read faster than its codec decodes, so that another loads sooner"
    FALLBACK_AGING = (
        "fallback_aging",
        "records left exact though they are recent no longer, for the disk had no room for a copy with loss",
    )
    FALLBACK_ZEROS = "fallback_zeros", "erases that wrote zeros, for the file system cannot make holes"
    FALLBACK_RESERVATION = (
        "fallback_reservation",
        "evictions from disk within a reservation, for the disk could not keep its budget otherwise",
    )
    FALLBACK_OVER_BUDGET = "fallback_over_budget", "opens above the budget of the disk, for pins keep more than that"
    FALLBACK_EVICTION = "fallback_eviction", "evictions from disk by recency, for the policy had no record that may go"
    FALLBACK_BUFFERED_IO = "fallback_buffered_io", "opens on a file system without O_DIRECT"
    FALLBACK_READS_IN_TURN = (
        "fallback_reads_in_turn",
        "gets that read one range after the other, for the system has no asynchronous reads",
    )
    FALLBACK_CATALOG_SCAN = (
        "fallback_catalog_scan",
        "opens that read the catalog entry by entry, for one pass over its file did not do",
    )
    FALLBACK_NOT_SERVED = "fallback_not_served", "calls of an attached model that ran without the store"
    FALLBACK_ANSWER_NOT_STORED = (
        "fallback_answer_not_stored",
        "prompts and answers of an attached model that the store could not take; the answers were given",
    )
    FALLBACK_MODEL_CHANGED = "fallback_model_changed", "answers not stored, for the model changed meanwhile"
    FALLBACK_PROMPT_NOT_SCORED = (
        "fallback_prompt_not_scored",
        "passes over prompts that score_prompts could not score; their tokens count 16 bits each",
    )
    FALLBACK_READ_TWICE = (
        "fallback_read_twice",
        "records that a get with lazy=True read whole after their beginning, for it had not all of the first layer",
    )
    FALLBACK_NOT_LAZY = "fallback_not_lazy", "gets with lazy=True that decoded all layers before they returned"
    FALLBACK_LAYER_LOST = (
        "fallback_layer_lost",
        "layers that could not be decoded after their get had returned, for a record is damaged",
    )
    FALLBACK_ENGINE_REFUSED = (
        "fallback_engine_refused",
        "caches that an engine did not take, for want of room or by other settings; it computes them",
    )


def hit_tokens(tier: str) -> Metric:
    """The counter of tokens returned from `tier` ("device", "queue", "host", "disk", "donors"; else another's)."""
    return Metric.__members__.get(f"GET_HIT_TOKENS_{tier.upper()}", Metric.GET_HIT_TOKENS_OTHER)


_CHECK_DISK = Notice(WARNING, "check the disk, its free space and the rights of the folder")
_MISSES = Notice(WARNING, "they are misses from now on; check the disk")

NOTICES: dict[Metric, Notice] = {
    Metric.APPROXIMATE_UNKNOWN: Notice(INFO, "calibrate with --parts lossless,lossy,donor,approximate"),
    Metric.APPROXIMATE_FAILED: Notice(INFO, "raise disk.bytes if it happens often"),
    Metric.SLOW_CALLS: Notice(
        WARNING, "look for what else uses the disk and the processors; slow_call_s says what is slow"
    ),
    Metric.DROPPED_QUEUE_FULL: Notice(
        WARNING, "put less at once, raise write_queue_bytes or put_timeout_s, or use a faster disk"
    ),
    Metric.DROPPED_NO_ROOM: Notice(WARNING, "unpin what is not needed, or raise disk.bytes"),
    Metric.REFUSED_PINS: Notice(WARNING, "unpin what is not needed, or raise pinned_share or disk.bytes"),
    Metric.DROPPED_QUOTA: Notice(WARNING, "raise the quota_bytes of the tenant, or unpin what is not needed"),
    Metric.DROPPED_NO_SPACE: Notice(
        WARNING,
        "if the file system is full, free space there; if it is not, raise disk.bytes, or unpin what is not needed",
    ),
    Metric.DROPPED_WRITE_ERROR: _CHECK_DISK,
    Metric.DROPPED_CATALOG_ERROR: _CHECK_DISK,
    Metric.DROPPED_ENCODING: Notice(ERROR, "put them again, and report the error if it comes again"),
    Metric.DROPPED_SESSIONS: Notice(WARNING, "check the disk, and save the sessions again"),
    Metric.DROPPED_NO_MEMORY: Notice(WARNING, "raise host.bytes or device.bytes, or unpin what is not needed"),
    Metric.HOST_FULL: Notice(INFO, "raise host.bytes; the disk keeps them, if there is one"),
    Metric.DEVICE_FULL: Notice(
        INFO, "lower device.bytes, so that others find room on the device; other tiers keep the blocks"
    ),
    Metric.DISK_READ_ERRORS: Notice(WARNING, "check the disk and the rights of the folder"),
    Metric.DISK_WRITE_ERRORS: _CHECK_DISK,
    Metric.DISK_FULL: Notice(WARNING, "free space on the file system, or lower disk.bytes to what it has"),
    Metric.CATALOG_ERRORS: _CHECK_DISK,
    Metric.CATALOG_REOPENED: Notice(INFO, "the store goes on; the line before says why"),
    Metric.STALE_READERS: Notice(INFO, "nothing is lost; look for what killed the process that read the store"),
    Metric.CATALOG_LOST: Notice(ERROR, "mend the disk, then close the store and open it again"),
    Metric.QUARANTINED_RECORDS: _MISSES,
    Metric.DAMAGED_MAGIC: _MISSES,
    Metric.DAMAGED_VERSION: _MISSES,
    Metric.DAMAGED_LENGTH: _MISSES,
    Metric.DAMAGED_HEADER_SUM: _MISSES,
    Metric.DAMAGED_PAYLOAD_SUM: _MISSES,
    Metric.DAMAGED_KEY: _MISSES,
    Metric.DAMAGED_FIELD: _MISSES,
    Metric.DAMAGED_CODEC: _MISSES,
    Metric.DAMAGED_UNREADABLE: _MISSES,
    Metric.DAMAGED_DONOR: _MISSES,
    Metric.ARCHIVE_MISSES: Notice(
        WARNING, "use the model, the libraries and the machine that the archive was made with"
    ),
    Metric.LEARNED_PROFILES: Notice(INFO, "new records take less from now on; KVStore.learning says more"),
    Metric.LEARNING_FAILED: Notice(WARNING, "nothing is lost; report the error, or set learn='off'"),
    Metric.RECODING_REFUSED: Notice(ERROR, "nothing is lost; report it, with the model's name"),
    Metric.UNKNOWN_CODEC: Notice(WARNING, "read them with the version of kvstore that wrote them"),
    Metric.UNKNOWN_PROFILE: Notice(WARNING, "put the profile back that they were coded with"),
    Metric.REPLACED_UNREADABLE: Notice(INFO, "they can be read again"),
    Metric.DAMAGED_PROFILES: Notice(
        WARNING, "restore the folder profiles of the store, or name the file with StoreConfig.profile"
    ),
    Metric.DAMAGED_ESTIMATES: Notice(INFO, "nothing is lost: reads and passes of the model are measured again"),
    Metric.SLOW_CODEC: Notice(INFO, "nothing is lost but time; set disk.codec if that matters more than space"),
    Metric.UNREACHABLE_RECORDS: Notice(WARNING, "they are removed and are misses from now on"),
    Metric.CATALOG_DAMAGED: Notice(WARNING, "it is rebuilt from the records; check the disk"),
    Metric.CATALOG_COMPACTED: Notice(INFO, "readers that live long make it grow; let them close the store in between"),
    Metric.CATALOG_REBUILT: Notice(WARNING, "what the records say is kept; check the disk"),
    Metric.CATALOG_REBUILT_RECORDS: Notice(INFO, "compare with what you expect to be stored"),
    Metric.CATALOG_REBUILT_SESSIONS: Notice(INFO, "compare with what you expect to be stored"),
    Metric.DAMAGED_ENTRIES: Notice(WARNING, "those that cannot be mended are misses from now on; check the disk"),
    Metric.MENDED_ENTRIES: Notice(INFO, "nothing is lost of these"),
    Metric.LOST_ENTRIES: _MISSES,
    Metric.DAMAGED_SEGMENTS: Notice(WARNING, "what can be read of them is kept; check the disk"),
    Metric.REMOTE_DAMAGED: Notice(
        WARNING, "they are misses; look who else writes to the remote tier, or use a fleet key"
    ),
    Metric.REMOTE_NOT_KEPT: Notice(INFO, "free space on the disk; gets bring them from there each time meanwhile"),
    Metric.REMOTE_READ_ERRORS: Notice(INFO, "they are misses; look at the server and the network"),
    Metric.REMOTE_WRITE_ERRORS: Notice(INFO, "look at the server, its memory and the network"),
    Metric.REMOTE_BREAKS: Notice(WARNING, "gets do without it until it answers; look at the server and the network"),
    Metric.REMOTE_MENDS: Notice(INFO, "it is asked again"),
    Metric.DROPPED_REMOTE_QUEUE: Notice(INFO, "raise remote.queue_bytes, or use a faster server"),
    Metric.DROPPED_REMOTE_ERROR: Notice(INFO, "this store still has them; look at the server"),
    Metric.DROPPED_REMOTE_LEFT: Notice(INFO, "give the disk more, or use a faster server"),
    Metric.DROPPED_REMOTE_CLOSE: Notice(INFO, "call flush(remote=True) before, or raise remote.close_timeout_s"),
    Metric.DROPPED_EVENTS: Notice(INFO, "raise the queue of kvstore.events.publish"),
    Metric.DROPPED_MEMBERS: Notice(INFO, "raise disk.bytes if it happens often"),
    Metric.LOST_MEMBERS: _MISSES,
    Metric.FALLBACK_PROFILE: Notice(WARNING, "free space on the disk, or make a new profile, and open the store again"),
    Metric.FALLBACK_DEVICE_CODEC: Notice(
        INFO, "coding takes longer; free memory on the device, or look whether its kernels work"
    ),
    Metric.FALLBACK_RAW_CHUNKS: Notice(INFO, "nothing is lost but space"),
    Metric.FALLBACK_AGING: Notice(INFO, "they are coded when their sequence grows again; raise disk.bytes"),
    Metric.FALLBACK_RESERVATION: Notice(WARNING, "the catalog takes too much of disk.bytes; raise it, or reserve less"),
    Metric.FALLBACK_OVER_BUDGET: Notice(WARNING, "it goes back as they are unpinned or deleted; raise disk.bytes"),
    Metric.FALLBACK_EVICTION: Notice(INFO, "nothing is lost but the choice; unpin what is not needed"),
    Metric.FALLBACK_ZEROS: Notice(INFO, "erases take longer here: put the store on a file system that can make holes"),
    Metric.FALLBACK_BUFFERED_IO: Notice(
        INFO, "reading and writing take longer; use a file system with direct I/O, such as ext4 or xfs"
    ),
    Metric.FALLBACK_READS_IN_TURN: Notice(
        INFO, "gets from disk take longer; raise fs.aio-max-nr, or look whether the sandbox forbids io_submit"
    ),
    Metric.FALLBACK_CATALOG_SCAN: Notice(INFO, "nothing is lost but time: opening takes longer"),
    Metric.FALLBACK_NOT_SERVED: Notice(INFO, "such calls compute everything anew; docs/attach.md says which they are"),
    Metric.FALLBACK_ANSWER_NOT_STORED: Notice(
        WARNING, "the store is closed or its disk refuses; detach the model before the store is closed"
    ),
    Metric.FALLBACK_MODEL_CHANGED: Notice(WARNING, "change adapters and weights between calls of generate"),
    Metric.FALLBACK_PROMPT_NOT_SCORED: Notice(
        INFO, "turn score_prompts off: the model's logits are made in another way"
    ),
    Metric.FALLBACK_READ_TWICE: Notice(INFO, "nothing is lost but the time: the first layer takes more than others"),
    Metric.FALLBACK_NOT_LAZY: Notice(INFO, "nothing is lost but the time; docs/lazy.md says when layers come later"),
    Metric.FALLBACK_LAYER_LOST: Notice(WARNING, "what is missing was computed anew, or LayerLost was raised"),
    Metric.FALLBACK_ENGINE_REFUSED: Notice(WARNING, "the engine's log says why; docs/llama_cpp.md lists its settings"),
}
"""What is logged when a counter grows that means a loss or a fallback. The others grow while all is well."""


class Metrics:
    """Counters that only grow, and the log of those that have a notice. Thread-safe: `_lock` guards `_counts`.

    Args:
        log: where losses and fallbacks are logged; default is one that names no store.

    Attributes:
        timings: how long calls and their parts took.
        spans: where calls are told of one by one; None for nowhere (`kvstore.tracing`).

    Example:
        >>> metrics = Metrics()
        >>> metrics.add(Metric.GET_HITS)
        >>> metrics.snapshot()
        {'get_hits': 1}
    """

    def __init__(self, log: EventLog | None = None) -> None:
        self.log = log or EventLog()
        self.timings = Timings()
        self.spans: Spans | None = None
        self._lock = threading.Lock()
        self._counts: Counter[Metric] = Counter()  # guarded by _lock

    def add(self, metric: Metric, amount: int | float = 1, because: object = None) -> None:
        """Adds `amount` (>= 0) to a counter, and logs it if it has a notice. because: an error, or words that say more,
        for the log."""
        if not amount:
            return
        with self._lock:
            self._counts[metric] += amount  # type: ignore[assignment]
        notice = NOTICES.get(metric)
        if notice is not None:
            self.log.note(metric.value, notice, metric.meaning, amount, because)

    def __getitem__(self, metric: Metric) -> int | float:
        with self._lock:
            return self._counts[metric]

    def snapshot(self) -> dict[str, int | float]:
        """The counters that are not 0, by name; a copy."""
        with self._lock:
            return {metric.value: count for metric, count in sorted(self._counts.items())}
