"""Everything here needs GPUs and NCCL; elsewhere it is skipped."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # `device_count` asks the driver's management library, so that the pytest process can still be forked.
    if not torch.cuda.device_count():
        for item in items:
            if "tests/gpu" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
