"""What every test may ask for."""

import os
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    """Two torch threads unless the environment chose: the machines that run this have two cores."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(2)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real trajectories, `shared/data` beside the repository; absent in most clones."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs the real trajectories of ../shared/data, absent beside this clone")
    return folder
