/* Blocks of memory and values that several hold. */
#include "core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *claim(void *block, size_t size)
{
    void *found = realloc(block, size ? size : 1);
    if (found == NULL) {
        fprintf(stderr, "rallypoint: the store needs %zu bytes more and this process may not have them\n", size);
        abort();
    }
    return found;
}

Blob *blob_room(size_t room)
{
    Blob *blob = claim(NULL, sizeof(Blob) + room);
    blob->holders = 1;
    blob->size = 0;
    blob->room = room;
    return blob;
}

Blob *blob_new(const uint8_t *bytes, size_t size)
{
    Blob *blob = blob_room(size);
    blob->size = size;
    if (size)
        memcpy(blob->bytes, bytes, size);
    return blob;
}

Blob *blob_hold(Blob *blob)
{
    blob->holders++;
    return blob;
}

void blob_drop(Blob *blob)
{
    if (blob != NULL && --blob->holders == 0)
        free(blob);
}

Blob *blob_assign(Blob *old, Text value)
{
    /* Most keys that are set again are set to as much: counters, and states of a known shape. */
    if (old != NULL && old->holders == 1 && old->room >= value.size && old->room <= 2 * value.size + 64) {
        old->size = value.size;
        memcpy(old->bytes, value.bytes, value.size);
        return old;
    }
    blob_drop(old);
    return blob_new(value.bytes, value.size);
}

Blob *blob_extend(Blob *old, Text more)
{
    if (old == NULL)
        return blob_new(more.bytes, more.size);
    size_t size = old->size + more.size;
    if (old->holders > 1) { /* it is on its way to somebody: that must stay as it is */
        Blob *copy = blob_room(size);
        memcpy(copy->bytes, old->bytes, old->size);
        copy->size = old->size;
        blob_drop(old);
        old = copy;
    } else if (old->room < size) {
        size_t room = size + size / 2; /* many appends in a row cost as much as one */
        old = claim(old, sizeof(Blob) + room);
        old->room = room;
    }
    if (more.size)
        memcpy(old->bytes + old->size, more.bytes, more.size);
    old->size = size;
    return old;
}
