"""What our bus functions say of themselves: descriptions, JSON Schemas, metadata.

The schemas are those of the contract to the letter, titles and definition names included, because
callers generate code from them. What :mod:`.payloads` accepts is wider. The texts live in
``schemas.json`` and are read only when the functions are registered.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any


def function_schemas(id: str) -> dict[str, dict[str, Any]]:
    """For each function of provider ``id``: last part of its name -> what is registered with it.

    The values hold ``description``, ``request_format`` and ``response_format`` (JSON Schema
    draft-07) and ``metadata``, where ``internal`` keeps a function out of listings for agents
    (provider protocol 1).

    :param id: provider id (``[a-z0-9_-]{1,64}``)
    """
    return load(__package__, id)


def load(package: str, id: str) -> dict[str, dict[str, Any]]:
    """The same for the functions described in ``schemas.json`` of ``package``."""
    text = resources.files(package).joinpath("schemas.json").read_text(encoding="utf-8")
    schemas: dict[str, dict[str, Any]] = json.loads(text.replace("<id>", id))
    return schemas
