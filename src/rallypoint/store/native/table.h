/* All names of a store: a hash table in parts. What returns NULL for want of memory has changed nothing. */
#pragma once

#include "memory.h"

enum {
    OVERHEAD = 64, /* bytes that a key, and a value in a queue, count beside their own */
    SHARDS = 1024, /* parts of the table; what must be done to all keys is done part by part */
};

typedef struct Slot Slot;

/* One value of a queue. */
typedef struct Item {
    struct Item *next;
    Blob *value;
} Item;

/* All that goes by one name; it is there as long as there is any of it. */
struct Slot {
    Slot *next; /* in the bucket */
    uint64_t hash;
    Blob *value;
    Item *oldest, *newest;
    uint64_t queued;
    Node waiters; /* `Link` (`waiting.h`) of each, in the order in which they came */
    size_t size;
    uint8_t key[];
};

typedef struct {
    Slot **buckets; /* none before the first key */
    size_t mask;    /* buckets less 1 */
    size_t slots;
    uint64_t listed; /* the number of the last listing that was given the names of this part */
} Shard;

typedef struct {
    Shard shards[SHARDS];
    uint64_t secret[2];
    uint64_t values; /* slots that have a value */
    uint64_t keys;   /* slots with a value or a queue */
    uint64_t bytes;  /* of all keys that have a value, values and queues */
} Table;

void table_open(Table *);
void table_close(Table *);
Slot *table_find(const Table *, Text key);
Slot *table_find_or_make(Table *, Text key);
void table_tidy(Table *, Slot *); /* a name of which nothing is left is forgotten */
size_t table_shard(const Slot *); /* the part that it is in */
