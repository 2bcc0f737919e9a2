import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import CorruptData, FormatError
from stepwell.format.records import (
    FORMAT,
    Beat,
    Manifest,
    Rewind,
    RunRecord,
    Seen,
    ShardRecord,
    decode,
    encode,
)


def manifest() -> Manifest:
    return Manifest(
        run_id="r",
        step=1200,
        attempt="step-000001200.7-31",
        world=1,
        parts={"model": 10, "optimizer": 20},
        covers=[0],
        digests=[123],
        metrics={"loss": 0.5, "acc": "nan"},
        tags=["good"],
        parent="step-000001100.7-30",
        timeline=1,
        rewinds=[Rewind(1000, 7, 2)],
        made=1.5,
    )


def test_a_record_comes_back() -> None:
    back = decode(encode(manifest()), Manifest)
    back.seal = manifest().seal
    assert back == manifest()


def test_the_manifest_is_json_that_people_can_read() -> None:
    text = encode(manifest()).decode()
    assert json.loads(text)["step"] == 1200
    assert len(text.splitlines()) > 20


def test_a_partial_checkpoint_is_not_complete() -> None:
    record = manifest()
    assert record.complete
    record.absent = ["optimizer"]
    assert not record.complete
    record.absent, record.world = [], 2
    assert not record.complete


def test_any_flipped_bit_is_found() -> None:
    data = encode(manifest())
    for position in range(len(data)):
        for bit in (0x01, 0x80):
            bad = bytearray(data)
            bad[position] ^= bit
            with pytest.raises((CorruptData, FormatError)):
                decode(bytes(bad), Manifest, path="manifest.json")


@given(st.integers(0, 400))
def test_a_torn_record_is_found(length: int) -> None:
    data = encode(manifest())
    with pytest.raises((CorruptData, FormatError)):
        decode(data[: min(length, len(data) - 1)], Manifest)


def test_a_newer_format_says_what_it_needs() -> None:
    record = RunRecord(run_id="r", made=0.0)
    record.format, record.needs = FORMAT + 1, "9.9"
    with pytest.raises(FormatError, match="needs stepwell >= 9.9"):
        decode(encode(record), RunRecord)


def test_another_kind_of_record_is_refused() -> None:
    with pytest.raises(FormatError, match="not a Manifest"):
        decode(encode(Seen(attempts=[])), Manifest)


def test_a_seal_inside_the_values_is_not_the_seal() -> None:
    record = Seen(attempts=['"seal": "00000000"', '"seal":"12345678"'])
    assert decode(encode(record), Seen).attempts == record.attempts


def test_fields_of_later_versions_are_ignored() -> None:
    data = msgspec.json.decode(msgspec.json.encode(Beat(token="t", count=3)))

    class Later(Beat, kw_only=True):
        extra: int = 5

    assert decode(encode(Later(**data)), Beat).count == 3


def test_block_checksums_are_little_endian() -> None:
    shard = ShardRecord(file="m", size=1, data_start=0, leaves=b"", blocks=b"\x01\x00\x00\x00\x00\x00\x00\x80")
    assert shard.crcs().tolist() == [1, 0x80000000]
