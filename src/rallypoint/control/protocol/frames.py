"""Frames of the control plane: a four-byte length, big-endian, and that many bytes. Pure and bounded."""

from __future__ import annotations

MAX_FRAME = 64 * 1024
"""Bytes that one message may have. The largest, a failure with its traceback, stays far below it."""

SIGNATURE_SIZE = 16
"""Bytes of it that the signature takes, if frames are signed (`signing`)."""

MAGIC = b"RALLYPT\n"
"""The first bytes from both sides, so that each knows at once whether its peer is one of ours."""

TLS_HANDSHAKE = b"\x16"
"""The first byte of a TLS connection, in place of the magic (RFC 8446, section 5.1)."""


class FrameError(Exception):
    """These bytes are not our frames; the text says what was seen."""


def frame(payload: bytes) -> bytes:
    """One message ready to send.

    Raises:
        FrameError: it is larger than a frame may be.
    """
    if len(payload) > MAX_FRAME:
        check_size(len(payload))
    return len(payload).to_bytes(4, "big") + payload


def check_size(size: int) -> None:
    """Raise FrameError if a message of `size` bytes, with its signature, is larger than a frame may be."""
    most = MAX_FRAME - SIGNATURE_SIZE
    if size > most:
        raise FrameError(f"a message of {size} bytes is larger than a frame may be ({most} bytes)")


class SignatureError(FrameError):
    """A frame was not signed with this session's key, or is not the next one of its direction."""


class FrameReader:
    """Cuts a stream of bytes into frames, after the magic that must come first.

    It raises at the first invalid byte and never holds more than one frame and what arrived with it.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._greeted = False

    @property
    def has_partial_frame(self) -> bool:
        """Whether there are bytes of an incomplete frame."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes and return the frames that are now complete.

        Raises:
            FrameError: the bytes are not ours. The reader cannot be used afterwards.
        """
        self._buffer += data
        if not self._greeted:
            seen = bytes(self._buffer[: len(MAGIC)])
            if not MAGIC.startswith(seen):
                raise FrameError(f"it starts with {bytes(self._buffer[:16])!r}, which is not Rallypoint's greeting")
            if len(seen) < len(MAGIC):
                return []
            del self._buffer[: len(MAGIC)]
            self._greeted = True
        frames = []
        while len(self._buffer) >= 4:
            length = int.from_bytes(self._buffer[:4], "big")
            if length > MAX_FRAME:
                raise FrameError(f"a frame claims {length} bytes, more than the {MAX_FRAME} that a frame may have")
            if len(self._buffer) < 4 + length:
                break
            frames.append(bytes(self._buffer[4 : 4 + length]))
            del self._buffer[: 4 + length]
        return frames
