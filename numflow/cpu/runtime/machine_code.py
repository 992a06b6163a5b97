"""A linker for compiled kernels, so that a process whose kernels are cached on disk needs no compiler.

Importing Numba and LLVM takes 0.4 s and 150 MB. A cached kernel is an ELF object: sections of code and constants,
symbols, and relocations, which tell where addresses must be filled in after the sections are placed in memory. This
module supports x86-64 on Linux; elsewhere Numba loads its own files.
"""

import ctypes
import mmap
import platform
import struct
import sys

import numpy as np

from numflow.cpu.memory.buffers import anonymous
from numflow.cpu.runtime.symbols import address_of

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = np.dtype([("name", "<u4"), ("type", "<u4"), ("flags", "<u8"), ("address", "<u8"), ("offset", "<u8"),
                     ("size", "<u8"), ("link", "<u4"), ("info", "<u4"), ("align", "<u8"), ("entry", "<u8")])
_SYMBOL = np.dtype([("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"),
                    ("size", "<u8")])
_RELOCATION = np.dtype([("offset", "<u8"), ("type", "<u4"), ("symbol", "<u4"), ("addend", "<i8")])

_BITS, _SYMBOLS, _RELOCATIONS, _NO_BITS = 1, 2, 4, 8  # types of sections
_WRITABLE, _IN_MEMORY = 1, 2                          # flags of sections
_X86_64 = 62
_UNDEFINED, _ABSOLUTE, _COMMON = 0, 0xFFF1, 0xFFF2    # section indices of symbols outside of sections

# Relocations of x86-64: S the symbol's address, A the addend, P the relocated address, G the address of a word of
# memory that holds the symbol's address.
_ADDRESS, _RELATIVE, _CALL, _ADDRESS32, _SIGNED32, _RELATIVE64 = 1, 2, 4, 10, 11, 24  # S + A, or S + A - P
_THROUGH_WORD = (9, 41, 42)                                                           # G + A - P
_JUMP = b"\xff\x25\x02\x00\x00\x00\x66\x90"  # jmp [next 8 bytes], padded to 8 bytes


class UnknownCodeError(Exception):
    """An object this linker cannot put into memory."""


def supported() -> bool:
    """Whether this linker supports the platform's objects."""
    return sys.platform.startswith("linux") and platform.machine() == "x86_64"


class MachineCode:
    """An object file linked into executable memory, which is freed with this."""

    def __init__(self, elf: bytes, entry: str):
        """Link an object; `address` becomes the address of the function whose name begins with `entry`.

        Raises:
            UnknownCodeError: it is not an object file, or needs features that are not supported.
        """
        self._elf = elf
        try:
            self._read()
        except (struct.error, ValueError, IndexError) as error:
            raise UnknownCodeError(f"not an object file: {error}") from None
        fixed, total = self._place()
        self._memory = anonymous(total, mmap.PROT_READ | mmap.PROT_WRITE)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._fill()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        if fixed and libc.mprotect(self._base, fixed, mmap.PROT_READ | mmap.PROT_EXEC):
            raise UnknownCodeError(f"memory cannot be made executable (error {ctypes.get_errno()})")
        self.address = self._begins_with(entry)

    def _begins_with(self, entry: str) -> int:
        for index in range(len(self._symbols)):
            if self._symbols[index]["section"] and self._name(index).startswith(entry):
                return self._symbol(index)
        raise UnknownCodeError(f"no function {entry!r}")

    def _read(self) -> None:
        magic, _, machine, *_, sections_at, _, _, _, _, _, count, _ = _HEADER.unpack_from(self._elf)
        if magic[:6] != b"\x7fELF\x02\x01" or machine != _X86_64:
            raise ValueError("another format")
        self._sections = np.frombuffer(self._elf, _SECTION, count, sections_at)
        table, = (s for s in self._sections if s["type"] == _SYMBOLS)
        self._symbols = self._content(table).view(_SYMBOL)
        self._names = self._content(self._sections[table["link"]]).tobytes()
        # Unwind tables are for exceptions and debuggers, which kernels do not have.
        self._placed = [i for i, s in enumerate(self._sections)
                        if s["flags"] & _IN_MEMORY and s["type"] in (_BITS, _NO_BITS)]

    def _content(self, section) -> np.ndarray:
        return np.frombuffer(self._elf, np.uint8, int(section["size"]), int(section["offset"]))

    def _place(self) -> tuple[int, int]:
        """Assign an offset in memory to everything; returns the end of code and constants, and the total size."""
        self._offsets: dict[int, int] = {}      # offsets of sections
        self._common: dict[int, int] = {}  # offsets of symbols that only reserve memory
        self._words: dict[int, int] = {}   # offsets of words with a symbol's address, each preceded by a jump to it
        end, page = 0, mmap.PAGESIZE
        for writable in (False, True):
            for i in self._placed:
                section = self._sections[i]
                if bool(section["flags"] & _WRITABLE) == writable:
                    self._offsets[i] = end = -(-end // max(1, int(section["align"]))) * max(1, int(section["align"]))
                    end += int(section["size"])
            if not writable:
                for relocations in self._relocations():
                    for r in relocations:
                        if self._symbols[r["symbol"]]["section"] == _UNDEFINED or r["type"] in _THROUGH_WORD:
                            self._words.setdefault(int(r["symbol"]), 0)
                for count, symbol in enumerate(self._words):
                    self._words[symbol] = -(-end // 16) * 16 + 16 * count + 8
                end = max([end, *(at + 8 for at in self._words.values())])
                fixed = end = -(-end // page) * page
        for index in np.flatnonzero(self._symbols["section"] == _COMMON):
            align = max(1, int(self._symbols[index]["value"]))  # the value of a common symbol is its alignment
            self._common[int(index)] = end = -(-end // align) * align
            end += int(self._symbols[index]["size"])
        return fixed, max(end, 1)

    def _relocations(self) -> list[np.ndarray]:
        """Relocations of the sections that are in memory."""
        return [self._content(s).view(_RELOCATION) for s in self._sections
                if s["type"] == _RELOCATIONS and s["info"] in self._placed]

    def _fill(self) -> None:
        for i, offset in self._offsets.items():
            if self._sections[i]["type"] == _BITS:
                content = self._content(self._sections[i])
                self._memory[offset:offset + len(content)] = content.tobytes()
        for symbol, offset in self._words.items():
            self._memory[offset - 8:offset + 8] = _JUMP + struct.pack("<Q", self._symbol(symbol))
        for section in self._sections:
            if section["type"] == _RELOCATIONS and section["info"] in self._placed:
                begin = self._offsets[int(section["info"])]
                for offset, kind, symbol, addend in self._content(section).view(_RELOCATION).tolist():
                    self._relocate(begin + offset, kind, symbol, addend)

    def _relocate(self, at: int, kind: int, symbol: int, addend: int) -> None:
        place = self._base + at
        if kind in _THROUGH_WORD:
            value, size = self._base + self._words[symbol] + addend - place, 4
        elif kind == _CALL and symbol in self._words:
            value, size = self._base + self._words[symbol] - 8 + addend - place, 4
        elif kind in (_RELATIVE, _CALL):
            value, size = self._symbol(symbol) + addend - place, 4
        elif kind == _RELATIVE64:
            value, size = self._symbol(symbol) + addend - place, 8
        elif kind in (_ADDRESS, _ADDRESS32, _SIGNED32):
            value, size = self._symbol(symbol) + addend, 8 if kind == _ADDRESS else 4
        else:
            raise UnknownCodeError(f"relocation {kind}")
        low, high = (0, 1 << 32) if kind == _ADDRESS32 else (-(1 << 31), 1 << 31)
        if size == 4 and not low <= value < high:
            raise UnknownCodeError(f"{self._name(symbol)!r} lies too far away")
        self._memory[at:at + size] = (value % (1 << 8 * size)).to_bytes(size, "little")

    def _symbol(self, index: int) -> int:
        """Address of a symbol."""
        symbol = self._symbols[index]
        section, value = int(symbol["section"]), int(symbol["value"])
        if section == _UNDEFINED:
            try:
                return address_of(self._name(index))
            except KeyError:
                raise UnknownCodeError(f"nothing called {self._name(index)!r}") from None
        if section == _ABSOLUTE:
            return value
        if section == _COMMON:
            return self._base + self._common[index]
        if section not in self._offsets:
            raise UnknownCodeError(f"{self._name(index)!r} lies in a section that is not in memory")
        return self._base + self._offsets[section] + value

    def _name(self, index: int) -> str:
        begin = int(self._symbols[index]["name"])
        return self._names[begin:self._names.index(0, begin)].decode()
