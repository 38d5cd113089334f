"""The profiles of a store: the one that new records are coded with, and those that old records name.

A store keeps a copy of every profile it coded with, in its folder `profiles`, so that its records can be read without
the file that the profile came from. Copies are never changed or removed.

A profile has tens of megabytes, and many opens need none of them. So opening reads headers alone, which say what a
profile is and whose; the rest is read, and checked, when the first block is coded or decoded with it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from kvstore.codecs import Codec, Profile, auto_name, codec_by_id, codec_by_name, codec_names, is_delta
from kvstore.codecs.delta import DeltaCodec
from kvstore.codecs.donor.codec import DonorCodec
from kvstore.codecs.groups import by_groups
from kvstore.codecs.profile import NO_PROFILE, Described, ProfileFile, profile_id_of
from kvstore.codecs.profile_head import LENGTH_BYTES, MAX_BYTES, ProfileHead, head_bytes
from kvstore.codecs.registry import delta_by_id
from kvstore.core.identity import ModelIdentity
from kvstore.errors import ProfileError, UnknownCodec
from kvstore.metrics import Metric, Metrics
from kvstore.tiers.disk.fs import FileSystem, is_passing, read_file, read_large, read_start, write_file

FOLDER = "profiles"
_NEWEST = "newest"  # a file with the id of the profile that was used last
_ID_LIMIT = 64
_NOTE = b""  # stands for that file among what is damaged
_AGAIN_S = 10.0  # a copy that the disk refused is tried again after so long


class Profiles:
    """The profiles of one store, and the codecs made with them. Thread-safe. Changes no file until `keep`.

    Args:
        fs: the file system.
        path: of the store; None for a store in memory.
        identity: of the store; profiles of another one are refused.
        metrics: where missing and damaged profiles are counted.
        given: the profile that the caller named, read or not; None for the newest of the store's own.
        read_only: whether no copy may be made.

    Attributes:
        ask: called with the id of a profile that a record needs and that is not here; somebody may bring it. It must
            return at once, and not raise.

    Example:
        >>> from kvstore import KVLayout
        >>> identity = ModelIdentity("my-model", "main", "weights-1", "", KVLayout.uniform(2, 4, 16))
        >>> profiles = Profiles(FileSystem(), None, identity, Metrics(), given=None)
        >>> profiles.current is None, profiles.encoder("auto").name
        (True, 'entropy')
    """

    def __init__(
        self,
        fs: FileSystem,
        path: str | None,
        identity: ModelIdentity,
        metrics: Metrics,
        given: Profile | ProfileFile | None,
        read_only: bool = False,
    ) -> None:
        self._fs = fs
        self._path = path
        self._folder = None if path is None else os.path.join(path, FOLDER)
        self._identity = identity
        self._metrics = metrics
        self._lock = threading.RLock()
        self._loaded: dict[bytes, Profile] = {}
        self._damaged: set[bytes] = set()
        self._decoders: dict[tuple[int, bytes], Codec | None] = {}  # None: what it needs is not in the profile
        self._delta_decoders: dict[tuple[int, bytes], DeltaCodec | None] = {}
        self._given = given
        self._takes_copies = not read_only
        self._copied: set[bytes] = set()  # those whose copies were looked at, or made
        self._refused: dict[bytes, float] = {}  # when the disk did not take the copy of one
        self.ask: Callable[[bytes], None] = lambda profile_id: None
        self._described: tuple[Described | None] | None = None  # (described,) once it is known
        self._current: Profile | None = None
        self._given_is_damaged = False
        self._own: tuple[bytes, ProfileHead] | None = None  # id and header of the newest copy, once it was looked at

    @property
    def described(self) -> Described | None:
        """What is known of the current profile by its header; None if there is none, or the header is damaged."""
        with self._lock:
            if self._described is None:
                self._described = (self._given or self._newest_head(),)
            return self._described[0]

    @property
    def current(self) -> Profile | None:
        """The profile that was given, else the newest of the store's own, read whole at the first call.

        None if there is none, or it is damaged, which is counted.
        """
        with self._lock:
            if self._current is None and not self._given_is_damaged:
                self._current = self._read_current()
            return self._current

    @property
    def is_kept(self) -> bool:
        """Whether the newest copy in the store looks like the current profile: it has the same header and size."""
        with self._lock:
            if self._given is None:
                return self.described is not None
            found, wanted = self._newest_head(), self._given.head
            return found is not None and (found.raw, found.nbytes) == (wanted.raw, wanted.nbytes)

    @property
    def adopted_at(self) -> int:
        """When the newest copy was written, in unix seconds; 0 if there is none."""
        with self._lock:
            if self._newest_head() is None or self._own is None:
                return 0
            try:
                return int(self._fs.modified(self._file(self._own[0])))
            except OSError:
                return 0

    def encoder(self, name: str) -> Codec:
        """Return the codec of a tier's setting, made with the current profile. The same name gives the same object.

        Args:
            name: of the codec; "auto" is the exact one that makes blocks smallest.

        Raises:
            UnknownCodec: there is no such codec.
            ProfileError: the codec needs a profile, and there is none, or it lacks what the codec needs.
        """
        with self._lock:
            if name == "auto":
                name = auto_name(self.described)
            profile = None if name in codec_names() else self.current  # otherwise it would be read needlessly
            return self._fitted(codec_by_name(name, profile))

    def decoder(self, number: int, profile: bytes) -> Codec | None:
        """Return the codec for a record with this codec number and profile id.

        Returns:
            None, which is counted, if the profile is unknown or damaged. The record is then a miss, and stays for a
            reader who has the profile.

        Raises:
            UnknownCodec: there is no codec with this number.
        """
        codec = self._decoder(number, profile)
        if codec is None:
            self._lacks(profile)
            return None
        return self._fitted(codec)

    def knows(self, number: int, profile: bytes) -> bool:
        """Whether there is a decoder for a record with this codec number and profile id. Counts no profile that is
        missing."""
        try:
            found = self._delta_decoder(number, profile) if is_delta(number) else self._decoder(number, profile)
        except UnknownCodec:
            return False
        return found is not None

    def likely_decoder(self, number: int) -> Codec | None:
        """Return a codec for a record of which only the codec number is known, made with the current profile.

        None if there is no such codec, or no profile that it needs.
        """
        try:
            return codec_by_id(number, self.current)
        except (UnknownCodec, ProfileError):
            return None

    def donor_encoder(self, plain: Codec, step: float | None) -> DonorCodec:
        """Return the codec of blocks that are coded against other blocks.

        Args:
            plain: for tokens that no other block has. If it needs the current profile, the profile's models of
                differences are used, too.
            step: see `DonorCodec`.

        Raises:
            ProfileError: a section that they are of is malformed.
        """
        profile = self.current if plain.profile != NO_PROFILE else None
        if profile is None:
            return DonorCodec(plain, None, step)
        return DonorCodec.from_profile(plain, profile, step)

    def delta_decoder(self, number: int, profile: bytes) -> DeltaCodec | None:
        """Return the delta codec for a record with this codec number and profile id.

        Returns:
            None, which is counted, as `decoder` does.

        Raises:
            UnknownCodec: there is no delta codec with this number.
        """
        codec = self._delta_decoder(number, profile)
        if codec is None:
            self._lacks(profile)
        return codec

    def _lacks(self, profile: bytes) -> None:
        self._metrics.add(Metric.UNKNOWN_PROFILE)
        self.ask(profile)

    def keep(self) -> bool:
        """Copy the current profile into the store, durably, and note it as the newest.

        Only the store's writer may call this.

        Returns:
            False, which is counted, if the disk refuses.
        """
        current = self.current
        return current is None or self._keep(current, is_new=self._given is not None)

    def adopt(self, profile: Profile) -> bool:
        """Make a new profile of the store's own the current one: for new records from now on. Durable on return.

        Only the store's writer may call this, and only if no profile was given.

        Returns:
            False, which is counted, if the disk refuses; nothing is changed then.
        """
        with self._lock:
            if not self._keep(profile, is_new=True):
                return False
            self._loaded[profile.id] = self._current = profile
            self._described = (profile,)
            self._own = profile.id, profile.head
            return True

    def data(self, profile_id: bytes) -> bytes | memoryview | None:
        """Return the bytes of a profile; None if it is not here, or damaged."""
        profile = self._load(profile_id)
        return None if profile is None else profile.data

    def take_in(self, profile_id: bytes, data: bytes) -> bool:
        """Know a profile of another store from now on, and keep a copy, if this one is open for writing.

        Returns:
            False if the bytes are not this profile, or not of this identity.
        """
        try:
            profile = Profile.from_bytes(data, self._identity)
        except ProfileError:
            return False
        if profile.id != profile_id:
            return False
        with self._lock:
            self._loaded[profile_id] = profile
            self._damaged.discard(profile_id)
            for made in (self._decoders, self._delta_decoders):
                for key in [key for key in made if key[1] == profile_id]:
                    del made[key]
            if self._takes_copies:
                self._copy(profile)
        return True

    def is_copied(self, profile_id: bytes) -> bool:
        """Return whether records that need this profile may be stored: there is a copy of it in the store, made now if
        it was not yet. One that the disk refused is tried again, but not at every call.

        Only the store's writer may call this.
        """
        if profile_id == NO_PROFILE or self._folder is None:
            return True
        with self._lock:
            if profile_id in self._copied:
                return True
            if time.monotonic() - self._refused.get(profile_id, -_AGAIN_S) < _AGAIN_S:
                return False
            profile = self._load(profile_id)
            return profile is not None and self._copy(profile)

    def _copy(self, profile: Profile) -> bool:
        """Copies a profile into the store, without a note of it."""
        if self._folder is None or self._path is None:
            return True
        try:
            self._fs.mkdir(self._folder)
            if not self._holds(profile):
                write_file(self._fs, self._file(profile.id), profile.data)
                self._fs.sync_directory(self._path)
        except OSError as error:
            self._metrics.add(Metric.DISK_WRITE_ERRORS, because=error)
            self._refused[profile.id] = time.monotonic()
            return False
        self._copied.add(profile.id)
        return True

    def _keep(self, profile: Profile, is_new: bool) -> bool:
        """Copies the profile into the store, unless it is no new one, and notes it as the newest."""
        if self._folder is None or self._path is None:
            return True
        try:
            self._fs.mkdir(self._folder)
            if is_new and not self._copy(profile):
                return False
            if self._newest_id() != profile.id:
                write_file(self._fs, os.path.join(self._folder, _NEWEST), profile.id.hex().encode() + b"\n")
        except OSError as error:
            self._metrics.add(Metric.DISK_WRITE_ERRORS, because=error)
            return False
        return True

    # ---- inside --------------------------------------------------------------------------------------------------

    def _fitted(self, codec: Codec) -> Codec:
        layout = self._identity.layout
        return by_groups(codec, layout) if layout.is_grouped and codec.profile == NO_PROFILE else codec

    def _decoder(self, number: int, profile: bytes) -> Codec | None:
        if profile == NO_PROFILE:
            return codec_by_id(number)
        with self._lock:
            if (number, profile) not in self._decoders:
                self._make_decoder(number, profile)
            return self._decoders.get((number, profile))

    def _delta_decoder(self, number: int, profile: bytes) -> DeltaCodec | None:
        if profile == NO_PROFILE:
            return delta_by_id(number)
        key = (number, profile)
        with self._lock:
            if key not in self._delta_decoders:
                loaded = self._load(profile)
                if loaded is None:
                    return None  # a writer may still bring it
                try:
                    self._delta_decoders[key] = delta_by_id(number, loaded)
                except ProfileError:
                    self._note_damaged(profile)
                    self._delta_decoders[key] = None
            return self._delta_decoders[key]

    def _make_decoder(self, number: int, profile_id: bytes) -> None:
        profile = self._load(profile_id)
        if profile is not None:
            try:
                self._decoders[number, profile_id] = codec_by_id(number, profile)
            except ProfileError:
                self._note_damaged(profile_id)  # its bytes are whole, but not what this codec needs
                self._decoders[number, profile_id] = None

    def _load(self, profile_id: bytes) -> Profile | None:
        with self._lock:
            if profile_id not in self._loaded and profile_id not in self._damaged:
                profile = self._read(profile_id)
                if profile is not None:
                    self._loaded[profile_id] = profile
            if profile_id not in self._loaded and self._given is not None:
                _ = self.current  # it may be the one that was given
            return self._loaded.get(profile_id)

    def _read_current(self) -> Profile | None:
        if self._given is None:
            return self._load(self._own[0]) if self.described is not None and self._own is not None else None
        try:
            profile = self._given.whole()
        except ProfileError as error:  # its header was good when the store was opened
            if not (isinstance(error.__cause__, OSError) and is_passing(error.__cause__)):
                self._given_is_damaged = True
                self._metrics.add(Metric.DAMAGED_PROFILES, because=error)
            return None
        return self._loaded.setdefault(profile.id, profile)

    def _read(self, profile_id: bytes) -> Profile | None:
        """Return the store's copy; None if there is none, or if it is damaged, which is counted."""
        if self._folder is None:
            return None
        try:
            known = self._own[1] if self._own is not None and self._own[0] == profile_id else None
            head = known or self._head(profile_id)  # before the rest, which may be large, is read
            data = read_large(self._fs, self._file(profile_id), MAX_BYTES)
            profile = Profile.from_bytes(data, self._identity, known=head)
            if profile.id != profile_id:
                raise ProfileError("the file holds another profile than its name says")
        except FileNotFoundError:
            return None  # a writer may still bring it
        except (OSError, ValueError) as error:
            if not (isinstance(error, OSError) and is_passing(error)):
                self._note_damaged(profile_id)
            return None
        return profile

    def _head(self, profile_id: bytes) -> ProfileHead:
        """What the header of the store's copy says. Raises `OSError` and `ValueError`."""
        path = self._file(profile_id)
        start, _ = read_start(self._fs, path, LENGTH_BYTES)
        data, size = read_start(self._fs, path, head_bytes(start))
        if size > MAX_BYTES:
            raise ValueError(f"{path}: expected at most {MAX_BYTES} bytes, found {size}")
        head = ProfileHead.parse(data, size, path)
        head.check_identity(self._identity, path)
        return head

    def _holds(self, profile: Profile) -> bool:
        """Whether the store's copy is this profile. A copy that is not is counted."""
        try:
            if profile_id_of(read_large(self._fs, self._file(profile.id), MAX_BYTES)) == profile.id:
                return True
        except FileNotFoundError:
            return False
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and is_passing(error):
                return False
        self._note_damaged(profile.id)
        return False

    def note_damaged(self, profile_id: bytes) -> None:
        """Count a profile of which a section is malformed, once."""
        with self._lock:
            self._note_damaged(profile_id)

    def _note_damaged(self, profile_id: bytes) -> None:
        if profile_id not in self._damaged:
            self._damaged.add(profile_id)
            self._metrics.add(Metric.DAMAGED_PROFILES)

    def _newest(self) -> Profile | None:
        profile_id = self._newest_id()
        return None if profile_id is None else self._load(profile_id)

    def _newest_head(self) -> ProfileHead | None:
        """What the header of the newest copy says; None if there is none, or it is damaged, which is counted."""
        if self._own is not None:
            return self._own[1]
        profile_id = self._newest_id()
        if profile_id is None or profile_id in self._damaged:
            return None
        try:
            self._own = profile_id, self._head(profile_id)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            if not (isinstance(error, OSError) and is_passing(error)):
                self._note_damaged(profile_id)
            return None
        return self._own[1]

    def _newest_id(self) -> bytes | None:
        if self._folder is None:
            return None
        try:
            found = bytes.fromhex(read_file(self._fs, os.path.join(self._folder, _NEWEST), _ID_LIMIT).decode())
            if len(found) != len(NO_PROFILE):
                raise ValueError(f"expected a profile id of {len(NO_PROFILE)} bytes, found {len(found)}")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            if not (isinstance(error, OSError) and is_passing(error)):
                self._note_damaged(_NOTE)
            return None
        return found

    def _file(self, profile_id: bytes) -> str:
        assert self._folder is not None
        return os.path.join(self._folder, f"{profile_id.hex()}.safetensors")
