"""The newest errors, kept for whoever asks."""

from provider_llamacpp.recent import MINUTES, MOST, RecentErrors


def test_errors_are_told_with_their_times_oldest_first():
    now = [1000.0]
    errors = RecentErrors(lambda: now[0])
    errors.add("stream 1", "transient", "it broke")
    now[0] += 2
    errors.add("embed 2", "permanent", "no embeddings")
    assert errors.facts() == [
        {
            "at": 1_000_000,
            "where": "stream 1",
            "kind": "transient",
            "message": "it broke",
            "count": 1,
        },
        {
            "at": 1_002_000,
            "where": "embed 2",
            "kind": "permanent",
            "message": "no embeddings",
            "count": 1,
        },
    ]


def test_the_same_error_again_is_counted():
    now = [1000.0]
    errors = RecentErrors(lambda: now[0])
    for number in range(3):
        now[0] += 1
        errors.add(f"stream {number}", "transient", "away")
    errors.add("stream 3", "permanent", "away")
    first, second = errors.facts()
    assert (first["count"], first["where"], first["at"]) == (3, "stream 2", 1_003_000)
    assert second["count"] == 1


def test_old_errors_are_not_told():
    now = [1000.0]
    errors = RecentErrors(lambda: now[0])
    errors.add("stream 1", "transient", "old")
    now[0] += MINUTES * 60
    assert len(errors.facts()) == 1
    now[0] += 1
    errors.add("stream 2", "transient", "new")
    assert [each["message"] for each in errors.facts()] == ["new"]


def test_memory_is_bounded():
    errors = RecentErrors()
    for number in range(MOST + 5):
        errors.add("stream", "transient", f"{number} " + "x" * 10_000)
    kept = errors.facts()
    assert len(kept) == MOST
    assert kept[0]["message"].startswith("5 ")
    assert max(len(each["message"]) for each in kept) <= 500
