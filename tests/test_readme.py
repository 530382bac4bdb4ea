"""What the README says holds: its code runs, and its lists are complete."""

import re
import runpy
from dataclasses import fields
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_blocks(text: str) -> list[str]:
    """What stands between ```python and ```."""
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


PRINTED = [  # by each block, among other things
    ["gather 0: params['w']", "reduce-scatter"],
    ["0 tensor([1., 1., 1., 1., 1., 1.])"],
]


@pytest.mark.parametrize("number", range(len(PRINTED)))
def test_code_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    block = code_blocks(README)[number]
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    for text in PRINTED[number]:
        assert text in printed


def test_code_blocks_are_found() -> None:
    assert code_blocks("a\n```python\nx = 1\n```\nb\n```\ny\n```\n") == ["x = 1\n"]
    assert len(code_blocks(README)) == len(PRINTED)


def test_options_of_the_example_are_listed_with_their_defaults() -> None:
    config = runpy.run_path(str(ROOT / "examples" / "train_llama.py"))["Config"]
    rows = re.findall(r"^\| `--(\S+)` \| (\S+) \|", README, flags=re.MULTILINE)
    shown = {"True": "on", "False": "off", "": "none"}
    defaults = {f.name.replace("_", "-"): str(f.default) for f in fields(config)}
    assert rows == [(name, shown.get(text, text)) for name, text in defaults.items()]


def test_every_module_is_on_the_map() -> None:
    package = ROOT / "yafsdp_fn"
    modules = [str(path.relative_to(package)) for path in package.rglob("_*.py")]
    named = re.findall(r"^\* `(\S+\.py)`: ", README, flags=re.MULTILINE)
    assert sorted(named) == sorted(m for m in modules if "__init__" not in m)


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#]+)\)", README))
def test_links_into_the_repository_exist(target: str) -> None:
    assert target.startswith("https://") or (ROOT / target).exists()


def test_commands_name_what_exists() -> None:
    for path in re.findall(r"python (examples/\S+\.py)", README):
        assert (ROOT / path).exists(), path
