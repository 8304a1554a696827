"""Publish signed statements of the authority and monitors in the DHT, which no peer can replace by older ones.

In the DHT the record that lives longer wins. So a statement names its own expiration, and no node keeps it for longer
or shorter: a peer that stores an old statement again cannot make it outlive the new one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from hivemind.dht import DHT
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import ValueWithExpiration
from hivemind.utils.logging import get_logger

logger = get_logger(__name__)

MAX_STATEMENT = 4096  # bytes; ours have about 600, and the DHT is no place for large values

# envelope -> (s since 1970 at which it expires, sequence number); raises TokenError for what is no such statement
ReadTerms = Callable[[bytes], tuple[float, int]]


class StatementValidator(RecordValidatorBase):
    """Of every node of a run: under this key nothing but what `read_terms` takes, for just as long as it says, and
    nothing older than what the node has seen.

    :param read_terms: must survive pickling: the validator moves into the DHT's process
    """

    def __init__(self, key: str, read_terms: ReadTerms):
        self._key_id, self._read_terms = DHTID.generate(source=key).to_bytes(), read_terms
        self._newest = -1  # sequence

    def validate(self, record: DHTRecord) -> bool:
        if record.key != self._key_id:
            return True
        if record.subkey != DHTProtocol.IS_REGULAR_VALUE or len(record.value) > MAX_STATEMENT:
            return False
        try:
            envelope = DHTProtocol.serializer.loads(record.value)
            expires_at, sequence = self._read_terms(envelope)
        except Exception as error:  # whatever a stranger's bytes make of the serializer
            logger.debug(f"A statement was refused: {error}")
            return False
        if expires_at != record.expiration_time or sequence < self._newest:
            return False
        self._newest = sequence
        return True

    def merge_with(self, other: RecordValidatorBase) -> bool:
        return isinstance(other, StatementValidator) and other._key_id == self._key_id


class StatementBoard:
    """Stores and finds statements under one key. Every peer of the run has one for each key, or it would keep junk."""

    def __init__(self, dht: DHT, key: str, read_terms: ReadTerms):
        self._dht, self._key, self._read_terms = dht, key, read_terms
        dht.add_validators([StatementValidator(key, read_terms)])

    def store(self, envelope: bytes, timeout: float = 10.0) -> bool:
        """Until it expires by its own word; anybody may store it again. :returns: whether some node took it

        Raises TokenError for what is no such statement.
        """
        expires, _ = self._read_terms(envelope)
        with suppress(Exception):  # nobody answers in time
            return bool(self._dht.store(self._key, envelope, expires, return_future=True).result(timeout))
        return False

    def fetch(self, timeout: float = 10.0) -> bytes | None:
        """The newest that the DHT has and that is still good."""
        found: ValueWithExpiration | None = None
        with suppress(Exception):  # nobody answers in time
            found = self._dht.get(self._key, latest=True, return_future=True).result(timeout)
        if found is None or not isinstance(found.value, bytes) or found.expiration_time < time.time():
            return None
        return found.value
