"""The example of docs/formats.md runs as printed."""

import re
from pathlib import Path

import pytest

from pipegraph.errors import ShardError
from pipegraph.storage.formats import format_of, known_suffixes
from pipegraph.storage.shard_files import BytesFile

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"


def test_the_format_of_the_page_reads_its_records_and_refuses_half_ones() -> None:
    code = next(c for c in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "class " in c)
    exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})
    form = format_of("a.cifar")
    data = b"".join(bytes([i]) + bytes(3072) for i in range(10))
    assert [s["label"] for s in form.samples(BytesFile(data))] == list(range(10))
    assert [b.samples for b in form.index(BytesFile(data), 3 * 3073)] == [3, 3, 3, 1]
    with pytest.raises(ShardError, match="behind a whole record"):
        list(form.samples(BytesFile(data[:-1])))


def test_the_page_lists_every_suffix() -> None:
    page = PAGE.read_text().replace("(and `.ndjson.*`)", "`.ndjson.gz` `.ndjson.zst`")
    registered_by_tests = {".cifar", ".pairs"}
    assert [s for s in known_suffixes() if f"`{s}`" not in page and s not in registered_by_tests] == []
