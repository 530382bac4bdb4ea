"""Options and hypothesis profiles of the test suite."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# Both profiles draw the same examples in every run, on every machine.
_COMMON = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("quick", max_examples=100, **_COMMON)
settings.register_profile("thorough", max_examples=1500, **_COMMON)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that wait for each other cost more than small operands do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough",
        action="store_true",
        help="draw many examples for each property (an hour instead of minutes)",
    )


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("thorough" if config.getoption("thorough") else "quick")
