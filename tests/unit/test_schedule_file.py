"""A user's own schedule: torch's CSV form is read as torch writes it, and whatever cannot run is refused by name."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.pipeline.schedule import SCHEDULES, Table, find_schedule
from lightning_hybrid.pipeline.schedule_file import parse_schedule, read_schedule

GOOD = "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"


def write_as_torch_does(path: Path, name: str, num_ranks: int, num_microbatches: int) -> None:
    """Have torch order a schedule and dump it, idle cells and all."""
    spec, kind = SCHEDULES[name.lower()], get_schedule_class(name)
    numbers: Any = SimpleNamespace(
        pp_group_size=num_ranks,
        n_local_stages=spec.stages_per_rank,
        _stages=[None] * spec.stages_per_rank,
        _num_stages=num_ranks * spec.stages_per_rank,
        num_stages=num_ranks * spec.stages_per_rank,
        _n_microbatches=num_microbatches,
        microbatches_per_round=num_ranks,
    )
    order = {rank: kind._calculate_single_rank_operations(numbers, rank) for rank in range(num_ranks)}  # type: ignore[attr-defined]
    PipelineScheduleMulti._dump_csv(SimpleNamespace(pipeline_order=order), str(path))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name, spec in SCHEDULES.items() if spec.stages_per_rank == 2])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_what_torch_dumps_is_the_schedule_itself(name: str, num_ranks: int, tmp_path: Path) -> None:
    known = SCHEDULES[name]
    write_as_torch_does(tmp_path / "own.csv", known.name, num_ranks, 2 * num_ranks)
    spec = find_schedule(str(tmp_path / "own.csv"))
    assert spec.table(num_ranks, 2 * num_ranks, 2) == known.table(num_ranks, 2 * num_ranks, 2)
    assert (spec.name, spec.sizes) == ("own.csv", (num_ranks, 2 * num_ranks, 2 * num_ranks))
    assert (spec.splits_backward, spec.forwards_first) == (known.splits_backward, known.forwards_first)
    for rank in range(num_ranks):
        assert spec.stages_of_rank(rank, num_ranks, 2) == known.stages_of_rank(rank, num_ranks, 2)
        assert spec.rank_at(rank, num_ranks, 2) == known.rank_at(rank, num_ranks, 2)
    assert spec.forward_only(num_ranks, 3, 2) == known.forward_only(num_ranks, 3, 2)
    assert spec.all_forward_then_backward(num_ranks, 3, 2) == known.all_forward_then_backward(num_ranks, 3, 2)


def test_a_specification_pickles() -> None:
    for spec in [*SCHEDULES.values(), parse_schedule("own.csv", GOOD)]:
        again = pickle.loads(pickle.dumps(spec))
        sizes = (2, 4 if spec.sizes is None else 2, spec.stages_per_rank)
        assert again.name == spec.name and again.table(*sizes) == spec.table(*sizes)


def test_stages_may_be_uneven_and_anywhere() -> None:
    text = "1F0,1F1,1B0,1B1\n0F0,0F1,2F0,2B0,2F1,2B1,0B0,0B1\n"
    spec = parse_schedule("own.csv", text)
    assert spec.sizes == (2, 3, 2) and spec.num_stages(2, spec.stages_per_rank) == 3
    assert [spec.stages_of_rank(rank, 2, 2) for rank in (0, 1)] == [[1], [0, 2]]
    assert spec.rank_at(0, 2, 2) == 1  # global rank 0 has the last stage


@pytest.mark.parametrize("last", [0, 1, 2, 3])
def test_coordinates_and_ranks_are_one_to_one(last: int) -> None:
    """Wherever the last stage is, coordinate 0 has it, and the way back is the same."""
    order = [rank for rank in range(4) if rank != last] + [last]
    rows = [f"{order.index(rank)}F0,{order.index(rank)}B0" for rank in range(4)]
    spec = parse_schedule("own.csv", "\n".join(rows))
    ranks = [spec.rank_at(coordinate, 4, 1) for coordinate in range(4)]
    assert ranks[0] == last and sorted(ranks) == [0, 1, 2, 3]
    assert [spec.rank_at(rank, 4, 1) for rank in ranks] == [0, 1, 2, 3]


def test_the_table_runs_only_its_own_sizes() -> None:
    spec = parse_schedule("own.csv", GOOD)
    table: Table = spec.table(2, 2, 1)
    assert [str(action) for action in table[1]] == ["1F0", "1B0", "1F1", "1B1"]
    table[1].clear()
    assert spec.table(2, 2, 1)[1], "the caller got the specification's own list"
    with pytest.raises(ConfigurationError, match=r"own.csv.*2 rows.*pipeline_parallel_size=4; use .*=2"):
        spec.table(4, 2, 1)
    with pytest.raises(ConfigurationError, match=r"own.csv.*2 micro-batches, not 6; use num_microbatches="):
        spec.table(2, 6, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"no action in it; use one row for each rank"),
        ("0F0,0B0\n,,\n1F0,1B0", r"row 2 \(rank 1\) has no action; use"),
        ("0F0,0B0\n1F0,1X0", r"row 2 \(rank 1\), cell 2: '1X0' is no action; use"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0", r"row 1 \(rank 0\), cell 2: '0SEND_F0'.*format=\"compute_only\""),
        ("0F0,0F1,0B0\n1F0,1F1,1B0,1B1", r"0B1 is missing; change"),
        ("0F0,0B0,0B1\n1F0,1F1,1B0,1B1", r"0F1 is missing; change"),
        ("0F0,0I0\n1F0,1B0", r"0W0 is missing; change"),
        ("0F0,0W0\n1F0,1B0", r"0I0 is missing; change"),
        ("0F0\n1F0,1B0", r"0B0 is missing; change"),
        ("0F0,0F0,0B0\n1F0,1B0", r"0F0 is there 2 times; change"),
        ("0F0,0B0\n1F0,1B0,1B0", r"1B0 is there 2 times; change"),
        ("0F0,1F0,1B0\n1F1,0B0", r"stage 1 is on rank 0 and, by 1F1, on rank 1; .*change"),
        ("0F0,0B0\n2F0,2B0", r"there is a stage 2 but no stage 1; change"),
        ("0F0,0B0,0F2,0B2\n1F0,1B0,1F2,1B2", r"there is a micro-batch 2 but no micro-batch 1; change"),
        ("0F0,0B0,0I0,0W0\n1F0,1B0", r"0B0, 0I0, 0W0 are there together; use"),
        ("0F0,0B0,0W0\n1F0,1B0", r"0B0, 0W0 are there together; use"),
        ("0F0,0B0\n1B0,1F0", r"waits for itself: rank 0 at 0B0, rank 1 at 1B0. Change"),
    ],
)
def test_what_cannot_run_is_refused_with_its_place(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=rf'schedule="own.csv": .*{words}'):
        Hybrid3DStrategy(schedule=path)


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        GOOD.replace("0B0", "0I0,0W0"),
        GOOD.replace("\n", "\r\n"),
        GOOD + "\n\n",
        f"\ufeff{GOOD}",
        GOOD.replace("0F1,,", "(0F1;0B0)OVERLAP_F_B,").replace(",0B0,,0B1", ",0B1").replace("0B1", "0B1,0REDUCE_GRAD"),
    ],
)
def test_other_ways_to_write_it(text: str, tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_bytes(text.encode())
    kinds = {action.kind.value for row in read_schedule(path).table(2, 2, 1).values() for action in row}
    assert kinds == ({"F", "B", "I", "W"} if "0I0" in text else {"F", "B"})


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none.csv.*cannot be read.*No such file.*use the path"):
        Hybrid3DStrategy(schedule=str(tmp_path / "none.csv"))
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match=r"bytes.csv.*cannot be read"):
        Hybrid3DStrategy(schedule=str(tmp_path / "bytes.csv"))


def test_the_strategy_takes_degrees_from_the_rows(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(GOOD)
    strategy = Hybrid3DStrategy(schedule=tmp_path / "own.csv", tensor_parallel_size=1)
    assert strategy.choice.degrees["pipeline_parallel_size"] == 2
    with pytest.raises(ConfigurationError, match=r'stages_per_rank=2.*own.csv.*use stages_per_rank="auto"'):
        Hybrid3DStrategy(schedule=tmp_path / "own.csv", stages_per_rank=2)
