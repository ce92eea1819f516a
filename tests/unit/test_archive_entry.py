"""The schema: what is written reads back equal, what is damaged is refused by the name of the field."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import pytest
import torch

from lightning_hybrid.archive import Entry, Result, fingerprint_module, fingerprint_parameters
from lightning_hybrid.archive.entry import REVISION, SCHEMA, new_id, now
from lightning_hybrid.archive.surroundings import detect_hardware, detect_software, redact
from lightning_hybrid.errors import ArchiveError
from tests.unit.archive_entries import GPT, make_entry


def changed(**changes: Any) -> str:
    """A document with top-level or dotted ("result__status") values replaced; ``...`` removes one."""
    document = json.loads(make_entry().to_json())
    for path, value in changes.items():
        *outer, last = path.split("__")
        target = document
        for key in outer:
            target = target[key]
        if value is ...:
            del target[last]
        else:
            target[last] = value
    return json.dumps(document)


def test_round_trip() -> None:
    entry = make_entry(parent="older")
    assert Entry.from_json(entry.to_json()) == entry


def test_document_reads_well_and_diffs_well() -> None:
    text = make_entry().to_json()
    document = json.loads(text)
    assert (document["schema"], document["revision"]) == (SCHEMA, REVISION)
    assert list(document) == sorted(document)
    assert text.endswith("}\n")
    assert '\n  "degrees": {\n    "data_parallel_size": 2,' in text


@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan])
def test_diverged_loss_survives_in_strict_json(loss: float) -> None:
    text = make_entry(result=Result(last_loss=loss)).to_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    again = Entry.from_json(text).result.last_loss
    assert again is not None
    assert str(again) == str(loss)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"result__status": "great"}, "entry.result.status is 'great'; it must be one of 'running'"),
        ({"result__status": ...}, None),  # has a default
        ({"result__num_steps": "3"}, "entry.result.num_steps is '3', which is not an integer"),
        ({"result__num_steps": True}, "entry.result.num_steps is True, which is not an integer"),
        ({"result__step_time": "fast"}, "entry.result.step_time is 'fast', which is not a number or null"),
        ({"result__breakdown": {"compute": "x"}}, "entry.result.breakdown.compute is 'x'"),
        ({"result": []}, "entry.result is .*, which is not an object"),
        ({"model__hash": ...}, "entry.model.hash is missing"),
        ({"degrees__tensor_parallel_size": 0}, "tensor_parallel_size=0 must be an integer of at least 1"),
        ({"degrees__tensor_parallel_size": 4}, r"make 16 devices, but hardware.num_devices is 8"),
        ({"settings__tp_plan": {"*.up": 3}}, "entry.settings.tp_plan"),
        ({"id": "../../etc/passwd"}, "cannot be the id of an entry"),
        ({"id": ".hidden"}, "cannot be the id of an entry"),
        ({"time": "yesterday"}, "time is 'yesterday', which is not of the form"),
        ({"color": "red"}, "entry has unknown fields: color"),
        ({"result__speed": 3}, "entry.result has unknown fields: speed"),
        ({"schema": 2}, "its schema is 2, this release reads schema 1; update lightning_hybrid"),
        ({"schema": "1"}, "it is not an archive entry"),
        ({"schema": True}, "it is not an archive entry"),
        ({"schema": ...}, "it is not an archive entry"),
        ({"model__num_parameters": 10**400}, "entry.model.num_parameters is an integer of 401 digits"),
        ({"result__step_time": 10**400}, "entry.result.step_time is"),
        ({"model__model_class": "\ud800"}, r"entry.model.model_class is '\\ud800', in which '\\ud800' is no text"),
        ({"hardware__kind": "\x1b[2J"}, r"entry.hardware.kind is '\\x1b\[2J', in which '\\x1b' is no text"),
        ({"result__breakdown": {"\udfff": 1.0}}, r"entry.result.breakdown is '\\udfff'"),
        ({"revision": "new"}, "entry.revision is 'new', which is not an integer"),
    ],
)
def test_damage_is_refused_by_name(changes: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert Entry.from_json(changed(**changes)).result.status == "running"
    else:
        with pytest.raises(ArchiveError, match=message):
            Entry.from_json(changed(**changes))


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", "3", '"schema"', "[" * 100_000, "{}"])
def test_what_is_no_entry_is_refused(text: str) -> None:
    with pytest.raises(ArchiveError, match="it is not"):
        Entry.from_json(text)


def test_every_truncation_is_refused() -> None:
    text = make_entry().to_json()
    for length in range(len(text) - 2):  # without the final newline it is whole
        with pytest.raises(ArchiveError):
            Entry.from_json(text[:length])


def test_unknown_fields_of_a_newer_revision_are_ignored() -> None:
    text = changed(revision=REVISION + 1, color="red", result__speed=3)
    assert dataclasses.replace(Entry.from_json(text), revision=REVISION) == make_entry()
    with pytest.raises(ArchiveError, match=r"entry\.model\.hash is missing"):  # but what we know is still checked
        Entry.from_json(changed(revision=REVISION + 1, model__hash=...))


def test_fingerprint_depends_on_names_and_shapes_only() -> None:
    table = [("a.weight", (4, 3), "float32"), ("a.bias", (4,), "float32"), ("n", (), "bfloat16")]
    one = fingerprint_parameters("M", table)
    assert (one.num_parameters, one.dtype, len(one.hash)) == (17, "float32", 16)
    assert fingerprint_parameters("M", table[::-1]) == one
    assert fingerprint_parameters("M", [(n, s, "bfloat16") for n, s, _ in table]).hash == one.hash
    assert fingerprint_parameters("M", [("b.weight", (4, 3), "float32"), *table[1:]]).hash != one.hash
    assert fingerprint_parameters("M", [("a.weight", (3, 4), "float32"), *table[1:]]).hash != one.hash
    assert fingerprint_parameters("M", []).num_parameters == 0


def test_fingerprint_of_a_module_is_the_same_on_meta_and_counts_shared_weights_once() -> None:
    def build() -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model

    real = fingerprint_module(build(), num_blocks=2)
    with torch.device("meta"):
        meta = fingerprint_module(build(), num_blocks=2)
    assert real == meta
    assert (real.model_class, real.num_parameters, real.num_blocks) == ("Sequential", 15, 2)


def test_ids_sort_by_time_and_differ() -> None:
    ids = {new_id(GPT, "2026-07-31T09:30:00Z") for _ in range(50)}
    assert len(ids) == 50
    assert all(re.fullmatch(r"20260731T093000Z-GPT-aaaa0000-[0-9a-f]{6}", name) for name in ids)
    assert max(ids) < new_id(GPT, "2026-07-31T09:30:01Z")
    odd = dataclasses.replace(GPT, model_class="Ünï<lambda>/..")
    assert make_entry(new_id(odd, now())).id.count("/") == 0


def test_messages_lose_their_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "s3cr3t-value")
    monkeypatch.setenv("HARMLESS", "harmless-value")
    text = redact("GET https://me:pass@host/x failed with s3cr3t-value and harmless-value")
    assert text == "GET https://***@host/x failed with *** and harmless-value"
    assert len(redact("x" * 10_000)) < 2100


def test_hardware_and_software_of_this_machine() -> None:
    hardware = detect_hardware("cpu", num_devices=4)
    assert (hardware.device, hardware.num_devices, hardware.num_nodes) == ("cpu", 4, 1)
    assert hardware.kind
    assert hardware.memory_bytes is None or hardware.memory_bytes > 2**28
    assert detect_hardware("cpu", num_devices=4) == hardware
    assert detect_software()["torch"] == torch.__version__
