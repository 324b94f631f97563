"""Reads the stacks and handled exceptions of a Python process's threads from its memory.

The process is not stopped, and nothing is sent to it or loaded into it. The cost is several hundred reads of
`/proc/PID/mem`. The kernel permits these to anybody who may trace the process: its user, or with Yama's
`ptrace_scope=1` only its ancestors, such as the agent for its workers.

Laws:

1. The process keeps running, so data may be torn, and a pointer may lead anywhere. Check each object's type, and bound
   each length. A mismatch ends that thread's stack.
2. Read only tested layouts: CPython 3.11 to 3.14 with a global lock, on 64-bit machines.
3. Open no file of the process: its symbols are in its memory too, and a file may be on a disk that hangs.

The layouts come from CPython's headers (`Include/internal/pycore_frame.h`, `cpython/pystate.h`, `cpython/code.h`), and
for the line and exception tables from `Objects/locations.md` and `InternalDocs/exception_handling.md`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

_MOST_THREADS, _MOST_FRAMES, _MOST_EXCEPTIONS, _MOST_TABLE = 64, 64, 8, 256 * 1024
_MOST_TEXT = 2048
"""Maximum number of characters to read from a text."""
_TRIES = 3
"""Attempts per process, since it changes while we read."""


class Unreadable(Exception):
    """The process cannot be read; the text says why."""


class UnknownPython(Unreadable):
    """The process runs a Python whose layout is unknown."""


class PythonFrame(NamedTuple):
    function: str
    file: str
    line: int


class HandledException(NamedTuple):
    """An exception that a thread is handling, or that is propagating.

    `cleans_up`: its handler is not an `except` but a `finally` or `with`, which passes it on. `frames` are those of
    its traceback, outermost first.
    """

    name: str
    text: str
    frames: tuple[PythonFrame, ...]
    cleans_up: bool

    @property
    def line(self) -> str:
        """The last line of its traceback."""
        return f"{self.name}: {self.text}" if self.text else self.name

    @property
    def traceback(self) -> str:
        places = (f'  File "{frame.file}", line {frame.line}, in {frame.function}' for frame in self.frames)
        return "\n".join(["Traceback (most recent call last):", *places, self.line])


class PythonThread(NamedTuple):
    """One thread. `frames` and `exceptions` are innermost first. `mark` changes with any of its calls or local
    variables. `arguments` are the texts and numbers passed to the innermost call, if that is a C function.
    """

    native_id: int
    frames: tuple[PythonFrame, ...]
    exceptions: tuple[HandledException, ...]
    mark: int
    arguments: tuple[str | int, ...]


class _Layout(NamedTuple):
    """Offsets for one version; constants below are common to all versions."""

    first_interpreter: int
    first_thread: int
    native_id: int
    exceptions: int
    """In a thread: the stack of handled exceptions."""
    raised: int
    """In a thread: the propagating exception."""
    frame: int
    """In the object at `frame_holder`: the innermost frame."""
    frame_holder: int
    """In a thread: the pointer to the object with the frame; -1 if that is the thread itself."""
    frame_code: int
    previous: int
    next_instruction: int
    """How many code units the frame's pointer is ahead of the executed instruction."""
    owner: int
    first_line: int
    variables: int
    """In a code object: the number of local variables."""
    instructions: int
    stack_size: int
    text: int
    """Where the characters start in a compact ASCII text."""
    locals: int
    """Where the local variables start in a frame."""
    items: int
    """Where the items start in a tuple."""
    catches: bytes
    """The instructions of an `except` that compares an exception's type and continues with another, and the instruction
    of an `except` without a type."""


_LAYOUTS = {
    0x030B: _Layout(40, 16, 160, 120, 104, 8, 56, 32, 48, 0, 69, 72, 76, 184, 68, 48, 72, 24, bytes((36, 114, 1))),
    0x030C: _Layout(40, 72, 144, 104, 96, 0, 56, 0, 8, 0, 70, 68, 72, 192, 64, 40, 72, 24, bytes((36, 114, 1))),
    0x030D: _Layout(632, 7344, 160, 120, 112, 72, -1, 0, 8, 1, 70, 68, 72, 200, 64, 40, 72, 24, bytes((7, 97, 32))),
    0x030E: _Layout(808, 7344, 160, 120, 112, 72, -1, 0, 8, 1, 74, 68, 72, 208, 64, 40, 80, 32, bytes((6, 100, 31))),
}
_INSTRUCTION, _FRAME_SIZE = 56, 80
_CODE_SIZE = 208
_EXCEPTION_TABLE, _FILE, _QUALNAME, _LINES = 40, 112, 128, 136
_OF_C = 3
"""The first frame owner that means a call from C."""
_TAG = 3
"""The lowest bits of a reference in a frame of Python 3.14; all of them are set for a small number."""
_EXCEPTION_SIZE, _ARGS, _TRACEBACK = 48, 24, 40
_TYPE_SIZE, _TYPE_NAME, _TYPE_FLAGS = 176, 24, 168
_IS_EXCEPTION, _IS_TUPLE, _IS_STR, _IS_INT = 1 << 30, 1 << 26, 1 << 28, 1 << 24
_FREE_THREADED_AT, _COOKIE = 16, b"xdebugpy"


def read_python(pid: int) -> tuple[PythonThread, ...]:
    """Read the threads of a Python process, main thread first. Takes a few milliseconds.

    Raises:
        Unreadable: the process is gone, may not be read, or has an unsupported Python.
    """
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        raise Unreadable("the process has ended") from None
    except OSError:
        raise Unreadable(
            "the kernel does not allow reading the process; grant the agent CAP_SYS_PTRACE, or set "
            "kernel.yama.ptrace_scope=0"
        ) from None
    try:
        last = ""
        for _ in range(_TRIES):
            try:
                return _Reader(pid, memory).threads()
            except (OSError, ValueError, OverflowError, struct.error) as error:
                last = str(error)
        raise Unreadable(f"its memory is changing too fast ({last})")
    finally:
        os.close(memory)


class _Reader:
    """A single read of one process."""

    def __init__(self, pid: int, memory: int) -> None:
        self._pid = pid
        self._memory = memory
        symbols = _python_symbols(self, pid)
        version = self.number(symbols[_VERSION]) >> 16 if _VERSION in symbols else 0x030A
        if version not in _LAYOUTS:
            raise UnknownPython(f"the stacks of Python {version >> 8}.{version & 255} cannot be read")
        self.layout = _LAYOUTS[version]
        self._runtime = symbols["_PyRuntime"]
        self._code_type = symbols["PyCode_Type"]
        self._version = version
        if self.read(self._runtime, 8) == _COOKIE and self.number(self._runtime + _FREE_THREADED_AT):
            raise UnknownPython("the stacks of a free-threaded Python cannot be read")
        self._codes: dict[int, _Code] = {}

    # Memory

    def read(self, address: int, size: int) -> bytes:
        """Read memory. Raises OSError if nothing is mapped there."""
        found = os.pread(self._memory, size, address)
        if len(found) != size:
            raise OSError("the read returned too few bytes")
        return found

    def number(self, address: int) -> int:
        return int.from_bytes(self.read(address, 8), "little")

    def c_text(self, address: int) -> str:
        raw = os.pread(self._memory, _MOST_TEXT, address)
        return raw.partition(b"\0")[0].decode("utf-8", errors="replace")

    # Threads

    def threads(self) -> tuple[PythonThread, ...]:
        layout, found = self.layout, list[PythonThread]()
        interpreter = self.number(self._runtime + layout.first_interpreter)
        address = self.number(interpreter + layout.first_thread) if interpreter else 0
        while address and len(found) < _MOST_THREADS:
            found.append(self._thread(address))
            address = self.number(address + 8)  # `next`; the oldest thread, usually the main one, comes last
        if not found:
            raise Unreadable("Python has not started yet, or has exited")
        found.reverse()
        found.sort(key=lambda thread: thread.native_id != self._pid)
        return tuple(found)

    def _thread(self, address: int) -> PythonThread:
        layout = self.layout
        native_id = self.number(address + layout.native_id)
        holder = address if layout.frame_holder < 0 else self.number(address + layout.frame_holder)
        frames, marks = list[PythonFrame](), list[tuple[int, int, bytes]]()
        running, arguments = dict[int, int](), tuple[str | int, ...]()
        frame = self.number(holder + layout.frame)
        while frame and len(frames) < _MOST_FRAMES:
            raw = self.read(frame, _FRAME_SIZE)
            code_address = _number_in(raw, layout.frame_code) & ~_TAG
            if raw[layout.owner] < _OF_C:
                code = self._code(code_address)
                at = _number_in(raw, _INSTRUCTION) - code.instructions - 2 * layout.next_instruction
                frames.append(PythonFrame(code.function, code.file, code.line(at)))
                variables = self.read(frame + layout.locals, 8 * code.variables)
                marks.append((code_address, at, variables))
                running.setdefault(code_address, at)
                if len(frames) == 1:
                    arguments = self._arguments(frame + layout.locals + 8 * code.variables, code.stack_size)
            frame = _number_in(raw, layout.previous)
        exceptions = tuple(self._exceptions(address, running))
        return PythonThread(native_id, tuple(frames), exceptions, hash(tuple(marks)), arguments)

    def _arguments(self, address: int, count: int) -> tuple[str | int, ...]:
        found: list[str | int] = []
        for (value,) in struct.iter_unpack("<Q", self.read(address, 8 * min(count, 32))):
            address = 0 if value & _TAG == _TAG else value & ~_TAG
            try:
                if address and (known := self._simple(address)) is not None:
                    found.append(known)
            except (OSError, ValueError, OverflowError):  # left over from an earlier call
                continue
        return tuple(found)

    # Exceptions

    def _exceptions(self, thread: int, running: dict[int, int]) -> Iterator[HandledException]:
        layout = self.layout
        pending, item = [self.number(thread + layout.raised)], self.number(thread + layout.exceptions)
        while item and len(pending) < _MOST_EXCEPTIONS:
            pending.append(self.number(item))
            item = self.number(item + 8)
        for number, address in enumerate(pending):
            if address and (found := self._exception(address, running, raised=number == 0)) is not None:
                yield found

    def _exception(self, address: int, running: dict[int, int], *, raised: bool) -> HandledException | None:
        raw = self.read(address, _EXCEPTION_SIZE)
        name, flags = self._type(_number_in(raw, 8))
        if not flags & _IS_EXCEPTION:
            return None
        if self._version == 0x030B and raised and not _number_in(raw, _TRACEBACK):
            return None  # its traceback is then stored next to it
        frames, cleans_up, entry = list[PythonFrame](), raised, _number_in(raw, _TRACEBACK)
        while entry and len(frames) < _MOST_FRAMES:
            fields = self.read(entry, 40)
            frame = self.number(_number_in(fields, 24) + 24)
            code_address = self.number(frame + self.layout.frame_code) & ~_TAG
            code, at = self._code(code_address), int.from_bytes(fields[32:36], "little", signed=True)
            frames.append(PythonFrame(code.function, code.file, code.line(at)))
            if code_address in running:  # the innermost of these frames handles it
                cleans_up = raised or code.passes_on(at)
            entry = _number_in(fields, 16)
        return HandledException(name, self._text_of(_number_in(raw, _ARGS)), tuple(frames), cleans_up)

    def _text_of(self, args: int) -> str:
        raw = self.read(args, 24)
        if not self._type(_number_in(raw, 8))[1] & _IS_TUPLE:
            return ""
        count = min(_number_in(raw, 16), 8)
        pointers = struct.iter_unpack("<Q", self.read(args + self.layout.items, 8 * count))
        values = [self._simple(value) for (value,) in pointers]
        match values:
            case [str(text)] | [None, str(text)]:
                return text
            case [int(number), str(text), *_]:
                return f"[Errno {number}] {text}"
            case _:
                return ", ".join("..." if value is None else repr(value) for value in values)

    # Objects

    def _type(self, address: int) -> tuple[str, int]:
        """A type's name and flags."""
        raw = self.read(address, _TYPE_SIZE)
        return self.c_text(_number_in(raw, _TYPE_NAME)).rpartition(".")[2], _number_in(raw, _TYPE_FLAGS)

    def _simple(self, address: int) -> str | int | None:
        """A text or a number; None for anything else."""
        raw = self.read(address, 32)
        flags = self._type(_number_in(raw, 8))[1]
        if flags & _IS_STR:
            return self.text(address)
        if not flags & _IS_INT:
            return None
        size = int.from_bytes(raw[16:24], "little", signed=True)
        negative = size < 0 if self._version == 0x030B else size & 3 == 2
        count = abs(size) if self._version == 0x030B else size >> 3
        if count > 2:
            return None
        digits = (int.from_bytes(raw[at : at + 4], "little") for at in (24, 28)[:count])
        value = sum(digit << 30 * place for place, digit in enumerate(digits))
        return -value if negative else value

    def text(self, address: int) -> str:
        """Read a text object. Raises OSError for any other object."""
        head = self.read(address, 40)
        if not self._type(_number_in(head, 8))[1] & _IS_STR:
            raise OSError("the address does not hold a string")
        length, state = _number_in(head, 16), head[32]
        kind, compact, ascii_ = state >> 2 & 7, state >> 5 & 1, state >> 6 & 1
        if not compact or kind not in (1, 2, 4):
            return ""
        at = address + self.layout.text + (0 if ascii_ else 24 if self._version == 0x030B else 16)
        raw = self.read(at, kind * min(length, _MOST_TEXT))
        return raw.decode({1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}[kind], errors="replace")

    def _table(self, address: int) -> bytes:
        size = _number_in(self.read(address, 24), 16)
        if size > _MOST_TABLE:
            raise OSError("the table of line numbers is too large")
        return self.read(address + 32, size)

    def _code(self, address: int) -> _Code:
        if address not in self._codes:
            raw = self.read(address, _CODE_SIZE)
            if _number_in(raw, 8) != self._code_type:
                raise OSError("the address does not hold a code object")
            layout = self.layout
            self._codes[address] = _Code(
                function=self.text(_number_in(raw, _QUALNAME)),
                file=self.text(_number_in(raw, _FILE)),
                first_line=_int_in(raw, layout.first_line),
                variables=min(_int_in(raw, layout.variables), 4096),
                stack_size=_int_in(raw, layout.stack_size),
                instructions=address + layout.instructions,
                lines=self._table(_number_in(raw, _LINES)),
                exceptions=self._table(_number_in(raw, _EXCEPTION_TABLE)),
                reader=self,
            )
        return self._codes[address]


class _Code:
    def __init__(
        self,
        *,
        function: str,
        file: str,
        first_line: int,
        variables: int,
        stack_size: int,
        instructions: int,
        lines: bytes,
        exceptions: bytes,
        reader: _Reader,
    ) -> None:
        self.function, self.file = function, file
        self.variables, self.stack_size, self.instructions = variables, stack_size, instructions
        self._first_line, self._lines, self._exceptions = first_line, lines, exceptions
        self._reader = reader

    def line(self, at: int) -> int:
        """The line of the instruction at the byte offset `at`."""
        line, begins, unit, table = self._first_line, 0, max(at, 0) // 2, iter(self._lines)
        for first in table:
            kind, ends = first >> 3 & 15, begins + (first & 7) + 1
            if kind == 15:  # no location
                step, others = 0, 0
            elif kind in (13, 14):  # a line, and for 14 an end and two columns
                step, others = _signed(_variable(table)), 0
                for _ in range(3 if kind == 14 else 0):
                    _variable(table)
            else:  # 10 to 12: number of lines ahead and two columns; below: one byte of columns
                step, others = (kind - 10, 2) if kind >= 10 else (0, 1)
            for _ in range(others):
                next(table, 0)
            line += step
            if begins <= unit < ends:
                return line
            begins = ends
        return line

    def passes_on(self, at: int) -> bool:
        """Whether the handler of an exception raised at the byte offset `at` passes it on, unlike an `except`."""
        table, unit, handler = iter(self._exceptions), max(at, 0) // 2, -1
        for first in table:
            begins = _variable_from(first, table)
            size, target = _big_endian(table), _big_endian(table)
            _big_endian(table)
            if begins <= unit < begins + size:
                handler = target
                break
        if handler < 0:
            return False
        code = self._reader.read(self.instructions + 2 * handler, 2 * _OF_A_HANDLER)[::2]
        compares, goes_on, drops = self._reader.layout.catches
        return code[1] != drops and bytes((compares, goes_on)) not in code


_OF_A_HANDLER = 48
"""Code units within which an `except` compares the exception with its types."""


def _variable(table: Iterator[int]) -> int:
    """A number, six bits per byte, lowest first."""
    value = shift = 0
    for byte in table:
        value |= (byte & 63) << shift
        shift += 6
        if not byte & 64:
            break
    return value


def _signed(value: int) -> int:
    return -(value >> 1) if value & 1 else value >> 1


def _big_endian(table: Iterator[int]) -> int:
    return _variable_from(next(table, 0), table)


def _variable_from(first: int, table: Iterator[int]) -> int:
    """A number, six bits per byte, highest first."""
    value, byte = first & 63, first
    while byte & 64:
        byte = next(table, 0)
        value = value << 6 | byte & 63
    return value


def _number_in(raw: bytes, at: int) -> int:
    return int.from_bytes(raw[at : at + 8], "little")


def _int_in(raw: bytes, at: int) -> int:
    return int.from_bytes(raw[at : at + 4], "little", signed=True)


# Symbols


_NAMES = ("_PyRuntime", "PyCode_Type")
_VERSION = "Py_Version"
"""Since Python 3.11."""
_MOST_MAPPINGS, _MOST_CHAINED = 4 * 1024 * 1024, 4096


def _python_symbols(reader: _Reader, pid: int) -> dict[str, int]:
    """The addresses of Python's own symbols, in the program or its library."""
    for base in _candidates(pid):
        try:
            found = _symbols(reader, base)
        except (OSError, ValueError, struct.error):  # not an ELF file, or one without symbols
            continue
        if found.keys() >= {*_NAMES}:
            return found
    raise Unreadable("it does not run Python")


def _candidates(pid: int) -> list[int]:
    """Where files that might be Python are mapped: the program, and files with Python's name."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            lines = file.read(_MOST_MAPPINGS).splitlines()
        program = os.fsencode(os.readlink(f"/proc/{pid}/exe"))
    except OSError as error:
        raise Unreadable(f"its mappings cannot be read: {error.strerror}") from None
    found: dict[bytes, int] = {}
    for line in lines:
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[2] == b"00000000":  # the start of a file
            path = fields[5].removesuffix(b" (deleted)")
            if path == program or b"libpython3." in path:
                found.setdefault(path, int(fields[0].partition(b"-")[0], 16))
    return list(found.values())


def _symbols(reader: _Reader, base: int) -> dict[str, int]:
    """The addresses of our names, from the dynamic table of an ELF file in memory."""
    head = reader.read(base, 64)
    if head[:6] != b"\x7fELF\x02\x01":
        raise OSError("it is not a 64-bit ELF file")
    offset, (size, count) = _number_in(head, 32), struct.unpack("<HH", head[54:58])
    loads, dynamic = [], 0
    for number in range(min(count, 64)):
        kind, _, _, address = struct.unpack("<IIQQ", reader.read(base + offset + number * size, 24))
        if kind == 1:
            loads.append(address)
        elif kind == 2:
            dynamic = address
    bias = base - (min(loads) & ~0xFFF) if loads else 0
    tags: dict[int, int] = {}
    for number in range(128):
        tag, value = struct.unpack("<QQ", reader.read(bias + dynamic + 16 * number, 16))
        if tag == 0:
            break
        tags[tag] = value
    # glibc adds the file's load address to these; musl does not.
    texts, table, hashes = (
        value + bias if value < base else value for value in (tags.get(tag, 0) for tag in (5, 6, 0x6FFFFEF5))
    )
    found = {}
    for name in (*_NAMES, _VERSION):
        if address := _symbol(reader, name.encode(), texts, table, hashes):
            found[name] = bias + address
    return found


def _symbol(reader: _Reader, name: bytes, texts: int, table: int, hashes: int) -> int:
    """The value of a symbol in the GNU hash table; 0 if it is missing."""
    wanted = 5381
    for byte in name:
        wanted = (wanted * 33 + byte) & 0xFFFFFFFF
    buckets, first, blooms, _ = struct.unpack("<4I", reader.read(hashes, 16))
    chains = hashes + 16 + 8 * blooms + 4 * buckets
    begin = struct.unpack("<I", reader.read(hashes + 16 + 8 * blooms + 4 * (wanted % buckets), 4))[0] if buckets else 0
    for at in range(begin, begin + _MOST_CHAINED if begin >= first else begin):
        found = struct.unpack("<I", reader.read(chains + 4 * (at - first), 4))[0]
        if found | 1 == wanted | 1:
            text, _, _, _, value, _ = struct.unpack("<IBBHQQ", reader.read(table + 24 * at, 24))
            if reader.read(texts + text, len(name) + 1) == name + b"\0":
                return int(value)
        if found & 1:
            break
    return 0
