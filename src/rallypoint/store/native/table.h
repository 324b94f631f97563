/* The names of a store: a hash table in parts. A function that returns NULL for lack of memory has changed nothing. */
#pragma once

#include "memory.h"

enum {
    OVERHEAD = 64, /* bytes counted for a key or a value in a queue, besides its own */
    SHARDS = 1024, /* parts of the table; work on all keys goes part by part */
};

typedef struct Slot Slot;

/* One value of a queue. */
typedef struct Item {
    struct Item *next;
    Blob *value;
} Item;

/* Everything with one name; it exists while there is any of it. */
struct Slot {
    Slot *next; /* in the bucket */
    uint64_t hash;
    Blob *value;
    Item *oldest, *newest;
    uint64_t queued;
    Node waiters; /* a `Link` (`waiting.h`) for each, in order of arrival */
    size_t size;
    uint8_t key[];
};

typedef struct {
    Slot **buckets; /* NULL before the first key */
    size_t mask;    /* buckets less 1 */
    size_t slots;
    uint64_t listed; /* the number of the last listing that got this part's names */
} Shard;

typedef struct {
    Shard shards[SHARDS];
    uint64_t secret[2];
    uint64_t values; /* slots that have a value */
    uint64_t keys;   /* slots with a value or a queue */
    uint64_t bytes;  /* of all keys with a value, values and queues */
} Table;

void table_open(Table *);
void table_close(Table *);
Slot *table_find(const Table *, Text key);
Slot *table_find_or_make(Table *, Text key);
void table_tidy(Table *, Slot *); /* removes a name with nothing left */
size_t table_shard(const Slot *); /* its part */
