"""Parts of files are what slices of their tensors are; broken files are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from chiasm import weight_copier
from chiasm.stored_tensor import StoredTensor, TensorFile
from chiasm.weight_copier import HostCopier, copier_for

TENSORS = {
    "matrix": torch.arange(7 * 12, dtype=torch.float32).view(7, 12).bfloat16(),
    "stack": torch.randn(3, 6, 10, generator=torch.Generator().manual_seed(0)),
    "vector": torch.arange(9, dtype=torch.float32),
    "small": torch.randn(4, 8).to(torch.float8_e4m3fn),
    "one": torch.tensor(2.5),
}


@pytest.fixture(name="path")
def path_(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "t.safetensors", metadata={"format": "pt"})
    return tmp_path / "t.safetensors"


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


def opened(path: Path) -> dict[str, StoredTensor]:
    return {tensor.name: tensor for tensor in TensorFile(path).tensors()}


def test_whole_tensors_of_every_dtype(path: Path) -> None:
    found = opened(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in found.items():
        assert tensor.shape == tuple(TENSORS[name].shape)
        read = tensor.whole().read().view(tensor.shape)
        assert read.dtype is TENSORS[name].dtype
        assert torch.equal(as_bytes(read), as_bytes(TENSORS[name]))


@pytest.mark.parametrize("rows", [(0, 7), (2, 5), (3, 3)])
@pytest.mark.parametrize("columns", [(0, 12), (5, 6), (3, 11)])
def test_rectangles_are_slices(path: Path, rows: tuple[int, int], columns: tuple[int, int]) -> None:
    own, across = slice(*rows), slice(*columns)
    block = opened(path)["matrix"].rectangle(own, across)
    expected = TENSORS["matrix"][own, across]
    assert torch.equal(block.read().view(expected.shape), expected)


def test_rectangles_of_one_of_several_matrices_and_parts_of_them(path: Path) -> None:
    block = opened(path)["stack"].rectangle(slice(1, 6), slice(2, 9), 2)
    expected = TENSORS["stack"][2, 1:6, 2:9]
    assert torch.equal(block.read().view(5, 7), expected)
    assert torch.equal(block.part(2, 3).read().view(3, 7), expected[2:])
    assert torch.equal(opened(path)["stack"].rows(1, 3).read().view(2, 6, 10), TENSORS["stack"][1:])
    assert torch.equal(opened(path)["vector"].rows(4, 7).read(), TENSORS["vector"][4:7])


def test_a_copier_takes_any_target(path: Path) -> None:
    arrived: list[int] = []
    copier = copier_for(torch.device("cpu"), arrived.append)
    assert isinstance(copier, HostCopier)
    target = torch.zeros(12, 7)
    copier.put(opened(path)["matrix"].whole(), target.t())
    copier.wait()
    copier.close()
    assert torch.equal(target.t(), TENSORS["matrix"].float())
    assert sum(arrived) == target.nbytes


def test_broken_files_are_refused_by_name(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    for number, broken in enumerate((b"", b"\x05", data[:40], b"\xff" * 64, data[:-4])):
        other = tmp_path / f"{number}.safetensors"
        other.write_bytes(broken)
        with pytest.raises(ValueError, match=rf"{number}\.safetensors"):
            TensorFile(other)


def test_a_dtype_that_does_not_fit_its_bytes_is_refused(tmp_path: Path) -> None:
    for dtype, size, told in (("F64", 2, "no whole safetensors file"), ("C64", 1, "of dtype C64")):
        entry = {"dtype": dtype, "shape": [size], "data_offsets": [0, 8]}
        header = json.dumps({"t": entry}).encode()
        path = tmp_path / f"{dtype}.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        with pytest.raises(ValueError, match=told):
            next(TensorFile(path).tensors()).whole()


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"a": entry, "b": entry}).encode()
    path = tmp_path / "overlap.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match="no whole safetensors file"):
        TensorFile(path)


def test_a_file_that_shrinks_while_it_is_read_is_noticed(path: Path) -> None:
    tensor = opened(path)["stack"]
    with path.open("r+b") as file:
        file.truncate(tensor.entry.begin + 100)
    with pytest.raises(ValueError, match="is cut short"):
        tensor.whole().read()


class _Now:
    """A stream or an event of a device that is done before it is asked."""

    def __init__(self, *_: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("lines", "buffer"), [(1 << 20, 1 << 20), (100, 64), (8, 16)])
def test_a_lane_fills_targets_of_any_order_and_dtype(
    path: Path, dtype: torch.dtype, lines: int, buffer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", _Now)
    monkeypatch.setattr(torch.cuda, "Event", _Now)
    monkeypatch.setattr(weight_copier, "_pinned", lambda count: torch.empty(count).byte())
    monkeypatch.setattr(weight_copier, "_LINES_BYTES", lines)
    monkeypatch.setattr(weight_copier, "_BUFFER_BYTES", buffer)
    lane = weight_copier._Lane(torch.device("cpu"))
    found, stack = opened(path), TENSORS["stack"]
    cases = [
        (found["stack"].whole(), stack, torch.empty(3, 6, 10, dtype=dtype)),
        (found["stack"].rows(1, 3), stack[1:3], torch.empty(2, 10, 6, dtype=dtype).mT),
        (
            found["stack"].rectangle(slice(1, 6), slice(2, 9), 2),
            stack[2, 1:6, 2:9],
            torch.empty(5, 7, dtype=dtype),
        ),
        (found["vector"].whole(), TENSORS["vector"], torch.empty(9, dtype=dtype)),
    ]
    for block, expected, target in cases:
        lane.copy(block, target)
        assert torch.equal(target, expected.to(dtype))
