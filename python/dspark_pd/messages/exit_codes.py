"""Exit codes of every verb. The CLI page and the tests read this table."""

from __future__ import annotations

from typing import Final

OK: Final = 0
DIFFERS: Final = 1
USAGE: Final = 2
TARGET: Final = 3
MISMATCH: Final = 4
EDITED: Final = 5
FILE_SYSTEM: Final = 6
INTERNAL: Final = 7
INTERRUPTED: Final = 130

MEANINGS: Final = {
    OK: "the asked state holds",
    DIFFERS: "the state differs from the asked one, the doctor finds an error, or a measurement fails",
    USAGE: "the command line is wrong",
    TARGET: "no SGLang at the target or address, or a release the set does not serve",
    MISMATCH: "a hunk does not match or the result does not compile; nothing written",
    EDITED: "the target was edited by others; nothing written",
    FILE_SYSTEM: "the file system or a needed program failed; the original is kept",
    INTERNAL: "a fault of dspark-pd itself; the error says how to report it",
    INTERRUPTED: "interrupted; what is known is printed or recorded",
}
