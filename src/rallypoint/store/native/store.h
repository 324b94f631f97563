/* What a store and its connections consist of, and what every file may do to a connection: end it later, or ask the
 * kernel again what is ready there. */
#pragma once

#include "table.h"

#ifndef STORE_SLICE /* for tests: so few that all is done in many slices */
#define STORE_SLICE 1024
#endif

enum {
    BLOCK = 4 * 1024,      /* bytes of replies to one connection after which its room is looked at */
    PIECE = 64 * 1024,     /* most bytes that are read at once, unless a request that has begun needs more */
    OUT_ROOM = 256 * 1024, /* bytes of small replies that wait to be sent */
    OUT_SEGMENTS = 4096,
    SLICE = STORE_SLICE,   /* steps of one connection before others have their turn: some 100 microseconds */
    STEP = 4096,           /* bytes that count as one step */
};

typedef struct Conn Conn;
typedef struct Store Store;
typedef struct Waiting Waiting; /* `waiting.h` */
typedef struct Listing Listing; /* `listing.h` */

/* Bytes for which a connection has no room. */
typedef struct Piece {
    struct Piece *next;
    Blob *blob;
    size_t at, end;
} Piece;

/* A request of many keys of which some were seen to. */
typedef enum { NOTHING, CHECKING, LOOKING, ENLISTING, GETTING } Doing;

struct Conn {
    Node all, unvalidated, doomed; /* everybody; not greeted; to be closed */
    Node busy; /* with work that no event tells of, or held */
    int fd;
    bool greeted;
    bool full;   /* the kernel has no room for replies */
    bool over;   /* no more requests are taken */
    bool failed; /* there was no memory for what it is owed */
    bool reading_stopped; /* it reads no replies any more */
    uint64_t since; /* when it came */

    /* What has come and is not yet done. */
    uint8_t *input;
    size_t input_at, input_size, input_room;
    size_t want;       /* how long the input must be before it is worth another look */
    size_t keys_at;    /* in a request of many keys: where the first is that was not seen whole, and how many are not */
    uint64_t keys_left;
    uint64_t pairs_left; /* of the MULTI_SET that is being read */

    Doing doing; /* with a request of many keys that has come whole: which key is next, how many are left, its end */
    size_t doing_at, doing_end;
    uint64_t doing_left;

    Waiting *waiting;
    Listing *listing;
    uint64_t keys, bytes; /* by how much it has made the table larger */

    Piece *backlog, *backlog_end;
};

/* Replies to one connection: bytes in the store's `out`, or a value. */
typedef struct {
    Conn *conn;
    Blob *blob;
    size_t at, size;
} Segment;

/* Why a connection is refused; `wire.py` has the sentences. */
typedef enum {
    REFUSE_NOTHING, LONG_KEY, LONG_VALUE, MANY_KEYS, WRONG_MAGIC, NO_GREETING, GREETED_AGAIN, UNKNOWN_OPCODE, NO_NUMBER,
    NO_MEMORY, LONG_REQUEST, GROWN_VALUE, KEYS_OF_ONE, BYTES_OF_ONE, SILENT, NOT_A_PEER, OTHER_USER
} Reason;

typedef struct {
    Reason reason;
    uint64_t number;
    Text first, second;
} Refusal;

/* What a store grants; `StoreGuard` (transport.py) explains it. */
typedef struct {
    uint64_t retry;    /* nanoseconds for which nobody is accepted where means were lacking */
    uint64_t greeting; /* nanoseconds that a connection has to greet; 0 for ever */
    uint64_t connections, request, value, keys, bytes;
} Limits;

/* A network, as IPv6 has it. */
typedef struct {
    uint8_t address[16];
    uint8_t bits;
} Network;

struct Store {
    Table table;
    Limits limits;
    int epoll, listener, wake; /* no listener: -1 */
    int descriptors;           /* from this number on they are for others in this process */
    bool woken;
    bool at_connection_limit; /* it does not listen because there are enough connections */
    uint64_t accept_again_at; /* 0 while it listens */

    bool guarded; /* only `peers` may connect */
    Network *peers;
    size_t peer_count, host_count; /* so many of them, the first, are single addresses, in order */

    Node all, unvalidated, busy, doomed; /* rings of connections */
    size_t conn_count;
    Node held;      /* connections that are busy again as soon as `waking` is empty */
    Node waking;    /* links to keys that have come, whose connections do not know it yet */
    Node cancelled; /* of what is waited for by nobody any more */
    Node listings;
    uint64_t listing_number;

    uint8_t *out; /* small replies, in the order in which they were made: OUT_ROOM bytes */
    size_t out_size;
    Segment *segments; /* OUT_SEGMENTS of them */
    size_t segment_count;
    Conn *serving;  /* the connection that is being served; bytes that are owed to it, and steps that it has taken */
    size_t owed, steps;

    uint8_t *intake; /* PIECE bytes */

    void (*refused)(Store *, int fd, const Refusal *); /* report it */
    /* Nobody can be accepted: no means, or with 0 enough connections. What `descriptors` is to be; if that is
     * something else than before, it is tried again at once, and else after a while. */
    int (*cannot_accept)(Store *, int error);
    bool (*is_other_user)(Store *, int fd); /* whether another user of this machine has connected; NULL: nobody asks */
};

uint64_t monotonic_now(void);                /* nanoseconds */
bool store_watch(Store *, int fd, void *as); /* have the kernel say when there is something to read */
void conn_doom(Store *, Conn *);             /* end it, as soon as nothing is in the midst of anything */
void conn_fail(Store *, Conn *);             /* the same, for there is no memory for it */
bool conn_watch(Store *, Conn *);            /* have the kernel say what is ready there */
void conn_rearm(Store *, Conn *);            /* once more, although nothing has changed */
