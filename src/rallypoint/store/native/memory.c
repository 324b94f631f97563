/* Memory blocks, shared values, and rings of nodes. */
#include "memory.h"

#include <stdlib.h>
#include <string.h>

#ifdef STORE_MEMORY_FAILS /* for tests: decides whether a block is refused */
bool STORE_MEMORY_FAILS(void);
#else
#define STORE_MEMORY_FAILS() false
#endif

void *get_block(void *block, size_t size)
{
    return STORE_MEMORY_FAILS() ? NULL : realloc(block, size ? size : 1);
}

Blob *blob_room(size_t room)
{
    Blob *blob = get_block(NULL, sizeof(Blob) + room);
    if (blob != NULL)
        *blob = (Blob){.holders = 1, .room = room};
    return blob;
}

Blob *blob_new(Text text)
{
    Blob *blob = blob_room(text.size);
    if (blob != NULL) {
        blob->size = text.size;
        if (text.size)
            memcpy(blob->bytes, text.bytes, text.size);
    }
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
    /* Most keys are overwritten with values of the same size: counters, and states of a known shape. */
    if (old != NULL && old->holders == 1 && old->room >= value.size && old->room <= 2 * value.size + 64) {
        old->size = value.size;
        memcpy(old->bytes, value.bytes, value.size);
        return old;
    }
    Blob *made = blob_new(value);
    if (made != NULL)
        blob_drop(old);
    return made;
}

Blob *blob_extend(Blob *old, Text more, uint64_t limit)
{
    if (old == NULL)
        return blob_new(more);
    size_t size = old->size + more.size;
    if (old->room < size) {
        size_t room = size + size / 2; /* amortizes repeated appends */
        if (room > limit)
            room = limit > size ? (size_t)limit : size;
        bool shared = old->holders > 1; /* it is being sent: it must stay in place until then */
        Blob *made = shared ? blob_room(room) : get_block(old, sizeof(Blob) + room);
        if (made == NULL)
            return NULL;
        if (shared) {
            memcpy(made->bytes, old->bytes, old->size);
            made->size = old->size;
            blob_drop(old);
        }
        made->room = room;
        old = made;
    }
    if (more.size)
        memcpy(old->bytes + old->size, more.bytes, more.size);
    old->size = size;
    return old;
}

void ring_open(Node *ring)
{
    ring->before = ring->after = ring;
}

void ring_add(Node *ring, Node *node)
{
    node->before = ring->before;
    node->after = ring;
    ring->before->after = node;
    ring->before = node;
}

bool ring_is_empty(const Node *ring)
{
    return ring->after == ring;
}

void ring_move(Node *ring, Node *from)
{
    if (ring_is_empty(from))
        return;
    from->after->before = ring->before;
    ring->before->after = from->after;
    from->before->after = ring;
    ring->before = from->before;
    ring_open(from);
}

void ring_remove(Node *node)
{
    if (node->after == NULL)
        return;
    node->before->after = node->after;
    node->after->before = node->before;
    node->before = node->after = NULL;
}
