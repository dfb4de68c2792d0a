"""What a peer says is taken as it should be, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from provider_llamacpp import lenient

READERS: dict[Callable[[object], Any], tuple[list[object], object]] = {
    lenient.mapping: ([{"a": 1}, {}], {}),
    lenient.sequence: ([[1], []], ()),
    lenient.text: (["a", ""], None),
    lenient.boolean: ([True, False], None),
    lenient.integer: ([0, -1, 2**70], None),
}
ANYTHING: list[object] = [None, True, False, 0, 1.0, "a", [], [1], {}, {"a": 1}]


@pytest.mark.parametrize("read", READERS, ids=lambda each: each.__name__)
def test_other_types_count_as_missing(read: Callable[[object], Any]) -> None:
    good, missing = READERS[read]
    assert [read(each) for each in good] == good
    kinds = {type(each) for each in good}
    others = [each for each in ANYTHING if type(each) not in kinds]
    assert others and all(read(each) == missing for each in others)


def test_strings_and_objects_among_others() -> None:
    assert lenient.objects([{"a": 1}, None, [{}], {}]) == [{"a": 1}, {}]
    assert lenient.objects({"a": 1}) == []
    assert lenient.texts(["a", 1, None, "", ["b"]]) == ["a", ""]
    assert lenient.texts("ab") == lenient.texts(None) == []
