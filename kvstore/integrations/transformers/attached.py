"""`attach`: from then on `model.generate` itself uses a store, whoever calls it: pipelines, agents, other libraries."""

from __future__ import annotations

import functools
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from kvstore.core.arguments import end_of_life
from kvstore.core.cache_argument import given_cache
from kvstore.core.given_store import check_store
from kvstore.core.identity import ModelIdentity
from kvstore.core.keys import namespace_digest
from kvstore.core.results import RequestReport
from kvstore.core.rope import regime_of
from kvstore.core.session_record import session_key
from kvstore.errors import IdentityMismatch, KVStoreError
from kvstore.integrations.transformers.adapters import bare
from kvstore.integrations.transformers.answers import ends, setting
from kvstore.integrations.transformers.around import around
from kvstore.integrations.transformers.feeding import is_fed
from kvstore.integrations.transformers.generation import generate
from kvstore.integrations.transformers.padding import Rows
from kvstore.integrations.transformers.request import HOW_TO_OPEN, Request, RequestStore
from kvstore.integrations.transformers.watch import identity_now
from kvstore.metrics import Metric
from kvstore.store import KVStore

OnRequest = Callable[[RequestReport], object]
_OPTIONS = ("namespace", "session", "ttl", "pin")


@dataclass(frozen=True)
class Options:
    """How answers are stored: see `KVStore.put`; session: see `generate`. Raises `ValueError` if one is malformed."""

    namespace: str | bytes = b""
    session: str | None = None
    ttl: float | None = None
    pin: bool = False

    def __post_init__(self) -> None:
        end_of_life(self.ttl)
        digest = namespace_digest(self.namespace)
        if self.session is not None:
            session_key(digest, self.session)


class Attachment:
    """A store behind the `generate` of a model; made by `attach`.

    Thread-safe: what belongs to a request belongs to its thread. `detach` may be called while requests run; they end
    with the store.

    Attributes:
        model, store: what was attached to what.
        options: of calls that bring none of their own.

    Example:
        >>> from kvstore import KVLayout, StoreConfig, TierConfig
        >>> identity = ModelIdentity("model", "main", "", "", KVLayout.uniform(1, 2, 8))
        >>> class Model(torch.nn.Module):
        ...     def generate(self): ...
        >>> memory = StoreConfig(disk=TierConfig(0))
        >>> with KVStore("memory", identity, memory) as store:
        ...     with Attachment(Model(), store, Options(), None) as attachment, attachment.using(session="alice"):
        ...         attachment._options().session
        'alice'
    """

    def __init__(self, model: Any, store: KVStore, options: Options, on_request: OnRequest | None) -> None:
        self.model = model
        self.store = store
        self.options = options
        self._on_request = on_request
        self._before = model.generate
        self._thread = threading.local()  # options: of `using`; request: under way in this thread

        @functools.wraps(getattr(self._before, "__func__", self._before))
        def attached(attachment: Attachment, *args: Any, **kwargs: Any) -> Any:
            return attachment._generate(args, kwargs)

        # A method of this: a copy of the model would copy the attachment, which refuses.
        model.generate = types.MethodType(attached, self)
        if store.read_only:
            _log.info("%s: the store is read only: answers are not stored", store.path)

    def detach(self) -> None:
        """Give the model its own `generate` back. Idempotent."""
        with _attaching:
            if _attachment(self.model) is self:
                del _attached[self.model]
                del self.model.generate  # the method of its class shows again

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    @contextmanager
    def using(self, **options: Any) -> Iterator[None]:
        """Inside the block, calls of this thread store with these of namespace, session, ttl and pin.

        Raises:
            TypeError: another name.
        """
        before = self._options()
        self._thread.options = replace(before, **options)
        try:
            yield
        finally:
            self._thread.options = before

    def _options(self) -> Options:
        found: Options = getattr(self._thread, "options", self.options)
        return found

    def _generate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `model.generate` does now."""
        if is_fed(kwargs):  # this call's own second half, or a `kvstore` generate with a store of its own
            return self._before(*args, **kwargs)
        inner: Request | None = getattr(self._thread, "request", None)
        own = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        options = replace(self._options(), **own)
        ids, more = _taken(args, kwargs)
        request = Request(self.store, options.namespace, options.ttl, options.pin)
        reason = _why_not(self.model, ids, more)
        if reason is None:
            self._thread.request = request
            try:
                copies = _copies(self.model, more)
                request.asks(Rows.of(ids, more.get("attention_mask")), copies)
                view = cast(KVStore, RequestStore(request))
                session = options.session if ids.shape[0] == copies == 1 else None
                with around(self.model, after=self._after_pass):
                    return generate(self.model, ids, store=view, session=session, namespace=options.namespace, **more)
            except (KVStoreError, ValueError) as error:
                if request.began:
                    raise  # the model's own, and not of what was prepared for it
                reason = f"{type(error).__name__}: {error}"
            finally:
                self._thread.request = inner  # of a call that goes on: its streamer or criteria made this one
                if reason is None:
                    report = request.report(None)
                    if not report.served:
                        self.store.metrics.add(Metric.FALLBACK_NOT_SERVED, because=report.why)
                    self._tell(report)
        self.store.metrics.add(Metric.FALLBACK_NOT_SERVED, because=reason)
        try:
            return self._before(*args, **kwargs)
        finally:
            # Behind those of calls that it made itself.
            self._tell(request.report(reason, _prompt_tokens(self.model, ids, more)))

    def _tell(self, report: RequestReport) -> None:
        self.store.last_request = report
        if self._on_request is not None:
            try:
                self._on_request(report)
            except Exception:
                _log.exception("on_request failed; the answer is given all the same. Mend the function")

    def _after_pass(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> None:
        """After each pass of the model: stores the prompt as soon as its cache is whole."""
        if output is None:  # another thread's pass, while torch enters or removes this hook: it has no `kwargs` then
            return
        request: Request | None = getattr(self._thread, "request", None)
        if request is not None and request.is_prompt_done(given_cache(kwargs)):
            identity = request.identity
            if identity is not None and identity_now(self.model, regime_of(identity.layout)) == identity:
                request.save_prompt()

    def __reduce__(self) -> Any:
        raise TypeError("the model has a store attached, which cannot be copied; call kvstore.detach(model) first")


_log = logging.getLogger("kvstore.attach")
# The `generate` of a model holds its attachment; nothing here keeps either of them.
_attached: weakref.WeakKeyDictionary[Any, weakref.ref[Attachment]] = weakref.WeakKeyDictionary()
_attaching = threading.Lock()


def _attachment(model: Any) -> Attachment | None:
    found = _attached.get(model) if isinstance(model, torch.nn.Module) else None
    return found() if found is not None else None


def attach(
    model: Any,
    tokenizer: Any,
    store: KVStore,
    *,
    namespace: str | bytes = b"",
    session: str | None = None,
    ttl: float | None = None,
    pin: bool = False,
    on_request: OnRequest | None = None,
) -> Attachment:
    """Let `model.generate` use a store from now on, for every caller: pipelines, agents, other libraries, threads.

    Each prompt starts from what is stored of it. It is stored as soon as it is computed, so that an answer that is
    broken off keeps it; the answer is stored when it is whole. `store.last_request` and `on_request` say what was
    reused. What cannot be served (assisted decoding, image inputs, a cache of the caller's own, ...) runs as before,
    counted as `fallback_not_served` and logged. Answers never fail because of the store: what it cannot take, also
    because it was closed meanwhile, is counted as `fallback_answer_not_stored`. A store that is only read serves
    what it has, and takes nothing.

    A single call may say otherwise: `model.generate(..., session="alice", ttl=60.0)`, or `with attachment.using(...)`
    where a library makes the call. Sessions are for single prompts.
    Args:
        model: a transformers model in evaluation mode; one wrapped by `torch.compile` or peft is fine.
        tokenizer: what its prompts are made with, compared with the store's; None if tokens are made elsewhere.
        store: an open store of this model.
        namespace, ttl, pin: see `KVStore.put`.
        session: a session for every answer; only for programs with one conversation.
        on_request: called after each request, in its thread, with a `RequestReport`. What it raises is logged.

    Returns:
        The attachment; `detach` ends it, and so does leaving it as a context manager.

    Raises:
        IdentityMismatch: the store is another model's, or another tokenizer's.
        UnsupportedModel: see `ModelIdentity.from_transformers`.
        ValueError: the model is attached already, it generates nothing, an argument is of another kind (`ConfigError`),
            or an option is malformed.

    Example:
        >>> import tempfile
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
        >>> model, prompt = LlamaForCausalLM(config).eval(), torch.tensor([[1, 2, 3, 4]])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with KVStore(folder, ModelIdentity.from_transformers(model)) as store, attach(model, None, store):
        ...         answers = [model.generate(prompt, do_sample=False, max_new_tokens=2) for _ in range(2)]
        ...         store.last_request.reused_tokens
        3
    """
    if on_request is not None and not callable(on_request):
        raise ValueError(f"on_request: expected a function, found {type(on_request).__name__}")
    options = Options(namespace, session, ttl, pin)
    _check(model, tokenizer, store)
    with _attaching:
        _refuse_second(model)
        made = Attachment(model, store, options, on_request)
        _attached[model] = weakref.ref(made)
    return made


def _check(model: Any, tokenizer: Any, store: KVStore) -> None:
    if not callable(getattr(model, "generate", None)):
        raise ValueError(f"model: a {type(model).__name__} has no generate; pass a transformers model")
    check_store(store, HOW_TO_OPEN)
    _refuse_second(model)
    identity = ModelIdentity.from_transformers(model, tokenizer, regime=regime_of(store.identity.layout))
    difference = identity.difference(store.identity.fields())
    if difference:
        raise IdentityMismatch(
            f"the store holds caches of another identity ({difference}); open a store with "
            "ModelIdentity.from_transformers(model, tokenizer)"
        )


def _refuse_second(model: Any) -> None:
    if _attachment(model) is not None:
        raise ValueError("model: a store is attached to it already; detach it first")


def detach(model: Any) -> bool:
    """Give a model its own `generate` back. Returns False if nothing was attached to it.

    Example:
        >>> detach(torch.nn.Linear(1, 1))
        False
    """
    found = _attachment(model)
    if found is None:
        return False
    found.detach()
    return True


def _taken(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The prompt that a call of `model.generate` names in one of its ways, and all else by name."""
    more = dict(kwargs)
    if args and "generation_config" not in more and len(args) == 2:
        more["generation_config"] = args[1]
        args = args[:1]
    if len(args) > 1:
        return None, more
    ids = args[0] if args else None
    for name in ("inputs", "input_ids"):
        given = more.pop(name, None)
        ids = given if ids is None else ids
    return ids, {name: value for name, value in more.items() if value is not None}


def _why_not(model: Any, ids: Any, kwargs: dict[str, Any]) -> str | None:
    """Why a store cannot serve a call, as far as that can be said without it; None if it can."""
    if not isinstance(ids, torch.Tensor):
        return "the prompt is not a tensor of token ids"
    if getattr(getattr(bare(model), "config", None), "is_encoder_decoder", False):
        return "the model has an encoder"
    eos, pad = ends(model, kwargs)
    if kwargs.get("attention_mask") is None and bool(torch.isin(ids.cpu(), torch.tensor(pad)).any()) and pad != eos:
        return "the prompt may be padded, and there is no attention_mask that says so"
    return None


def _prompt_tokens(model: Any, ids: Any, kwargs: dict[str, Any]) -> int:
    """How many tokens a prompt has without its padding, as the model's own `generate` takes it; 0 if it is no ids."""
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.is_floating_point():
        return 0
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
        return int((mask != 0).sum())
    eos, pad = ends(model, kwargs)
    return int((~torch.isin(ids.cpu(), torch.tensor(pad))).sum()) if mask is None and pad != eos else ids.numel()


def _copies(model: Any, kwargs: dict[str, Any]) -> int:
    """How many rows of the cache each prompt has."""
    return max(int(setting(model, kwargs, name) or 1) for name in ("num_beams", "num_return_sequences"))
