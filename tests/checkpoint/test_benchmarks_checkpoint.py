"""Tests of the checkpoint benchmark: each row reports the right measurement."""

import hashlib

from benchmarks.checkpoint import _without_checksums
from megapg.checkpoint.archive import Seal


def test_without_checksums_there_is_none():
    def taken():
        seal, digest = Seal(), hashlib.sha256()
        seal.update(memoryview(b"x" * 9999))
        digest.update(b"x")
        return seal.number(), digest.digest()

    with _without_checksums():
        assert taken() == (Seal().number(), bytes(32))
    assert taken() != (Seal().number(), bytes(32))
