"""Takes the repeated prefill off the start of an answer. Pure; text in, text out.

llama-server continues a transcript that ends with an assistant message, and its answer repeats that
message first, usually in the first delta (llama-server API 4). The caller has that text already.
"""

from __future__ import annotations


class Echo:
    """What the server still has to repeat.

    :param prefill: the text of the trailing assistant message; empty if there is none
    """

    __slots__ = ("_held", "_owed")

    def __init__(self, prefill: str) -> None:
        self._owed = prefill
        self._held = ""

    def strip(self, text: str) -> str:
        """What of ``text``, the next of the answer, is new.

        Text that may be the repetition is held back until it is known. A template may trim white
        space at either end. Text that is something else is passed on with all that was held back:
        the server does not repeat.
        """
        if not self._owed:
            return text
        seen = self._held + text
        owed = self._owed
        for form in (owed, owed.lstrip()):
            if seen.startswith(form):
                return self._settle(seen[len(form) :])
            if form.startswith(seen):
                self._held = seen
                return ""
            core = form.rstrip()
            if core and seen.startswith(core):
                rest, blank = seen[len(core) :], form[len(core) :]
                while blank and rest.startswith(blank[0]):
                    rest, blank = rest[1:], blank[1:]
                return self._settle(rest)
        return self._settle(seen)

    def release(self) -> str:
        """The answer is complete: what was held back was an answer, for it never grew to a repeat.

        Empty if the repetition was found or nothing came.
        """
        held = self._held
        self._settle("")
        return held

    def _settle(self, rest: str) -> str:
        self._owed = self._held = ""
        return rest
