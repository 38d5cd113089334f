"""`PageCodec`: whole pages of an engine to bytes that describe themselves, and back.

Engines that have a place for a codec of others (docs/plugging.md) hand over a page and take bytes; what the page holds
they name by a key of their own, or not at all. The bytes are a record (FORMAT.md, "Record"), so whoever has them can
tell what they are, and what was damaged, truncated or taken for another page is never decoded.
"""

from __future__ import annotations

import hashlib

import numpy as np

from kvstore.codecs.base import BlockInfo, Codec
from kvstore.codecs.view import KVView
from kvstore.core.layout import KVLayout
from kvstore.core.record import (
    NO_KEY,
    DamagedRecord,
    RecordHeader,
    check_payload,
    parse,
    payload_of,
    payload_offset,
    seal,
)
from kvstore.core.tokens import Tokens
from kvstore.errors import CodecError


class PageCodec:
    """Codes pages of one shape with one codec. Immutable and thread-safe; needs no store, no file and no lmdb.

    Args:
        codec: of `codec_by_name`, or one that was made from a profile.
        layout: of the pages.
        tokens: how many a page has.

    Attributes:
        codec, layout, tokens: as given.
        capacity: bytes that are enough for any page, for engines whose places have one size.

    Raises:
        ValueError: a page has no tokens.

    Example:
        >>> import torch
        >>> from kvstore.codecs import codec_by_name
        >>> pages = PageCodec(codec_by_name("entropy"), KVLayout.uniform(num_layers=2, heads=4, head_dim=64), tokens=16)
        >>> page = [tuple(torch.randn(2, 4, 16, 64).bfloat16()) for layer in range(2)]
        >>> place = memoryview(bytearray(pages.capacity))
        >>> size = pages.encode(KVView.of_layers(pages.layout, page), place, key=b"hash of the page")
        >>> back = [tuple(torch.zeros(2, 4, 16, 64).bfloat16()) for layer in range(2)]
        >>> pages.decode(place[:size], KVView.of_layers(pages.layout, back), key=b"hash of the page")
        >>> all(torch.equal(a, b) for was, now in zip(page, back) for a, b in zip(was, now))
        True
    """

    def __init__(self, codec: Codec, layout: KVLayout, tokens: int) -> None:
        if tokens < 1:
            raise ValueError(f"tokens: expected a page of at least one token, found {tokens}")
        self.codec, self.layout, self.tokens = codec, layout, tokens
        self._begin = payload_offset(layout.sections, tokens)
        self._shape = hashlib.sha256(layout.canonical().encode()).digest()
        self.capacity = self._begin + codec.bound(self._info(0))

    def encode(
        self, page: KVView, out: memoryview, *, key: bytes = b"", start: int = 0, token_ids: Tokens | None = None
    ) -> int:
        """Write a page into `out`. The same page gives the same bytes on every machine.

        Args:
            page: its keys and values.
            out: writable memory, which is mutated. `capacity` bytes are always enough.
            key: what the engine calls the page, any bytes; `decode` must be given the same.
            start: position of its first token in its sequence, for codecs with a profile.
            token_ids: uint32 `[tokens]`, for codecs with a profile; zeros if the engine does not tell.

        Returns:
            How many bytes were written.

        Raises:
            CodecError: `out` is too small for this page, or the page has another layout or length.
        """
        if page.layout != self.layout or page.tokens != self.tokens:
            raise CodecError(f"page: expected {self.tokens} tokens of the layout given, found {page.tokens} tokens")
        info = self._info(start, token_ids)
        sizes = self.codec.encode(info, page, out[self._begin :]) if len(out) > self._begin else None
        if sizes is None:
            raise CodecError(f"out: {len(out)} bytes are too few for this page; {self.capacity} are always enough")
        payload = out[self._begin : self._begin + sum(sizes)]
        header = RecordHeader(
            key=hashlib.sha256(key).digest(),
            parent=NO_KEY,
            namespace=self._shape,
            codec=self.codec.id,
            record_id=0,
            start=start,
            tokens=info.tokens,
            layer_sizes=sizes,
            raw_bytes=page.nbytes,
            profile=self.codec.profile,
            error_bound=0.0 if self.codec.exact else self.codec.error_bound(payload, sizes),
        )
        seal(header, out[: header.record_bytes])
        return header.record_bytes

    def decode(self, data: memoryview, page: KVView, *, key: bytes = b"") -> None:
        """Read a page from bytes that may hold anything. All of them are checked before the page is mutated.

        Args:
            data: begins with what `encode` wrote; more may follow.
            page: where the keys and values go.
            key: what the engine calls the page.

        Raises:
            CodecError: the bytes are damaged or cut short, or of another page, layout, codec or profile. The page is
                as it was, except where a codec refuses bytes whose checksum fits.
        """
        try:
            header = parse(data, self.capacity)
            check_payload(header, data)
        except DamagedRecord as error:
            raise CodecError(f"page: {error}; treat it as a miss") from error
        self._check(header, key)
        info = self._info(header.start, header.tokens)
        self.codec.decode(info, payload_of(header, data), header.layer_sizes, page)

    def _info(self, start: int, token_ids: Tokens | None = None) -> BlockInfo:
        tokens = np.zeros(self.tokens, np.uint32) if token_ids is None else token_ids
        if len(tokens) != self.tokens:
            raise CodecError(f"token_ids: expected {self.tokens}, as the page has, found {len(tokens)}")
        return BlockInfo(self.layout, tokens, start)

    def _check(self, header: RecordHeader, key: bytes) -> None:
        """Refuse an intact record that is not of this page."""
        expected = {
            "key": (header.key, hashlib.sha256(key).digest()),
            "layout": (header.namespace, self._shape),
            "codec": (header.codec, self.codec.id),
            "profile": (header.profile, self.codec.profile),
            "length": (header.count, self.tokens),
            "sections": (len(header.layer_sizes), self.layout.sections),
        }
        for name, (found, wanted) in expected.items():
            if found != wanted:
                raise CodecError(f"page: the record has another {name} than this page; treat it as a miss")
        if header.donors or header.flags:
            raise CodecError("page: the record needs other blocks or has states; only a store can read it")
