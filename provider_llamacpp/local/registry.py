"""What the loopback router remembers: declarations, tokens, configuration and catalog.

Pure bookkeeping (provider protocol 2 to 4) without a bus. Tokens are kept as SHA-256 only.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import BusError

Json = dict[str, Any]

DEFAULT_MAX_TOKENS = 8192
"""Of an answer, where neither the request nor the provider says."""
OUTPUT_TOKEN_MAX = 32_000
"""Of an answer, where only what the model could do is known."""

_PASSED_ON = (
    "messages",
    "session_id",
    "system_prompt",
    "system_sections",
    "cache_intent",
    "tools",
    "response_format",
    "thinking_level",
)
_ID = re.compile(r"[a-z0-9_-]{1,64}")
_SECRET = re.compile(r"key|token|secret|password", re.IGNORECASE)


def digest(token: str) -> str:
    """What is kept of a registration token."""
    return hashlib.sha256(token.encode()).hexdigest()


@dataclass
class Record:
    """One provider that declared itself."""

    id: str
    token_sha256: str
    declaration: Json
    available: bool = True

    def stored(self) -> Json:
        """What survives a restart of the router."""
        return {"token_sha256": self.token_sha256, "declaration": self.declaration}


@dataclass
class Registry:
    """All providers of one router. Thread-safe.

    :param environ: where ``credential_env_var`` and ``env://`` references are read
    """

    environ: Mapping[str, str]
    changed: threading.Condition = field(default_factory=threading.Condition)
    records: dict[str, Record] = field(default_factory=dict)
    config: dict[str, Json] = field(default_factory=dict)
    """The operator's slice for each provider id."""
    catalog: dict[str, list[Json]] = field(default_factory=dict)
    race_once: bool = False
    """The next registration finds its record changed while it was prepared."""

    # --- registration --------------------------------------------------------------------------

    def register(self, data: Json) -> Json:
        """``router::provider::register``.

        :raises BusError: ``router/invalid_request`` or ``router/registration_rejected``
        """
        provider = data.get("id")
        if not isinstance(provider, str) or not _ID.fullmatch(provider):
            raise invalid("id must match [a-z0-9_-]{1,64}")
        declaration = {k: v for k, v in data.items() if k not in ("token", "_caller_worker_id")}
        _check_declaration(provider, declaration)
        token = data.get("token")
        with self.changed:
            record = self.records.get(provider)
            if record is not None:
                self._prove(record, token)
            if not isinstance(token, str) or not token:
                token = str(uuid.uuid4())
            if self.race_once:
                self.race_once = False
                raise rejected(f"the record of {provider!r} changed during the registration")
            self.records[provider] = Record(provider, digest(token), declaration)
            self.changed.notify_all()
        return {"ok": True, "id": provider, "registration_token": token}

    def prove(self, provider: object, token: object) -> Record:
        """The record of a provider that shows its token.

        :raises BusError: ``router/unknown_provider`` or ``router/registration_rejected``
        """
        with self.changed:
            record = self.records.get(provider) if isinstance(provider, str) else None
            if record is None:
                raise BusError("router/unknown_provider", f"no provider {provider!r}")
            self._prove(record, token)
            return record

    def _prove(self, record: Record, token: object) -> None:
        if token is None:
            raise rejected(f"{record.id!r} is bound to another worker")
        given = digest(token) if isinstance(token, str) else ""
        if not hmac.compare_digest(given, record.token_sha256):
            raise rejected(f"the token does not match the one {record.id!r} was bound with")

    def set_available(self, provider: str, available: bool) -> bool:
        """Note whether a provider can be reached; whether that is news."""
        with self.changed:
            record = self.records.get(provider)
            if record is None or record.available == available:
                return False
            record.available = available
            self.changed.notify_all()
            return True

    def forget(self, provider: str) -> None:
        """Drop a provider's record and catalog, as an operator does for a lost token."""
        with self.changed:
            self.records.pop(provider, None)
            self.catalog.pop(provider, None)
            self.changed.notify_all()

    def dump(self) -> Json:
        """What goes to the bus state."""
        with self.changed:
            return {provider: record.stored() for provider, record in self.records.items()}

    def restore(self, stored: object) -> None:
        """Take over what :meth:`dump` gave; nobody is available until it shows itself."""
        with self.changed:
            self.catalog.clear()
            self.records.clear()
            for provider, each in (stored if isinstance(stored, dict) else {}).items():
                self.records[provider] = Record(
                    provider, each["token_sha256"], each["declaration"], available=False
                )
            self.changed.notify_all()

    # --- credentials ---------------------------------------------------------------------------

    def resolve(self, data: Json) -> Json:
        """``router::provider::resolve`` (provider protocol 3)."""
        record = self.prove(data.get("id"), data.get("token"))
        slice_ = self.config.get(record.id, {})
        answer = self._credential(record, slice_)
        defaults = record.declaration.get("defaults") or {}
        for key in ("api_url", "max_tokens"):
            value = slice_.get(key, defaults.get(key))
            if value is not None:
                answer[key] = value
        if record.declaration.get("credential_optional") is True and "credential_error" not in (
            answer
        ):
            answer["configured"] = True
        return answer

    def _credential(self, record: Record, slice_: Json) -> Json:
        if isinstance(slice_.get("credential"), dict):
            return _found("config", slice_["credential"])
        key = slice_.get("api_key")
        if isinstance(key, str) and key.startswith(("secret://", "env://")):
            scheme, _, name = key.partition("://")
            value = self.environ.get(name, "").strip() if scheme == "env" else ""
            referenced = {"credential_ref": key, "credential_source": scheme}
            if value:
                return {**_found("config", _api_key(value)), **referenced}
            # A reference that leads nowhere does not fall through to the next source.
            error = "the reference cannot be resolved"
            return {
                "configured": False,
                "source": "config",
                **referenced,
                "credential_error": error,
            }
        if isinstance(key, str) and key.strip():
            return _found("config", _api_key(key))
        variable = record.declaration.get("credential_env_var")
        value = self.environ.get(variable, "").strip() if isinstance(variable, str) else ""
        if value:
            return _found("env", _api_key(value))
        return {"configured": False, "source": "none", "credential_source": "none"}

    def update_credential(self, data: Json) -> Json:
        """``router::provider::update_credential``."""
        record = self.prove(data.get("id"), data.get("token"))
        if not isinstance(data.get("credential"), dict):
            raise invalid("credential must be an object")
        with self.changed:
            self.config.setdefault(record.id, {})["credential"] = data["credential"]
        return {"ok": True}

    # --- catalog -------------------------------------------------------------------------------

    def reconcile(self, data: Json) -> Json:
        """``router::models::reconcile``: replaces the whole slice."""
        record = self.prove(data.get("provider"), data.get("token"))
        models = data.get("models")
        if not isinstance(models, list):
            raise invalid("models must be a list")
        for model in models:
            _check_model(record.id, model)
        with self.changed:
            self.catalog[record.id] = models
            self.changed.notify_all()
        return {"provider": record.id, "count": len(models)}

    def models(self, provider: str | None = None) -> list[Json]:
        """The catalog, of one provider or of all."""
        with self.changed:
            return [
                model
                for owner, models in sorted(self.catalog.items())
                if provider in (None, owner)
                for model in models
            ]

    def route(self, provider: str | None, model: str | None) -> tuple[Record, Json | None, str]:
        """Who serves a request: the record, the catalog's row if there is one, the model's id.

        :raises BusError: ``router/unknown_provider``, ``router/ambiguous_model`` or
            ``router/no_provider_for_model``
        """
        with self.changed:
            if provider is None and model is not None and "::" in model:
                head, _, tail = model.partition("::")
                if head in self.records:
                    provider, model = head, tail
            if provider is not None and provider not in self.records:
                raise BusError("router/unknown_provider", f"no provider {provider!r}")
            rows = self.models(provider)
            if model is None:
                rows = sorted(rows, key=self._wish)[:1]
            else:
                rows = [row for row in rows if row["id"] == model]
            if len(rows) > 1:
                owners = ", ".join(row["provider"] for row in rows)
                raise BusError("router/ambiguous_model", f"{model!r} is served by {owners}")
            row = rows[0] if rows else None
            owner = provider or (row["provider"] if row else None)
            name = model or (row["id"] if row else None)
            if owner is None or name is None:
                raise BusError("router/no_provider_for_model", f"nobody serves {model!r}")
            return self.records[owner], row, name

    def _wish(self, row: Json) -> int:
        """The place of a model in its provider's ``default_models``."""
        wishes = self.records[row["provider"]].declaration.get("default_models") or []
        return wishes.index(row["id"]) if row["id"] in wishes else len(wishes)

    def output_budget(self, record: Record, row: Json | None, wanted: object) -> int:
        """``max_output_tokens`` for a request (provider protocol 11)."""
        ceiling = (row or {}).get("max_output_tokens")
        for value in (wanted, self.config.get(record.id, {}).get("max_tokens")):
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return min(value, ceiling) if isinstance(ceiling, int) else value
        if isinstance(ceiling, int):
            return min(ceiling, OUTPUT_TOKEN_MAX)
        defaults = record.declaration.get("defaults") or {}
        return int(defaults.get("max_tokens") or DEFAULT_MAX_TOKENS)

    def prepare(self, data: Json, request_id: str) -> tuple[str, Json]:
        """A caller's request as the provider gets it, but for the channel; and the provider's id.

        :raises BusError: as :meth:`route` does, or ``router/invalid_request``
        """
        if not isinstance(data.get("messages"), list):
            raise invalid("messages must be a list")
        record, row, model = self.route(data.get("provider"), data.get("model"))
        payload: Json = {key: data[key] for key in _PASSED_ON if data.get(key) is not None}
        payload["model"] = model
        payload["resolution_key"] = request_id
        payload["max_output_tokens"] = self.output_budget(
            record, row, data.get("max_output_tokens")
        )
        options = data.get("provider_options")
        if isinstance(options, dict) and record.id in options:
            payload["provider_options"] = options[record.id]
        if row is not None:
            payload["model_meta"] = row
        return record.id, payload

    def wait(self, condition: Callable[[], object], timeout: float) -> bool:
        """Wait for something that a registration or a reconcile makes true."""
        with self.changed:
            return bool(self.changed.wait_for(condition, timeout))


def invalid(message: str) -> BusError:
    """A ``router/invalid_request``."""
    return BusError("router/invalid_request", message)


def rejected(message: str) -> BusError:
    """A ``router/registration_rejected``."""
    return BusError("router/registration_rejected", message)


def _api_key(key: str) -> Json:
    return {"type": "api_key", "key": key}


def _found(source: str, credential: Json) -> Json:
    return {
        "configured": True,
        "source": source,
        "credential": credential,
        "credential_source": source,
    }


def _check_declaration(provider: str, declaration: Json) -> None:
    for model in declaration.get("models") or []:
        _check_model(provider, model)
    schema = declaration.get("config_schema") or {}
    properties = schema.get("properties") if isinstance(schema, dict) else None
    for name, each in (properties or {}).items():
        if _SECRET.search(name) and each.get("writeOnly") is not True:
            raise invalid(f"config_schema: {name} must be writeOnly")


def _check_model(provider: str, model: object) -> None:
    if not isinstance(model, dict):
        raise invalid("a model must be an object")
    for key in ("id", "provider"):
        if not isinstance(model.get(key), str) or not model[key]:
            raise invalid(f"a model lacks {key}")
    if model["provider"] != provider:
        raise invalid(f"model {model['id']!r} is not {provider!r}'s")
    for key in ("context_window", "max_output_tokens"):
        if not isinstance(model.get(key), int) or isinstance(model[key], bool):
            raise invalid(f"model {model['id']!r}: {key} must be a whole number")
