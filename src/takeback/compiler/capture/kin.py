"""What a recording leaves for the next one, of a batch with other shapes: where Python was looked at, and what it read.

Where the same code runs and reads nothing else, the assumptions are the same ones, and are not looked for again.
"""

from __future__ import annotations

from dataclasses import dataclass

from takeback.compiler.capture.assumptions import Assumptions, Place
from takeback.compiler.capture.ran import Seen, origin_of_file


@dataclass(frozen=True)
class Kin:
    """Of one recording. It may serve another as long as nothing has changed that it assumes."""

    before: Assumptions  #: everything in the step's reach, as it was before
    assumptions: Assumptions  #: what the step read
    within: set[Place]  #: where that is
    seen: Seen

    def covers(self, seen: Seen) -> bool:
        """Whether a step that was seen to do this read nothing that this one did not."""
        mine = self.seen
        if not seen.unseen <= mine.unseen:
            return False
        new = (code for ident, (code, _) in seen.codes.items() if ident not in mine.codes)
        if any(origin_of_file(code.co_filename) != "takeback" for code in new):
            return False
        return all(names <= mine.reads.get(ident, frozenset()) for ident, names in seen.reads.items() if names)
