"""What the monitor saw, in one SQLite file: it writes, the dashboard and others read, each in its own process.

    journal = Journal("F/monitor/journal.sqlite")           # the monitor
    journal.add_event(time.time(), "banned", username="mallory", reason="sends noise")
    JournalReader("F/monitor/journal.sqlite").events(50)    # anybody else

Names are kept as fields and never inside a text, so that somebody who hides theirs is hidden in the past as well.
"""

from volunteer_kit.journal.bounds import KINDS
from volunteer_kit.journal.file import JournalError
from volunteer_kit.journal.reader import JournalReader
from volunteer_kit.journal.writer import Journal

__all__ = ["KINDS", "Journal", "JournalError", "JournalReader"]
