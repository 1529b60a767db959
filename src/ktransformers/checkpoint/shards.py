"""The tensors of a safetensors checkpoint by name, in one file or many.

Names, shapes and dtypes come from the headers; data is memory-mapped, so a tensor that was read occupies page cache but
no private memory. `release` drops the mappings; tensors in use keep theirs. Only safetensors is read: the older formats
are pickles, which run code when opened.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ktransformers.checkpoint.finite import all_finite
from ktransformers.checkpoint.matrix import TensorRef
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import read_json_object, short

SINGLE_FILE = "model.safetensors"
MAX_NAME_CHARACTERS = 4000  # of a tensor; names are matched by regular expressions
INDEX_FILE = "model.safetensors.index.json"


class Shards:
    def __init__(self, files: Iterable[str | Path]) -> None:
        self._handles: dict[Path, Any] = {}  # safe_open, whose methods are not annotated
        self._files: dict[str, Path] = {}  # by tensor name
        self._refs: dict[str, TensorRef] = {}
        self._finite: set[str | tuple[str, int]] = set()  # tensors, or rows of them, that were looked at
        for file in map(Path, files):
            if file.suffix != ".safetensors":
                raise InputError(str(file), "a file of another format", "a .safetensors file", "convert the checkpoint")
            for name in self._handle(file).keys():  # noqa: SIM118 (not a mapping)
                if len(name) > MAX_NAME_CHARACTERS:
                    given = f"a tensor with a name of {len(name)} characters"
                    raise InputError(str(file), given, f"at most {MAX_NAME_CHARACTERS}")
                if name in self._files:
                    raise InputError(name, f"it in {self._files[name].name} and in {file.name}", "it in one file")
                self._files[name] = file
        self.release()

    @classmethod
    def of_directory(cls, directory: str | Path) -> Shards:
        """A local Hugging Face directory: `model.safetensors.index.json` and its files, or `model.safetensors`."""
        directory = Path(directory)
        index = directory / INDEX_FILE
        if not index.is_file():
            if not (directory / SINGLE_FILE).is_file():
                raise InputError(
                    str(directory), f"a directory with neither {INDEX_FILE} nor {SINGLE_FILE}", "one of them"
                )
            return cls([directory / SINGLE_FILE])
        weight_map = read_weight_map(index)
        shards = cls(directory / file for file in sorted(set(weight_map.values())))
        for name, file in weight_map.items():
            actual = shards._files.get(name)
            if actual is None or actual.name != file:
                raise InputError(
                    name, f"no such tensor in {directory / file}", f"what {INDEX_FILE} says", "download it again"
                )
        return shards

    @property
    def names(self) -> list[str]:
        return list(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def file(self, name: str) -> Path:
        return self._files[name]

    def ref(self, name: str) -> TensorRef:
        """Name, dtype and shape from the header."""
        if name not in self._refs:
            header = self._handle(self._files[name]).get_slice(name)
            self._refs[name] = TensorRef(name, str(header.get_dtype()), tuple(header.get_shape()))
        return self._refs[name]

    def metadata(self, file: Path) -> dict[str, str]:
        """What the header of a file says in addition to its tensors."""
        return dict(self._handle(file).metadata() or {})

    def shape(self, name: str) -> tuple[int, ...]:
        return self.ref(name).shape

    def dtype(self, name: str) -> str:
        """In the spelling of safetensors: BF16, F16, F32, F8_E4M3, U8, ..."""
        return self.ref(name).dtype

    def read(self, name: str) -> Tensor:
        """The tensor in mapped memory, which must not be written to; a copy where the file has it at an address that
        its dtype does not allow, because a header may have any length."""
        try:
            tensor: Tensor = self._handle(self._files[name]).get_tensor(name)
        except (SafetensorError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            given = f"{self.dtype(name)} {list(self.shape(name))} that torch does not open ({error})"
            raise InputError(f"{self._files[name]}: {name}", given, "a tensor of a dtype that torch has") from None
        return tensor.clone() if tensor.data_ptr() % tensor.element_size() else tensor

    def read_finite(self, name: str, e8m0: bool = False) -> Tensor:
        """As `read`; a NaN or an infinite number in it is an error. `e8m0`: its bytes are exponents."""
        return self._require_finite(name, name, self.read(name), e8m0)

    def read_finite_row(self, name: str, row: int, e8m0: bool = False) -> Tensor:
        """`read_finite(name)[row]`; the bytes of other rows are not read."""
        return self._require_finite((name, row), name, self.read(name)[row], e8m0)

    def _require_finite(self, key: str | tuple[str, int], name: str, tensor: Tensor, e8m0: bool) -> Tensor:
        if key not in self._finite:
            if not all_finite(tensor, e8m0=e8m0):
                where = f"{self._files[name]}: {name}"
                raise InputError(where, "NaN or infinite numbers", "finite ones", "the file is damaged")
            self._finite.add(key)
        return tensor

    def release(self) -> None:
        """Close the files; the next access opens them again."""
        self._handles.clear()

    def _handle(self, file: Path) -> Any:
        if file not in self._handles:
            try:
                self._handles[file] = safe_open(str(file), framework="pt", device="cpu")
            except FileNotFoundError:
                raise InputError(str(file), "no such file", "a part of the checkpoint", "download it again") from None
            except (SafetensorError, OSError) as error:
                raise InputError(
                    str(file), f"a file that does not open ({error})", "safetensors", "download it again"
                ) from error
        return self._handles[file]


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor -> file in the directory of the index."""
    weight_map = read_json_object(index, "JSON with a weight_map").get("weight_map")
    if not isinstance(weight_map, dict):
        raise InputError(f"{index}: weight_map", short(weight_map), "an object: tensor -> file")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise InputError(f"{index}: weight_map.{short(name)}", short(file), "the name of a file in its directory")
    return weight_map
