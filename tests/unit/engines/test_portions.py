"""How the chunks of an exchange are divided into the tasks of a Ray cluster."""

import pytest

pytest.importorskip("ray")
from fedveil.engines.ray_cluster import portions


@pytest.mark.parametrize("cores", [1, 2, 3, 64])
@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 26, 129])
def test_every_chunk_is_in_one_task_and_no_core_is_left_without_work(count: int, cores: int) -> None:
    found = portions(count, cores)
    assert [number for portion in found for number in portion] == list(range(count))
    assert len(found) >= min(count, cores)
    sizes = [len(portion) for portion in found]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1
    assert sizes[0] <= max(1, -(-count // (2 * cores)))


def test_a_cluster_gets_fewer_tasks_than_chunks() -> None:
    assert [len(portion) for portion in portions(26, 2)] == [7, 7, 3, 3, 2, 2, 1, 1]
    assert [len(portion) for portion in portions(6, 2)] == [2, 2, 1, 1]
