/* Memory blocks, shared values, and rings of nodes.
 *
 * Any block may be refused. Callers check for NULL before they change anything; on failure only the connection being
 * served ends (NO_MEMORY), and all others continue.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Borrowed bytes, valid as long as their owner keeps them. */
typedef struct {
    const uint8_t *bytes;
    size_t size;
} Text;

/* A value with a reference count. A shared value never changes, but may become longer. */
typedef struct {
    size_t holders;
    size_t size, room;
    uint8_t bytes[];
} Blob;

/* A node in a ring; one in no ring has no neighbours. */
typedef struct Node {
    struct Node *before, *after;
} Node;

void *get_block(void *block, size_t size); /* realloc; NULL and no change without memory */
Blob *blob_new(Text);
Blob *blob_room(size_t room);
Blob *blob_hold(Blob *);
void blob_drop(Blob *);
Blob *blob_assign(Blob *old, Text value);                /* with these bytes, in place of `old`, which it may reuse */
Blob *blob_extend(Blob *old, Text more, uint64_t limit); /* NULL, and `old` unchanged, without memory */
void ring_open(Node *);
void ring_add(Node *ring, Node *);
void ring_remove(Node *);            /* does nothing if it is in no ring */
bool ring_is_empty(const Node *ring);
void ring_move(Node *ring, Node *from); /* another ring to the end of this one, in constant time */
#define MEMBER(node, type, field) ((type *)((char *)(node) - offsetof(type, field)))
#define FIRST(ring, type, field) ((ring)->after == (ring) ? NULL : MEMBER((ring)->after, type, field))
