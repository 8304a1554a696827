"""Parts of prepared_machine.py."""
