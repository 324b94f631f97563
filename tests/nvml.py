"""A stand-in for NVIDIA's management library that answers from a file, so that successive looks differ.

Each line of the file is a GPU: bytes in all, bytes in use, and `pid:bytes` for each process, which may have `?` for
bytes that are unknown. `-` stands for what the driver refuses: `- - -`. A file with the word `hang` makes the library
wait until the file changes. Each initialization adds a byte to the file `asked` beside it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for a stand-in of the library")

_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char address[32]; };
struct memory { unsigned long long total, free, used; };
struct process { unsigned pid; unsigned long long used; unsigned instance, compute; };
static char text[1 << 16];
static int lines(void) {  /* reads the file; returns the number of its lines */
    FILE *file = fopen(FOLDER "/gpus", "r");
    size_t size = file ? fread(text, 1, sizeof text - 1, file) : 0;
    text[size] = 0;
    if (file) fclose(file);
    if (!strncmp(text, "hang", 4)) { usleep(10000); return lines(); }
    int count = 0;
    for (char *at = text; *at; at++) count += *at == '\n';
    return count;
}
static char *line(void *handle) {
    lines();
    char *at = text;
    for (long n = 1; n < (long)handle; n++) at = strchr(at, '\n') + 1;
    *strchrnul(at, '\n') = 0;
    return at;
}
int nvmlInit_v2(void) {
    FILE *file = fopen(FOLDER "/asked", "a");
    fputc('.', file);
    fclose(file);
    return 0;
}
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = lines(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned n, void **handle) { *handle = (void *)(long)(n + 1); return 0; }
int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned size) {
    snprintf(uuid, size, "GPU-%ld", (long)handle - 1);
    return 0;
}
int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *info) { info->bus = (long)handle; return 0; }
#ifndef OLD
const char *nvmlErrorString(int code) { return code == 3 ? "Not Supported" : "Unknown Error"; }
int nvmlSystemGetDriverVersion(char *version, unsigned size) { snprintf(version, size, "580.00"); return 0; }
int nvmlDeviceGetName(void *handle, char *name, unsigned size) { snprintf(name, size, "Fake H100"); return 0; }
int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory) {
    return sscanf(line(handle), "%llu %llu", &memory->total, &memory->used) == 2 ? 0 : 3;
}
int PROCESSES(void *handle, unsigned *count, struct process *processes) {
    char *at = line(handle);
    unsigned room = *count;
    *count = 0;
    strtok(at, " "); strtok(0, " ");
    for (char *word; (word = strtok(0, " ")); ++*count) {
        if (*word == '-') return 3;
        if (*count >= room) continue;
        char *used = strchr(word, ':') + 1;
        struct process *process = processes + *count;
        process->pid = atoi(word);
        process->used = *used == '?' ? ~0ULL : strtoull(used, 0, 10);
        process->instance = process->compute = ~0u;
    }
    return *count > room ? 7 : 0;
}
#endif
"""


def compiled(folder: Path, source: str, *flags: str) -> str:
    """Compile a stand-in for the library; returns its path."""
    library = str(folder / "libnvidia-ml.so.1")
    command = ["cc", "-shared", "-fPIC", *flags, "-x", "c", "-", "-o", library]
    subprocess.run(command, input=source, text=True, check=True)
    return library


class StandIn:
    """The library, and the folder with its answers.

    Args:
        folder: an empty folder.
        flags: of the compiler: `OLD` is a library without these functions, `PROCESSES` the name of one.
    """

    def __init__(self, folder: Path, flags: Sequence[str] = ()) -> None:
        self.folder = folder
        self.gpus = folder / "gpus"
        named = "-DPROCESSES=nvmlDeviceGetComputeRunningProcesses_v3"
        self.library = compiled(folder, _SOURCE, "-D_GNU_SOURCE", f'-DFOLDER="{folder}"', named, *flags)
        self.answer()

    def answer(self, *gpus: str) -> None:
        """Answer this from now on; the file is replaced in one step."""
        new = self.folder / "new"
        new.write_text("".join(f"{gpu}\n" for gpu in gpus))
        os.replace(new, self.gpus)

    def asked(self) -> int:
        """How many times the library was initialized."""
        asked = self.folder / "asked"
        return asked.stat().st_size if asked.exists() else 0
