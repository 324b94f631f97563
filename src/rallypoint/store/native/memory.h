/* Blocks of memory, values that several hold, and rings of neighbours.
 *
 * Any block may be refused. Whoever asks for one looks, and changes nothing before he has it; then the connection for
 * which it was ends (NO_MEMORY), and all others go on.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes of somebody else, for as long as he keeps them. */
typedef struct {
    const uint8_t *bytes;
    size_t size;
} Text;

/* A value. Whoever holds it counts. What others hold of it stays as it is: it may only become longer. */
typedef struct {
    size_t holders;
    size_t size, room;
    uint8_t bytes[];
} Blob;

/* A place in a ring of neighbours; one that is in no ring has none. */
typedef struct Node {
    struct Node *before, *after;
} Node;

void *get_block(void *block, size_t size); /* realloc; NULL and no change if it cannot be had */
Blob *blob_new(Text);
Blob *blob_room(size_t room);
Blob *blob_hold(Blob *);
void blob_drop(Blob *);
Blob *blob_assign(Blob *old, Text value);                /* of these bytes, in place of `old`, which may be it */
Blob *blob_extend(Blob *old, Text more, uint64_t limit); /* NULL, and `old` as it was, if it cannot be */
void ring_open(Node *);
void ring_add(Node *ring, Node *);
void ring_remove(Node *);            /* does nothing if it is in none */
bool ring_is_empty(const Node *ring);
void ring_move(Node *ring, Node *from); /* all of another ring to the end of this one, at no cost for each */
#define MEMBER(node, type, field) ((type *)((char *)(node) - offsetof(type, field)))
#define FIRST(ring, type, field) ((ring)->after == (ring) ? NULL : MEMBER((ring)->after, type, field))
