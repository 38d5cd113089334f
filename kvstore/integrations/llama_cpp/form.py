"""What the states of a llama.cpp context look like, beside the layout; a part of the identity's fingerprint."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from kvstore.core.fingerprints import MORE
from kvstore.core.identity import ModelIdentity
from kvstore.errors import ConfigError

VERSIONS = (3, 4)
"""Versions of sequence states (LLAMA_STATE_SEQ_VERSION) that can be read and written."""
_NAME = "llama.cpp:"


@dataclass(frozen=True)
class StateForm:
    """The form of the states that a context reads and writes. Immutable.

    Attributes:
        version: LLAMA_STATE_SEQ_VERSION of the library, one of `VERSIONS`.
        flash_attention: whether the context attends so. Without it llama.cpp keeps V transposed, and rounds otherwise.
        paired: how many leading values of a key's head are rotated as pairs of neighbours. The store keeps the two
            values of a pair half of that apart, as transformers does; 0: it keeps keys as they are.

    Raises:
        ConfigError: an unknown version.

    Example:
        >>> StateForm(4, True, 64).text
        'llama.cpp:{"flash_attention": true, "paired": 64, "version": 4}'
    """

    version: int
    flash_attention: bool
    paired: int

    def __post_init__(self) -> None:
        if self.version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            raise ConfigError(f"state_version: states of versions {known} are known, not {self.version!r}")

    @property
    def text(self) -> str:
        """The part of a fingerprint that names this form."""
        return _NAME + json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def of(cls, identity: ModelIdentity) -> StateForm:
        """Return the form that an identity names.

        Raises:
            ConfigError: the identity is not one of `identity_from_gguf`.
        """
        for part in identity.weights.split(MORE):
            if part.startswith(_NAME):
                try:
                    return cls(**json.loads(part.removeprefix(_NAME)))
                except (ValueError, TypeError) as error:
                    raise ConfigError(f"the identity's form of states cannot be read: {error}") from error
        raise ConfigError("the store does not hold caches of llama.cpp; make its identity with identity_from_gguf")
