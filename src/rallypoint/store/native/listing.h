/* Lists of all keys. */
#pragma once

#include "store.h"

/* A list of all keys that is being sent: a snapshot from when it was requested. */
struct Listing {
    Node node; /* among all of them, the newest first */
    Conn *conn;
    uint64_t number;
    size_t at;    /* the next part */
    Blob **names; /* the old names of parts that have changed since; NULL before the first change */
};

bool list_begin(Store *, Conn *);
void list_some(Store *, Conn *); /* until the slice or the room for replies ends */
void list_end(Conn *);
void list_keep_snapshot(Store *, size_t shard); /* before a name is added or removed there */
