"""Credit: `accounting` counts each account's samples in committed entries, `ledger` keeps them in SQLite."""
