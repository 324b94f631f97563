/* Lists of all keys. */
#pragma once

#include "store.h"

/* A list of all keys that is being sent, as they were when it was asked for. */
struct Listing {
    Node node; /* among all of them, the newest first */
    Conn *conn;
    uint64_t number;
    size_t at;    /* the part that is next */
    Blob **names; /* of the parts that have changed since, what was in them; none before one has */
};

bool list_begin(Store *, Conn *);
void list_some(Store *, Conn *); /* until the slice is over, or the room for replies */
void list_end(Conn *);
void list_keep_snapshot(Store *, size_t shard); /* before a name comes or goes there */
